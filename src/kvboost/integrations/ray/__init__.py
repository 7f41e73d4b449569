"""Ray for a fleet: replicas under Ray Serve. See ``docs/fleet.md``.

``kvboost serve --ray`` starts here. Ray is imported when it runs, not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvboost.integrations.ray.config import RayConfig

if TYPE_CHECKING:
    from kvboost.integrations.ray.app import build_app, run_app

__all__ = ["RayConfig", "build_app", "run_app"]


def __getattr__(name: str) -> Any:
    if name not in ("build_app", "run_app"):
        raise AttributeError(f"module 'kvboost.integrations.ray' has no attribute {name!r}")
    from kvboost.integrations.ray.config import need_ray

    need_ray()
    return getattr(importlib.import_module("kvboost.integrations.ray.app"), name)
