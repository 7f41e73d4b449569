"""What was asked of a tier and what came of it, for whoever watches it.

Counted by :class:`kvboost.store.tiered.TieredStore` for one tenant, guarded by its lock. Reading it asks no tier.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierWork:
    """What one tier has done for one tenant since the store was opened, or for several."""

    loads: int = 0
    """Loads, of one or more chunks each."""
    load_seconds: float = 0.0
    """All loads together."""
    hits: int = 0
    """Chunks that came."""
    misses: int = 0
    """Chunks that were expected there and did not come."""
    loads_declined: int = 0
    """Chunks that were computed, because loading them was expected to take longer."""
    writes_dropped: int = 0
    """Blocks that were not written, because too much waited to be written already."""
    refused: int = 0
    """Blocks that it did not take: it was full, out of reach, or the beginning of the prompt was gone."""
    errors: int = 0
    """Calls that raised."""

    def add(self, other: TierWork) -> None:
        """Count another tenant's as well."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
