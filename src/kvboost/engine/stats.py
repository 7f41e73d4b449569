"""Statistics of an engine and of its tiers, what its model supports, and whether warm equals cold.

Read by the engine's methods and by the server. Invariant: the tiers' states do no I/O, so they can be read at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.core.guarded import GuardedStore
from kvboost.core.non_prefix import NonPrefixReuse
from kvboost.core.session import Session
from kvboost.core.verify import warm_equals_cold
from kvboost.engine.parts import EngineParts
from kvboost.engine.stores import Stores
from kvboost.extend import ChunkStore
from kvboost.hf.weights import describe_weights
from kvboost.store import MemoryStore, TieredStore
from kvboost.store.counters import TierWork
from kvboost.types import CacheStats, StoreStats


def store_stats(store: ChunkStore, tenant: str | None, *, ask_tiers: bool = True) -> StoreStats:
    """What a tenant has in a store of the engine's own; all that is in it without one."""
    if isinstance(store, TieredStore):
        return store.stats(tenant, ask_tiers=ask_tiers)
    return store.stats(tenant) if isinstance(store, MemoryStore) else store.stats()


def cache_stats(stats: StoreStats, store: ChunkStore, *, session: Session | None, parts: EngineParts) -> CacheStats:
    """A tenant's counters in the store, and the engine's own. Hits and misses count looked-up chunks."""
    lookups = stats.hits + stats.misses
    prefiller = session.prefiller if session is not None else None
    approx = prefiller.approx if prefiller is not None else NonPrefixReuse(parts.refusal)
    stores = parts.assembly.stores if parts.assembly is not None else None
    tiers = tier_states(store, stores).values()
    repositioned = approx.repositioned_chunks
    return CacheStats(
        hot_chunks=stats.chunks,
        hot_memory_mb=stats.bytes / 1e6,
        cache_hits=stats.hits,
        approximate_hits=repositioned,
        cache_misses=stats.misses - repositioned,
        hit_rate=(stats.hits + repositioned) / lookups if lookups else 0.0,
        exact_hit_rate=stats.hits / lookups if lookups else 0.0,
        evictions=stats.evictions,
        store_errors=(prefiller.store.errors if prefiller is not None else 0) + sum(tier.work.errors for tier in tiers),
        bytes_by_tier={tier.tier: tier.bytes for tier in (stats, *stats.below)},
        non_prefix_reuse=approx.stats(),
        workspace_bytes=prefiller.pool.idle_bytes if prefiller is not None else 0,
        leased_chunks=stats.leased,
        unsaved_chunks=stats.unsaved,
    )


def describe(parts: EngineParts, session: Session | None) -> dict[str, str]:
    """What can be reused with this model, and why not more."""
    model = parts.model
    lines = {"model": str(model.config.model_type), "device": str(model.device), "dtype": str(model.dtype)}
    lines["weights"] = describe_weights(model)
    if parts.runner.tiles is not None and parts.runner.tiles.packed_bytes:
        lines["weights"] += f", and {parts.runner.tiles.packed_bytes / 1e6:.1f} MB packed for the CPU's kernels"
    if session is None or parts.assembly is None:
        lines |= {"exact reuse": f"off: {parts.refusal}", "non-prefix reuse": "off: it needs exact reuse"}
    else:
        lines |= _describe_reuse(parts, session)
    return lines


def _describe_reuse(parts: EngineParts, session: Session) -> dict[str, str]:
    assert parts.assembly is not None
    facts, budget = parts.assembly.facts, session.budget
    limit = f"up to {facts.exact_limit} tokens: {facts.exact_limit_reason}" if facts.exact_limit is not None else "on"
    lines = {"longest prompt": str(facts.max_positions or "no limit"), "exact reuse": limit}
    lines["bytes per token"] = str(facts.layout.bytes_per_token)
    if facts.layout.state_bytes:
        lines["recurrent state"] = f"{facts.layout.state_bytes} bytes where a prompt can be resumed"
    if budget.limit is not None:
        paged = f"more goes to pages of {budget.paging.page_tokens} tokens" if budget.paging else "more is refused"
        lines["KV of a request"] = f"at most {budget.limit} bytes; {paged}"
    lines["non-prefix reuse"] = session.prefiller.approx.describe()
    return lines


def verify(session: Session, parts: EngineParts, prompt: list[int] | None) -> bool:
    """Whether a warm run of a prompt, or of a made-up one, equals a cold run to the last bit."""
    assert parts.assembly is not None
    config, vocab = parts.config, parts.model.get_input_embeddings().weight.shape[0]
    if prompt is None:
        length = max(config.chunk_tokens * 5, 2 * (session.prefiller.rule.grid or 0)) + 1  # on a grid, whole steps
        made_up = [(i * 7919 + i * i) % vocab for i in range(length)]
        prompt = parts.encoder.encode(made_up[: session.limits.longest_reused])
    layout = parts.assembly.facts.layout
    store = MemoryStore(2 * len(prompt) * layout.bytes_per_token + 16 * layout.state_bytes)
    prefiller = session.prefiller.exact_over(GuardedStore(store))
    try:
        return warm_equals_cold(prefiller, prompt)
    finally:
        prefiller.pool.clear()


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


def tier_states(store: ChunkStore, shared: Stores | None) -> dict[str, TierState]:
    """The tiers of a store by name, fastest first."""
    total = store.work() if isinstance(store, TieredStore) else {}
    health = shared.health() if shared is not None else {}
    for name, (_, swallowed) in health.items():
        total.setdefault(name, TierWork()).errors += swallowed  # once: tenants share it
    return {name: TierState(health.get(name, (True, 0))[0], work) for name, work in total.items()}
