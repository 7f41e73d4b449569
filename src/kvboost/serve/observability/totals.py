"""What all tenants of an engine have in its cache together.

Read by /metrics and /v1/cache. Counters of requests and idle workspaces count for the engine as a whole already.
"""

from __future__ import annotations

from kvboost.engine import KVBoost
from kvboost.types import CacheStats


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
