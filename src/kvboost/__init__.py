"""KV-cache reuse for Hugging Face models."""

from kvboost.config import EngineConfig
from kvboost.engine import KVBoost
from kvboost.errors import CapacityError, ConfigError, KVBoostError, StoreError, UnsupportedModelError
from kvboost.types import (
    CacheStats,
    GenerationMode,
    GenerationResult,
    PrefillResult,
    ReuseReport,
    StreamPiece,
)

__version__ = "1.0.0.dev0"

__all__ = [
    "CacheStats",
    "CapacityError",
    "ConfigError",
    "EngineConfig",
    "GenerationMode",
    "GenerationResult",
    "KVBoost",
    "KVBoostError",
    "PrefillResult",
    "ReuseReport",
    "StoreError",
    "StreamPiece",
    "UnsupportedModelError",
]
