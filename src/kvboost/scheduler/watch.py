"""Notices a step that does not end.

Used by :mod:`kvboost.scheduler.runner`. Invariant: a step that takes too long is told once, from a thread of its own:
the runner's is the one that hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvboost.errors import ConfigError
from kvboost.failures import at_work

_log = logging.getLogger("kvboost.engine")


class StepWatch:
    """Times the steps of one thread."""

    def __init__(self, thread: threading.Thread, *, max_seconds: float, hung: Callable[[str], None]) -> None:
        """``hung`` is called, with what to say, once a step has taken longer than ``max_seconds``."""
        if not 0 < max_seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(f"max_step_seconds={max_seconds} is no time that a step may take; give 600 or so")
        self._thread, self._max_seconds, self._hung = thread, max_seconds, hung
        self._began: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="kvboost-watch", daemon=True).start()

    def begin(self) -> None:
        """A step begins now."""
        self._began = time.monotonic()

    def end(self) -> None:
        """It has ended; the next one may be long in coming."""
        self._began = None

    @property
    def seconds(self) -> float:
        """Since the step that runs began; 0 if none runs."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def hangs(self) -> bool:
        """Whether that is too long."""
        return self.seconds >= self._max_seconds

    def close(self) -> None:
        """There are no more steps."""
        self.end()
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(max(0.0, self._max_seconds - self.seconds)):
            if self.hangs:
                failure = f"a step took more than {self._max_seconds:g} s, so the runner accepts no more jobs"
                _log.error("%s; it is at %s", failure, at_work(self._thread))
                return self._hung(failure)
