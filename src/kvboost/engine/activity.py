"""Whether an engine's model is in use, for work that must not slow a request down.

Used by the engine for its shadow checks. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

_QUIET_S = 0.2  # a batch runner leaves its model for a moment between two steps


class Activity:
    """Counts the requests that use the model: ``with activity``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running, self._ended = 0, 0.0

    def idle(self) -> bool:
        """Whether the model has not been used for a moment."""
        with self._lock:
            return not self._running and time.monotonic() - self._ended > _QUIET_S

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._running -= 1
            self._ended = time.monotonic()
