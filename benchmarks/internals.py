"""Every place where benchmarks reach below the public API of core, hf, approx, scheduler, engine and store.

Benchmarks import such names from here only, so that a change inside the package is followed up in this one file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from kvboost.approx.comparisons import approx_over
from kvboost.approx.find import ApproxReuse
from kvboost.approx.probe import probe_reposition
from kvboost.approx.registry import DocumentRegistry
from kvboost.approx.repair import _Selector
from kvboost.approx.reposition import KeyRepositioner, Move
from kvboost.approx.select import STRATEGIES as ENGINE_STRATEGIES
from kvboost.approx.select import Auto, CacheBlend, Even, Nothing, Repair
from kvboost.approx.setup import choose_repairs
from kvboost.config import EngineConfig
from kvboost.core.arrange import ServedPaths
from kvboost.core.chunking import ContentChunker, FixedChunker, NaturalChunker, make_chunker
from kvboost.core.guarded import GuardedStore, loads_of
from kvboost.core.keys import PromptKeys, chunk_keys, token_array
from kvboost.core.plan import plan_reuse, reusable_chunks
from kvboost.core.session import Session
from kvboost.core.state import tokens_by_tier
from kvboost.core.verify import same_bits
from kvboost.core.workspaces import KVLoader
from kvboost.engine import KVBoost
from kvboost.engine.memory import workload
from kvboost.extend import RepairStrategy
from kvboost.hf.breaks import break_table, light_tokenizer
from kvboost.hf.cache import KVLayout, SlabCache, TensorSpec, stock_cache
from kvboost.hf.cache_layers import SlabLayer
from kvboost.hf.checkpoint import Shards, checkpoint_files
from kvboost.hf.codec import KVCodec, codec_for
from kvboost.hf.joint import JointPrefill, probe_joint
from kvboost.hf.loading import ModelSource, load_tokenizer
from kvboost.hf.probe import max_positions_of, probe_model
from kvboost.hf.prompt import PromptEncoder
from kvboost.hf.ragged import RaggedRunner, SharedPrefix, exchanged, gains_exchanged
from kvboost.hf.rows import RowBatch
from kvboost.hf.runner import ModelRunner
from kvboost.offload.rates import measure_rates
from kvboost.offload.weights.load import model_on_disk
from kvboost.scheduler.jobs import Finished, Job, NewToken
from kvboost.scheduler.runner import BatchRunner
from kvboost.store import MemoryStore, RedisTier
from kvboost.types import Chunk, KVBlock

__all__ = [
    "ENGINE_STRATEGIES",
    "Auto",
    "BatchRunner",
    "CacheBlend",
    "ContentChunker",
    "DocumentRegistry",
    "Even",
    "Finished",
    "FixedChunker",
    "GuardedStore",
    "Job",
    "JointPrefill",
    "KVCodec",
    "KVLayout",
    "KeyRepositioner",
    "ModelRunner",
    "ModelSource",
    "NaturalChunker",
    "NewToken",
    "Nothing",
    "PromptEncoder",
    "PromptKeys",
    "RaggedRunner",
    "Repair",
    "RowBatch",
    "ServedPaths",
    "Shards",
    "SharedPrefix",
    "SlabCache",
    "TensorSpec",
    "break_table",
    "checkpoint_files",
    "chunk_keys",
    "codec_for",
    "exchanged",
    "gains_exchanged",
    "light_tokenizer",
    "load_tokenizer",
    "loads_of",
    "make_chunker",
    "max_positions_of",
    "measure_rates",
    "model_on_disk",
    "plan_reuse",
    "probe_joint",
    "probe_model",
    "probe_reposition",
    "reusable_chunks",
    "same_bits",
    "stock_cache",
    "token_array",
    "tokens_by_tier",
    "workload",
]


def _session(engine: KVBoost) -> Session:
    """The engine's session; every benchmark's model has one."""
    assert engine.session is not None
    return engine.session


def forget_requests(engine: KVBoost) -> None:
    """Non-prefix reuse forgets which beginnings it has seen, as if every request were the first of its kind."""
    approx = _session(engine).prefiller.approx
    if isinstance(approx, ApproxReuse):
        approx.forget()


def _approx(engine: KVBoost) -> ApproxReuse:
    """The engine's non-prefix reuse, which its settings must allow."""
    approx = _session(engine).prefiller.approx
    assert isinstance(approx, ApproxReuse), approx.reason
    return approx


def why_no_approx(engine: KVBoost) -> str | None:
    """Why this engine has no non-prefix reuse; None if it has."""
    approx = _session(engine).prefiller.approx
    return None if isinstance(approx, ApproxReuse) else str(approx.reason)


def repair_with(strategy: RepairStrategy, ratio: float) -> Repair:
    """A repair that recomputes this share whatever its estimate says."""
    return Repair(strategy, ratio, tolerated_error=math.inf, tolerated_share=0.0)


def level_repair(quality: str, *, family: str | None = None) -> Repair:
    """The repair of a ``quality``, for a model of this family without a calibration."""
    return choose_repairs(EngineConfig(quality=quality), family=family)[0]


