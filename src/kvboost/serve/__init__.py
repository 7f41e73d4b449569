"""The OpenAI-compatible server: HTTP around an engine and a runner of jobs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost.serve.config import ServerConfig
    from kvboost.serve.run import serve
    from kvboost.serve.security.auth import Keys
    from kvboost.serve.security.limits import Limits

__all__ = ["Keys", "Limits", "ServerConfig", "serve"]

_MODULES = {"Keys": "security.auth", "Limits": "security.limits", "ServerConfig": "config", "serve": "run"}


def __getattr__(name: str) -> Any:
    # The command line takes the settings' names from here: its help must wait neither for torch nor for FastAPI.
    if name not in _MODULES:
        raise AttributeError(f"module 'kvboost.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvboost.serve.{_MODULES[name]}"), name)
