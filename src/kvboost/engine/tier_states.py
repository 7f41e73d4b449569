"""The state of the tiers below the memory, for all tenants of an engine together.

Read by the server. Invariant: it does no I/O, so that it can be read at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvboost.engine.stores import Stores
from kvboost.extend import ChunkStore
from kvboost.store import TieredStore
from kvboost.store.work import TierWork


@dataclass(frozen=True)
class TierState:
    """One tier."""

    available: bool
    """Whether it answered when it was last used. While it does not, every lookup there is a miss."""
    work: TierWork
    """Its errors are those it raised and those it swallowed."""

    @property
    def hit_rate(self) -> float:
        """Of the chunks that were expected there, the share that came."""
        return self.work.hits / asked if (asked := self.work.hits + self.work.misses) else 0.0

    @property
    def load_ms(self) -> float:
        """What a load took on average."""
        return 1000 * self.work.load_seconds / self.work.loads if self.work.loads else 0.0


def tier_states(stores: Iterable[ChunkStore], shared: Stores | None) -> dict[str, TierState]:
    """The tiers of these stores, one store for each tenant, by name, fastest first."""
    total: dict[str, TierWork] = {}
    for store in stores:
        for name, work in store.work().items() if isinstance(store, TieredStore) else ():
            total.setdefault(name, TierWork()).add(work)
    health = shared.health() if shared is not None else {}
    for name, (_, swallowed) in health.items():
        total.setdefault(name, TierWork()).errors += swallowed  # once: tenants share it
    return {name: TierState(health.get(name, (True, 0))[0], work) for name, work in total.items()}
