"""What the cache holds, kept up to date in the background: nobody who looks at it waits for a disk or a server.

Read by /metrics, /ready and /v1/cache. Numbers of the memory and counters are those of now; what tiers below the memory
hold is as old as the last look. Invariant: tiers are asked by one thread only, and less often the longer they take.
"""

from __future__ import annotations

import logging
import threading
import time

from kvboost.engine import KVBoost
from kvboost.engine.stats import TierState
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


def total_stats(engine: KVBoost, *, ask_tiers: bool = True) -> CacheStats:
    """The engine's statistics, with those of its tenants added. Without ``ask_tiers`` this does no I/O."""
    opened = engine.views()
    views = [view.cache_stats(ask_tiers=ask_tiers) for view in opened]
    total = CacheStats(**views[0])
    guarded = [view.session.prefiller.store.errors for view in opened if view.session is not None]
    # What tiers swallow is counted once for all tenants, so it cannot be summed over them.
    total["store_errors"] = sum(guarded) + sum(tier.work.errors for tier in engine.tier_states().values())
    by_tier = dict(total["bytes_by_tier"])
    for stats in views[1:]:
        total["approximate_hits"] += stats["approximate_hits"]
        if not engine.parts.owns_store:
            # A store that was given is one for all tenants. Only the split of its misses is each tenant's own.
            total["cache_misses"] -= stats["approximate_hits"]
            continue
        total["hot_chunks"] += stats["hot_chunks"]
        total["hot_memory_mb"] += stats["hot_memory_mb"]
        total["cache_hits"] += stats["cache_hits"]
        total["cache_misses"] += stats["cache_misses"]
        total["evictions"] += stats["evictions"]
        total["leased_chunks"] += stats["leased_chunks"]
        total["unsaved_chunks"] += stats["unsaved_chunks"]
        for tier, held in stats["bytes_by_tier"].items():
            by_tier[tier] = by_tier.get(tier, 0) + held  # each tenant counts its own, in every tier
    total["bytes_by_tier"] = by_tier
    found = total["cache_hits"] + total["approximate_hits"]
    looked_up = found + total["cache_misses"]
    total["hit_rate"] = found / looked_up if looked_up else 0.0
    total["exact_hit_rate"] = total["cache_hits"] / looked_up if looked_up else 0.0
    return total
