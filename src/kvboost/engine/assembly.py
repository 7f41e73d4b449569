"""Builds the parts around a loaded model: probe results, prefiller, non-prefix reuse, stores.

Called once when an engine is made. Raises UnsupportedModelError for a model that allows no reuse at all.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvboost.config import AUTO, SETTINGS, EngineConfig
from kvboost.core.chunking import chunk_size_for, make_chunker
from kvboost.core.costs import CostModel
from kvboost.core.guarded import GuardedStore
from kvboost.core.keys import PromptKeys
from kvboost.core.non_prefix import NonPrefixReuse
from kvboost.core.prefill import Prefiller
from kvboost.core.session import KVBudget, SequenceLimits, Session
from kvboost.core.workspaces import WorkspacePool
from kvboost.engine import optional
from kvboost.engine.memory import default_budgets, with_budgets
from kvboost.engine.stores import Stores, need_packages
from kvboost.errors import ConfigError
from kvboost.extend import Chunker, ChunkStore, Tier
from kvboost.hf.breaks import break_table
from kvboost.hf.cache import SlabCache
from kvboost.hf.codec import codec_for
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.measured import measure_model
from kvboost.hf.probe import ModelFacts
from kvboost.hf.runner import ModelRunner
from kvboost.store import check_directory, key_salt


@dataclass(frozen=True)
class Assembly:
    """The probe results and parts of one model. Shared by all tenants."""

    config: EngineConfig
    runner: ModelRunner
    facts: ModelFacts
    identity: ModelIdentity
    chunker: Chunker
    stores: Stores | None
    """Opens tenants' stores; None if the caller passed a store."""
    session: Session
    """The session of the engine's own tenant."""

    def open_session(self, tenant: str) -> Session:
        """Another tenant's keys, store and workspaces around the same model."""
        own = self.session.prefiller
        keys = replace(own.keys, tenant=tenant)
        store = self.session.store
        if self.stores is not None:
            store = self.stores.open(tenant, root=keys.namespace())
        guarded = GuardedStore(store)
        approx, pool = own.approx.for_tenant(guarded), own.pool.for_tenant()
        prefiller = replace(own, keys=keys, store=guarded, pool=pool, approx=approx)
        return replace(self.session, tenant=tenant, store=store, prefiller=prefiller)

    def close(self) -> None:
        """Remove all hooks from the model, and compute as it does."""
        self.session.prefiller.approx.close()
        self.runner.tiles, self.runner.unmasked, self.runner.joins = None, None, False


def checked_config(settings: Mapping[str, Any]) -> EngineConfig:
    """The settings of an engine around a model that is loaded already."""
    for name in settings:
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; help(kvboost.EngineConfig) lists them"
            raise ConfigError(f"{name} is not a setting{hint}")
    return EngineConfig(**settings)


