"""Whether Ray is there. Asked before any module that imports it."""

from __future__ import annotations

from importlib.util import find_spec

from kvboost.errors import ConfigError, with_extra


def need_ray() -> None:
    """Raise ConfigError without Ray."""
    if find_spec("ray") is None:
        raise ConfigError(f"ray is missing; {with_extra('ray')}")
