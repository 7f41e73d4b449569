"""Tells a listener what the tiers below a memory store gain and lose.

Used by :class:`kvboost.store.tiered.TieredStore`; all tenants of an engine share one. Invariant: a tier that cannot
tell what it removes is not announced at all, as a listener would believe for ever what it was told once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from kvboost.extend import StoreListener, TellingTier, Tier
from kvboost.types import KVBlock


class Announcer:
    """Passes on what happens in tiers, once somebody listens."""

    def __init__(self) -> None:
        self._listener: StoreListener | None = None

    def listen(self, listener: StoreListener, tiers: Iterable[Tier]) -> None:
        """Tell ``listener`` from now on."""
        self._listener = listener
        for tier in tiers:
            if isinstance(tier, TellingTier):
                tier.on_remove(partial(_removed, listener, tier.name))

    def stored(self, tier: Tier, block: KVBlock) -> None:
        """A tier has this block."""
        if self._listener is not None and isinstance(tier, TellingTier):
            self._listener.stored(tier.name, block)

    def missing(self, tier: Tier, key: bytes) -> None:
        """A tier had said that it has this block, and has not: another process may have evicted it."""
        if self._listener is not None and isinstance(tier, TellingTier):
            self._listener.removed(tier.name, [key])


def _removed(listener: StoreListener, tier: str, key: bytes) -> None:
    listener.removed(tier, [key])
