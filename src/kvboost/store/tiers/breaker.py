"""A circuit breaker: whatever fails is left alone until a look at it in the background succeeds.

Used by tiers behind a network. Invariants: no request ever waits for a look; the first failure opens the breaker, so
that a request pays for one at most; the looks come less often the longer it fails, at least every few seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 4.0
_HEALTHY_AFTER_S = 10.0  # closed for so long, the next failure is a new one


class Breaker:
    """Open while something is broken. Thread-safe."""

    def __init__(self, probe: Callable[[], bool], *, name: str) -> None:
        """``probe`` says whether all is well again; it is called in a thread of its own and must come back."""
        self._probe = probe
        self._name = name
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._open = False
        self._delay = _FIRST_DELAY_S
        self._closed_at = -_HEALTHY_AFTER_S

    @property
    def is_open(self) -> bool:
        """Whether requests must do without."""
        return self._open

    def failed(self) -> None:
        """It failed: open, and look at it in the background."""
        with self._lock:
            if self._open or self._ended.is_set():
                return
            if time.monotonic() - self._closed_at > _HEALTHY_AFTER_S:
                self._delay = _FIRST_DELAY_S
            threading.Thread(target=self._look, name=self._name, daemon=True).start()
            self._open = True  # only now: without the thread it would stay open

    def close(self) -> None:
        """Look no more; it stays open."""
        with self._lock:
            self._open = True
            self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(self._delay):
            self._delay = min(2 * self._delay, _MAX_DELAY_S)
            try:
                is_healthy = self._probe()
            except BaseException:  # noqa: BLE001 - whatever it is (a panic of obstore too), it is probed again
                is_healthy = False
            if is_healthy:
                with self._lock:
                    self._open = self._ended.is_set()
                    self._closed_at = time.monotonic()
                return
