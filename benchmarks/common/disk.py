"""What the index of a disk tier has on its books.

Read by the benchmark of kills and by the tests of the tier. Invariant: nothing is changed.
"""

from __future__ import annotations

from kvboost.store.tiers.disk.tier import DiskTier


def directory_bytes(tier: DiskTier) -> int:
    """What all namespaces in the directory take of the budget."""
    return tier._index().totals(whole=True).bytes
