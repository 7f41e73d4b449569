"""The thread of a store that loads ahead of requests.

Used by :class:`kvboost.store.tiered.TieredStore`; each tenant has one of its own, so that none waits for another's
tiers. Invariant: the work that waits is bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_MAX_WAITING = 64


def finished(result: T) -> Future[T]:
    """The future of work that is done."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


class Background:
    """Runs work in order of arrival."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvboost-prefetch")
        self._lock = threading.Lock()
        self._taken = 0  # waiting or under way

    def run(self, work: Callable[[], T]) -> Future[T] | None:
        """Run ``work`` later; None if too much waits already, or if the machine has no thread for it."""
        with self._lock:
            if self._taken >= _MAX_WAITING:
                return None
            self._taken += 1
        try:
            future = self._pool.submit(work)
        except RuntimeError:
            self._ended()
            return None
        future.add_done_callback(lambda _: self._ended())
        return future

    def _ended(self) -> None:
        with self._lock:
            self._taken -= 1

    def close(self) -> None:
        """Drop what waits and return once the rest is done."""
        self._pool.shutdown(cancel_futures=True)