def family_of(engine: KVBoost) -> str:
    """The ``model_type`` by which an engine chooses its repairs."""
    return str(engine.model.config.get_text_config(decoder=True).model_type)


@contextmanager
def repairing(engine: KVBoost, repair: Repair) -> Iterator[None]:
    """While this lasts, the engine reuses chunks from anywhere, at any cost, and repairs them like this.

    An engine for every repair would each add hooks to the model's layers, which all of them run through.
    """
    session = _session(engine)
    again = _approx(engine).over(session.prefiller.store, repair)
    engine.session = replace(session, prefiller=approx_over(session.prefiller, again))
    try:
        yield
    finally:
        engine.session = session


def prompt_chunks(engine: KVBoost, tokens: Sequence[int], boundaries: Sequence[int]) -> list[Chunk]:
    """The chunks that a prompt is cut into."""
    return _session(engine).prefiller.chunk(list(tokens), boundaries).chunks


def place_blocks(engine: KVBoost, cache: SlabCache, blocks: Sequence[tuple[KVBlock, int]]) -> None:
    """Copy stored blocks to these positions of ``cache``, ascending, their keys re-rotated."""
    model = _approx(engine)._model
    moves = (Move(model.codec.unpack(block.tensors), block.start, position) for block, position in blocks)
    model.repositioner.place(cache, moves)


def recompute_at(engine: KVBoost, cache: SlabCache, tokens: Sequence[int], positions: torch.Tensor) -> None:
    """Recompute these positions of a cache that holds exactly ``tokens``."""
    _approx(engine)._model.recompute.recompute_positions(tokens, cache, positions, logits=False)


def allow_second_round(engine: KVBoost) -> None:
    """Let the engine recompute a second time where the error estimate is above its tolerance."""
    session, approx = _session(engine), _approx(engine)
    again = approx.over(session.prefiller.store, replace(approx.repair_settings, tolerated_error=1.0))
    engine.session = replace(session, prefiller=approx_over(session.prefiller, again))


def second_round_always() -> AbstractContextManager[Any]:
    """While this lasts, the estimate is above any tolerance after the first round, and below it after the second."""
    return patch.object(_Selector, "remaining_error", side_effect=cycle([math.inf, 0.0]))


@contextmanager
def values_only() -> Iterator[None]:
    """While this lasts, of recomputed positions only the values are written back."""
    whole = SlabLayer.update

    def update(layer: SlabLayer, keys: torch.Tensor, values: torch.Tensor, *args: Any, **more: Any) -> Any:
        if layer.rewritten is not None:
            keys = layer.key_store.index_select(2, layer.rewritten)
        return whole(layer, keys, values, *args, **more)

    with patch.object(SlabLayer, "update", update):
        yield


def wait_for_shadow_check(engine: KVBoost) -> None:
    """Until the check of the last request is over."""
    assert engine.parts.shadow is not None
    engine.parts.shadow.wait()


def place_after_loading() -> AbstractContextManager[Any]:
    """While this lasts, blocks are placed after the last one has been loaded, not while others are still coming."""
    return patch.object(KVLoader, "arrived", lambda *block: None)


def root_key(engine: KVBoost) -> bytes:
    """The key that all of the engine's chunk keys begin with."""
    return _session(engine).prefiller.keys.snapshot().root


def step_grid(engine: KVBoost) -> int | None:
    """Steps begin and end at multiples of this; None if a prompt is resumed at any token."""
    return _session(engine).prefiller.rule.grid


def passage_chunks(engine: KVBoost, passage: Sequence[int]) -> list[bytes]:
    """The tokens of the chunks that a passage between boundaries is cut into."""
    return [chunk.tokens for chunk in _session(engine).prefiller.chunk(list(passage), [len(passage)]).chunks]


def stored_blocks(store: MemoryStore) -> list[KVBlock]:
    """Everything a memory store holds."""
    return [entry.block for entry in store._entries.values()]


def prefill_reuse(engine: KVBoost, tokens: Sequence[int], boundaries: Sequence[int]) -> tuple[Any, Any]:
    """Prefill and store a prompt as a request does; which tokens were exact hits and which non-prefix hits (masks)."""
    prefiller = _session(engine).prefiller
    with prefiller.open(list(tokens), boundaries=boundaries, approx=True) as state:
        exact, moved = (np.zeros(len(tokens), dtype=bool) for _ in range(2))
        exact[: state.plan.exact_tokens] = True
        for segment in state.plan.moved:
            moved[segment.start : segment.end] = True
        prefiller.advance(state, to=len(tokens))
        prefiller.commit(state)
    return exact, moved


def without_deadlines(engine: KVBoost) -> None:
    """Load whatever the tiers have, however long that takes and however fast computing would be."""
    store: Any = _session(engine).store
    store._loader.rules = replace(store._loader.rules, compute_seconds=None)
    for tier in store._own.tiers:
        if isinstance(tier, RedisTier):
            tier._values._patience = replace(tier._values._patience, timeout_s=10.0)
