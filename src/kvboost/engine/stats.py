"""What the engine tells about itself: counters, and what its model allows."""

from __future__ import annotations

from typing import Any

from kvboost.engine.assembly import Assembly
from kvboost.hf.weights import describe_weights
from kvboost.types import CacheStats, NonPrefixReuseStats, StoreStats


def cache_stats(stats: StoreStats, *, parts: Assembly | None, refusal: str | None) -> CacheStats:
    """The store's counters and what the engine adds. Hits and misses count chunks asked for."""
    asked = stats.hits + stats.misses
    moved = parts.moving.moved_chunks if parts and parts.moving else 0
    return CacheStats(
        hot_chunks=stats.chunks,
        hot_memory_mb=stats.bytes / 1e6,
        cache_hits=stats.hits,
        approximate_hits=moved,
        cache_misses=stats.misses - moved,
        hit_rate=(stats.hits + moved) / asked if asked else 0.0,
        exact_hit_rate=stats.hits / asked if asked else 0.0,
        evictions=stats.evictions,
        store_errors=parts.guarded.errors if parts else 0,
        bytes_by_tier={tier.tier: tier.bytes for tier in (stats, *stats.below)},
        non_prefix_reuse=_moved_reuse(parts, refusal),
        workspace_bytes=parts.pool.idle_bytes if parts else 0,
        leased_chunks=stats.leased,
    )


def _moved_reuse(parts: Assembly | None, refusal: str | None) -> NonPrefixReuseStats:
    moving = parts.moving if parts else None
    if moving is None:
        reason = parts.reader.why_not_moved() if parts else refusal
        return NonPrefixReuseStats(allowed=False, reason=reason, checked=0, differing=0, differing_at_most=1.0)
    bound = moving.guard.bound
    return NonPrefixReuseStats(
        allowed=moving.guard.allowed,
        reason=moving.guard.reason,
        checked=bound.checked,
        differing=bound.disagreements,
        differing_at_most=bound.upper,
    )


def describe(model: Any, *, parts: Assembly | None, refusal: str | None) -> dict[str, str]:
    """What can be reused with this model, and why not more."""
    told = {"model": str(model.config.model_type), "device": str(model.device), "dtype": str(model.dtype)}
    told["weights"] = describe_weights(model)
    if parts is None:
        return {**told, "exact reuse": f"off: {refusal}", "moved reuse": "off: it needs exact reuse"}
    facts = parts.facts
    limit = f"up to {facts.exact_limit} tokens: {facts.exact_limit_reason}" if facts.exact_limit is not None else "on"
    told |= {"longest prompt": str(facts.max_positions or "no limit"), "exact reuse": limit}
    told["bytes per token"] = str(facts.layout.bytes_per_token)
    if parts.pages is not None:
        told["KV of a request"] = (
            f"at most {parts.pages.budget} bytes; more goes to pages of {parts.pages.block_tokens} tokens"
        )
    moving = parts.moving
    if moving is None or not moving.guard.allowed:
        told["moved reuse"] = f"off: {parts.reader.why_not_moved() or 'as asked'}"
    else:
        repair = moving.repair_settings
        told["moved reuse"] = f"on: {repair.strategy.name}, {repair.ratio:.0%} of the rows computed again"
    return told
