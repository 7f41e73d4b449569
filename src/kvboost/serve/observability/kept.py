"""What the cache holds, kept up to date in the background: nobody who looks at it waits for a disk or a server.

Read by /metrics, /ready and /v1/cache. Numbers of the memory and counters are those of now; what tiers below the memory
hold is as old as the last look. Invariant: tiers are asked by one thread only, and less often the longer they take.
"""

from __future__ import annotations

import logging
import threading
import time

from kvboost.engine import KVBoost
from kvboost.engine.tier_states import TierState
from kvboost.serve.observability.totals import total_stats
from kvboost.types import CacheStats

_MIN_PERIOD_S = 10.0
_SHARE = 0.05  # of the time may be spent on asking
_CLOSE_S = 5.0  # a tier that hangs must not keep the process

_log = logging.getLogger("kvboost.serve")


class KeptStats:
    """The statistics of one engine. Thread-safe."""

    def __init__(self, engine: KVBoost) -> None:
        self._engine = engine
        self._ended = threading.Event()
        self._due = threading.Event()
        self._thread: threading.Thread | None = None
        if engine.tier_states():  # otherwise there is nothing to ask
            self._thread = threading.Thread(target=self._keep, name="kvboost-statistics", daemon=True)
            self._thread.start()

    def total(self) -> CacheStats:
        """Of all tenants together."""
        return total_stats(self._engine, ask_tiers=False)

    def tiers(self) -> dict[str, TierState]:
        """The tiers below the memory, of all tenants together."""
        return self._engine.tier_states()

    def look_again(self) -> None:
        """What the tiers hold has changed much: ask them soon."""
        self._due.set()

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _keep(self) -> None:
        while not (self._ended.is_set() or self._engine.parts.closed):
            began = time.monotonic()
            self._due.clear()
            try:
                total_stats(self._engine)
            except Exception:  # noqa: BLE001 - the thread must go on: numbers are old until it works again
                _log.warning("the tiers could not be asked what they hold", exc_info=True)
            if self._ended.is_set():
                return
            self._due.wait(max(_MIN_PERIOD_S, (time.monotonic() - began) / _SHARE))
