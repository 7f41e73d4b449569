"""KV-cache reuse for Hugging Face models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost.config import EngineConfig
    from kvboost.engine import KVBoost
    from kvboost.errors import CapacityError, ConfigError, KVBoostError, StoreError, UnsupportedModelError
    from kvboost.types import (
        CacheStats,
        GenerationMode,
        GenerationResult,
        PrefillResult,
        ReuseReport,
        Speculation,
        StreamPiece,
    )

__version__ = "1.0.0rc1"

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
    "Speculation",
    "StoreError",
    "StreamPiece",
    "UnsupportedModelError",
]

_HOMES = {
    "EngineConfig": "kvboost.config",
    "KVBoost": "kvboost.engine",
    **dict.fromkeys(
        ("CapacityError", "ConfigError", "KVBoostError", "StoreError", "UnsupportedModelError"), "kvboost.errors"
    ),
    **dict.fromkeys(
        (
            "CacheStats",
            "GenerationMode",
            "GenerationResult",
            "PrefillResult",
            "ReuseReport",
            "Speculation",
            "StreamPiece",
        ),
        "kvboost.types",
    ),
}


def __getattr__(name: str) -> Any:
    # Torch and Transformers take seconds to import: help texts and shell completion must not wait for them.
    if name not in _HOMES:
        raise AttributeError(f"module 'kvboost' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
