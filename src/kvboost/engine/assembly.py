"""Puts the parts around a loaded model together: what it allows, who reads prompts, who moves chunks.

Called once when an engine is made. Raises UnsupportedModelError for a model that allows no reuse at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvboost.approx.calibration import Calibration
from kvboost.approx.find import ApproxReuse
from kvboost.approx.levels import Repair, choose_repair, tolerated_share
from kvboost.approx.recompute import probe_recompute
from kvboost.approx.reposition import probe_reposition
from kvboost.config import EngineConfig
from kvboost.core.chunking import make_chunker
from kvboost.core.costs import CostModel
from kvboost.core.guarded import GuardedStore
from kvboost.core.identity import PromptKeys
from kvboost.core.prefill import Prefiller
from kvboost.core.workspaces import WorkspacePool
from kvboost.engine.stores import Stores
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.extend import Chunker, ChunkStore
from kvboost.hf.codec import KVCodec, codec_for
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.probe import ModelFacts, probe_model
from kvboost.hf.runner import ModelRunner
from kvboost.offload.kv.prefill import Pages
from kvboost.store import read_key


@dataclass(frozen=True)
class Assembly:
    """The parts of one engine."""

    store: ChunkStore
    guarded: GuardedStore
    """The same, as requests use it."""
    facts: ModelFacts
    pool: WorkspacePool
    reader: Prefiller
    moving: ApproxReuse | None
    """None if nothing may be moved: as asked, or because the model does not allow it."""
    runner: ModelRunner
    _identity: ModelIdentity
    config: EngineConfig
    stores: Stores | None
    """Where the store came from; None if it was given."""
    pages: Pages | None
    """Where KV goes that is more than ``kv_bytes``; None if there is no such limit."""
    is_tenant: bool = False
    """Whether another assembly holds the model's parts, and this one only a tenant's."""

    @property
    def weights(self) -> str:
        """The digest of the model's weights."""
        return self._identity.snapshot().fields["weights"]

    def moving_reader(self, store: GuardedStore, pool: WorkspacePool, repair: Repair) -> Prefiller:
        """A reader over another store that moves chunks and repairs them in this way."""
        assert self.moving is not None
        return self.reader.over(store, pool, moving=self.moving.over(store, repair))

    def exact_reader(self, store: GuardedStore, pool: WorkspacePool) -> Prefiller:
        """A reader like the engine's own over another store, which moves nothing."""
        return self.reader.over(store, pool)

    def for_tenant(self, tenant: str) -> Assembly:
        """The same model's parts around another tenant's names, store and workspaces."""
        names = self.reader.names.for_tenant(tenant)
        store = self.stores.open(tenant, root=names.snapshot().root) if self.stores is not None else self.store
        guarded, pool = GuardedStore(store), self.pool.beside()
        moving = self.moving.for_tenant(guarded) if self.moving is not None else None
        return replace(
            self,
            store=store,
            guarded=guarded,
            pool=pool,
            moving=moving,
            reader=self.reader.for_tenant(names, guarded, pool, moving),
            config=replace(self.config, tenant=tenant),
            is_tenant=True,
        )

    def close(self) -> None:
        """Let go of the memory and leave the model as it was."""
        self.pool.clear()
        if self.moving is not None and not self.is_tenant:
            self.moving.close()


def check_settings(config: EngineConfig) -> None:
    """Raise ConfigError for settings that cannot work with any model."""
    make_chunker(config.chunking, size=config.chunk_size)
    if config.record_key_file is not None:
        read_key(config.record_key_file)
    choose_repair(config, Calibration.load(config.calibration) if config.calibration is not None else None)


def assemble(runner: ModelRunner, *, config: EngineConfig, chunker: Chunker, store: ChunkStore | None) -> Assembly:
    """Probe the model and build what its answers allow; with a store of its own if none is given."""
    facts = probe_model(runner.model)
    identity = ModelIdentity(runner.model, facts.layout)
    pool = WorkspacePool(facts.layout, capacity_bytes=int(config.workspace_bytes))
    pages: Pages | None = None
    if config.kv_bytes is not None:
        directory = Path(config.kv_dir) if config.kv_dir is not None else None
        pages = Pages(runner.model, pool, budget=int(config.kv_bytes), directory=directory)
    calibration = Calibration.load(config.calibration) if config.calibration is not None else None
    if calibration is not None and calibration.weights != identity.snapshot().fields["weights"]:
        raise ConfigError(
            f"calibration={str(config.calibration)!r} was made with another model's weights; "
            "run `kvboost calibrate` for this one, or leave calibration out"
        )
    codec = codec_for(config.kv_cache_bits, facts.layout)
    names = PromptKeys(
        identity, chunker=chunker, tenant=config.tenant, codec=codec.name, keeps_decoded=config.reuse_generated
    )
    if calibration is not None and calibration.conditions != names.conditions:
        raise ConfigError(
            f"calibration={str(config.calibration)!r} was made for {calibration.conditions!r}, and these settings are "
            f"{names.conditions!r}; calibrate again with them, or leave calibration out"
        )
    root = names.snapshot().root  # hashes the weights now rather than in the first request
    repair = choose_repair(config, calibration)
    costs = CostModel()
    stores: Stores | None = None
    if store is not None and config.tenant_bytes is not None:
        raise ConfigError("tenant_bytes is for a store of the engine's own; leave it out, or leave store out")
    if store is None:
        share = repair.ratio if repair is not None else 0.0
        stores = Stores(config, layout=facts.layout, codec=codec, costs=costs, repaired_share=share)
        store = stores.open(config.tenant, root=root)
    guarded = GuardedStore(store)
    moving, refusal = _make_moving(runner, facts, config, store=guarded, codec=codec, repair=repair, costs=costs)
    if calibration is not None and repair is None and config.quality != "exact":
        refusal = (
            f"the calibration shows no ratio that changes at most {tolerated_share(config):.3g} of the answers "
            f"(the best is {calibration.best_share:.3g})"
        )
    reader = Prefiller(
        runner=runner,
        names=names,
        codec=codec,
        store=guarded,
        pool=pool,
        costs=costs,
        moving=moving,
        move_refusal=refusal,
    )
    return Assembly(store, guarded, facts, pool, reader, moving, runner, identity, config, stores, pages)


def _make_moving(
    runner: ModelRunner,
    facts: ModelFacts,
    config: EngineConfig,
    *,
    store: GuardedStore,
    codec: KVCodec,
    repair: Repair | None,
    costs: CostModel,
) -> tuple[ApproxReuse | None, str | None]:
    """What moves chunks for this model, or nothing and why."""
    if repair is None:
        return None, None  # as asked: nothing stood in the way
    try:
        mover = probe_reposition(runner.model, facts.layout)
        layers = repair.strategy.attention_layers(len(facts.layout.slots) // 2)
        rows = probe_recompute(runner, facts.layout, attention_layers=layers)
    except UnsupportedModelError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 - exact reuse was shown to work and goes on, whatever trips here
        return None, f"trying whether this model's chunks can be moved failed: {error!r}"
    moving = ApproxReuse(
        store=store,
        mover=mover,
        rows=rows,
        codec=codec,
        repair=repair,
        costs=costs,
        at_any_price=config.force_approx,
    )
    return moving, None
