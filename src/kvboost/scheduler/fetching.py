"""Loads the stored KV of waiting jobs from slower tiers, so that the model's thread never waits for one.

Used by the batch runner. Invariants: a tier is only asked by the thread of the job's store; a job waits for its KV no
longer than computing it is expected to take, within limits; what has not come by then is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from kvboost.core.session import Session
from kvboost.core.state import ChunkedPrompt
from kvboost.failures import log_failure
from kvboost.types import Fetched

_MIN_SECONDS = 2.0  # waited in any case: the first request to a tier connects
_MAX_SECONDS = 30.0  # also of a prompt that takes minutes to compute
_UNKNOWN_SECONDS = 10.0  # before anything was computed

_log = logging.getLogger("kvboost.engine")


class JobFetch:
    """What is loaded for one job while it waits."""

    def __init__(self, session: Session, prompt: ChunkedPrompt, *, approx: bool, wake: Callable[[], None]) -> None:
        """``wake`` is called when loading has ended."""
        self._session, self._prompt, self._approx, self._wake = session, prompt, approx, wake
        expected = session.prefiller.expected_seconds(len(prompt.tokens))
        limit = _UNKNOWN_SECONDS if expected is None else min(max(expected, _MIN_SECONDS), _MAX_SECONDS)
        self._deadline = time.monotonic() + limit
        self._future: Future[Fetched] | None = None
        self._begin()

    def _begin(self) -> None:
        self._future = self._session.fetch(self._prompt, approx=self._approx)
        if self._future is not None:
            self._future.add_done_callback(lambda _: self._wake())

    @property
    def is_over(self) -> bool:
        """Whether the job need not wait any longer."""
        if self._future is not None and self._future.done():
            return True
        return time.monotonic() >= self._deadline

    def retry(self) -> None:
        """Begin loading if too much waited before."""
        if self._future is None:
            self._begin()

    def result(self) -> Fetched:
        """What was loaded. What has not begun is not needed any more."""
        self.cancel()
        if self._future is None or not self._future.done() or self._future.cancelled():
            return Fetched()
        error = self._future.exception()
        if error is not None:
            log_failure(_log, error, "a job's stored KV could not be loaded, so it is computed")
            return Fetched()
        return self._future.result()

    def cancel(self) -> None:
        """Drop it unless it has begun."""
        if self._future is not None:
            self._future.cancel()
