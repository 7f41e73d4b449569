"""KV-cache reuse for Hugging Face models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost.config import EngineConfig
    from kvboost.engine import KVBoost
    from kvboost.engine.attach import Attached, attach
    from kvboost.errors import CapacityError, ConfigError, KVBoostError, StoreError, UnsupportedModelError
    from kvboost.types import (
        CacheStats,
        GenerationMode,
        GenerationResult,
        PrefillResult,
        ReuseReport,
        Score,
        StreamPiece,
    )

__version__ = "1.0.0rc1"

__all__ = [
    "Attached",
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
    "Score",
    "StoreError",
    "StreamPiece",
    "UnsupportedModelError",
    "attach",
]

_HOMES = {
    "EngineConfig": "kvboost.config",
    "KVBoost": "kvboost.engine",
    **dict.fromkeys(("Attached", "attach"), "kvboost.engine.attach"),
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
            "Score",
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