def split_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine's settings and the arguments for the model, before it is loaded.

    Raises ConfigError for settings that cannot work with any model, so that a bad one does not cost a model load.
    """
    settings = {name: value for name, value in given.items() if name in SETTINGS}
    others = {name: value for name, value in given.items() if name not in SETTINGS}
    for name in others:
        if near := difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.8):
            raise ConfigError(f"{name} is not a setting; did you mean {near[0]}?")
    config = EngineConfig(**settings)
    make_chunker(config.chunking, size=config.chunk_tokens)
    key_salt(config.record_key_file)
    if config.disk_cache_dir is not None:
        check_directory(config.disk_cache_dir)
    need_packages(config)
    optional.check_approx_settings(config)
    return settings, others


def assemble(runner: ModelRunner, tokenizer: Any, *, config: EngineConfig, store: ChunkStore | None) -> Assembly:
    """Probe the model and build what it supports; with the engine's own store if none is given."""
    if store is not None:
        _check_given(store, config)
    packed = None if config.packed_bytes == AUTO else int(config.packed_bytes)
    facts, numerics, identity = measure_model(runner.model, numerics=config.numerics, packed_bytes=packed)
    runner.tiles, runner.unmasked = numerics.tiles, numerics.unmasked
    runner.joins = runner.unmasked is not None and not numerics.rule.is_bitwise
    budgets = default_budgets(facts.layout)
    if store is not None:
        budgets = replace(budgets, host_cache_bytes=0)
    config = with_budgets(config, budgets)
    if config.chunk_size is None:
        config = replace(config, chunk_size=chunk_size_for(facts.layout.bytes_per_token))
    breaks = break_table(tokenizer) if tokenizer is not None and config.chunking == "natural" else None
    chunker = make_chunker(config.chunking, size=config.chunk_tokens, breaks=breaks)
    pool = WorkspacePool(
        lambda tokens: SlabCache(facts.layout, capacity=tokens),
        bytes_per_token=facts.layout.bytes_per_token,
        state_bytes=facts.layout.state_bytes,
        capacity_bytes=int(config.workspace_bytes),
    )
    budget = _budget(runner, config, pool, jobs_bytes=budgets.jobs_kv_bytes)
    codec = codec_for(config.kv_cache_bits, facts.layout)
    keys = PromptKeys(
        identity=identity,
        chunker=chunker,
        tenant=config.tenant,
        codec=codec.name,
        keeps_decoded=config.reuse_generated,
        salt=key_salt(config.record_key_file),
    )
    approx = optional.approx_settings(
        config,
        weights=identity.snapshot().fields["weights"],
        family=runner.model.config.get_text_config(decoder=True).model_type,
        conditions=keys.conditions,
    )
    costs = CostModel()
    stores: Stores | None = None
    if store is None:
        share = 0.0 if isinstance(approx, NonPrefixReuse) else approx.recomputed_share
        stores = Stores(config, layout=facts.layout, codec=codec, costs=costs, repaired_share=share)
        store = stores.open(config.tenant, root=keys.namespace())
    prefiller = Prefiller(
        runner=runner,
        codec=codec,
        keys=keys,
        store=GuardedStore(store),
        pool=pool,
        rule=numerics.rule,
        costs=costs,
        state_tokens=-(-facts.layout.state_bytes // facts.layout.bytes_per_token),
    )
    if not isinstance(approx, NonPrefixReuse):
        approx = approx.reuse(prefiller, runner, facts.layout, force=config.force_approx)
    prefiller = replace(prefiller, approx=approx)
    limits = SequenceLimits(facts.max_positions, facts.exact_limit, facts.exact_limit_reason)
    session = Session(config.tenant, store, prefiller, limits, budget, config.reuse_generated)
    return Assembly(config, runner, facts, identity, chunker, stores, session)


def _check_given(store: Any, config: EngineConfig) -> None:
    """Raise ConfigError for a store that is none, and for settings of a store that the engine does not make."""
    if not isinstance(store, ChunkStore):
        hint = (
            "; put a tier below a memory store: TieredStore(MemoryStore(10**9), [tier])"
            if isinstance(store, Tier)
            else ""
        )
        raise ConfigError(f"store must be a ChunkStore, got {type(store).__name__}{hint}")
    for name in ("tenant_bytes", "max_chunks", "disk_cache_dir", "remote_url", "host_cache_bytes"):
        if getattr(config, name) and getattr(config, name) != AUTO:
            raise ConfigError(f"{name} is for a store of the engine's own; leave it out, or leave store out")


def _budget(runner: ModelRunner, config: EngineConfig, pool: WorkspacePool, *, jobs_bytes: int) -> KVBudget:
    if config.kv_bytes is None:
        return KVBudget(pool.bytes_for, jobs_bytes=jobs_bytes)
    limit, directory = int(config.kv_bytes), Path(config.kv_dir) if config.kv_dir is not None else None
    paging, reason = optional.make_paging(runner.model, budget=limit, directory=directory)
    return KVBudget(pool.bytes_for, limit, jobs_bytes, paging, reason)
