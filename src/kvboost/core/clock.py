"""Time by stage, counted from the user's call."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import Any


class StageClock:
    """Starts when made. ``lap(stage)`` adds the time since the last lap to ``stage``."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._stages: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to ``stage``."""
        now = time.perf_counter()
        self._stages[stage] = self._stages.get(stage, 0.0) + (now - self._last) * 1000.0
        self._last = now

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the call."""
        return (time.perf_counter() - self._start) * 1000.0

    def stages(self) -> MappingProxyType[str, Any]:
        """Milliseconds by stage."""
        return MappingProxyType(dict(self._stages))
