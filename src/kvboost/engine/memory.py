"""The memory a loaded engine takes: its settings and its model's shape put together.

Used by ``KVBoost.estimate_memory``; :mod:`kvboost.engine.forecast` does the same without loading the model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvboost.capacity import (
    HOST_BUDGETS,
    MemoryBudgets,
    MemoryEstimate,
    Workload,
    device_budgets,
    estimate_memory,
    request_bytes,
    shortfall,
)
from kvboost.config import AUTO, DEFAULT_PLACE_BYTES, EngineConfig
from kvboost.errors import ConfigError
from kvboost.hf.cache import KVLayout
from kvboost.hf.device_memory import allocated_bytes, memory_available, resident_bytes
from kvboost.hf.shape import shape_of, stored_bytes_per_token
from kvboost.hf.weights import weights_of

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost

RUNTIME_BYTES = 480 * 10**6
"""Of a process that has imported torch and Transformers and run a tiny model, where the system does not tell: as on the
machine of docs/results/memory_plan.md."""


def default_budgets(layout: KVLayout, *, device: torch.device | None = None, weights: int = 0) -> MemoryBudgets:
    """What an engine may take of the memory that is free now, less ``weights`` that are still to be loaded.

    ``device`` is where they will be; otherwise the layout says where the KV lies.
    """
    kv: Counter[str] = Counter()
    for spec in layout.slots:
        kv[str(device or spec.device)] += spec.bytes_per_row
    kinds = {torch.device(name).type for name in kv}
    if kinds == {"cpu"}:
        return HOST_BUDGETS
    free = {name: memory_available(name) - weights for name in kv}
    # MPS has no memory beside the host's.
    return device_budgets(free, kv, host_free=0 if "mps" in kinds else memory_available("cpu"))


def with_budgets(config: EngineConfig, budgets: MemoryBudgets) -> EngineConfig:
    """The settings with a number for every size that was left to the engine."""
    sizes = {name: getattr(budgets, name) for name in ("cache_bytes", "workspace_bytes", "host_cache_bytes")}
    return replace(config, **{name: size for name, size in sizes.items() if getattr(config, name) == AUTO})


def workload(
    config: EngineConfig,
    *,
    context: int,
    batch: int,
    layout: KVLayout,
    step_tokens: int,
    stored_tokens: int | None = None,
) -> Workload:
    """The workload of an engine with these settings, whose prefill takes ``step_tokens`` at once."""
    pages: dict[str, int] = {}
    if config.kv_bytes is not None:
        from kvboost.offload.kv.prefill import STEP_TOKENS, page_tokens_for

        budget = int(config.kv_bytes)
        pages = {"kv_bytes": budget, "block_tokens": page_tokens_for(layout, budget)}
        if request_bytes(context, kv_per_token=layout.bytes_per_token) > budget:
            step_tokens = STEP_TOKENS
    return Workload(
        context=context,
        batch=batch,
        step_tokens=step_tokens,
        stored_per_token=stored_bytes_per_token(layout)[config.kv_cache_bits],
        packed=config.kv_cache_bits != 16,
        cache_bytes=int(config.cache_bytes),
        host_cache_bytes=int(config.host_cache_bytes),
        disk_cache_bytes=int(config.disk_cache_bytes or DEFAULT_PLACE_BYTES) if config.disk_cache_dir else 0,
        workspace_bytes=int(config.workspace_bytes),
        stored_tokens=stored_tokens,
        **pages,
    )


def available_to_process(device: torch.device) -> int:
    """Bytes that this process may come to take on one of the model's devices, with what it has taken already."""
    return memory_available(str(device)) + (resident_bytes() if device.type == "cpu" else allocated_bytes(device))


def memory_shortfall(engine: KVBoost, *, kv_bytes: int) -> str | None:
    """What does not fit into memory if requests hold ``kv_bytes`` and all caches are full; None if it fits."""
    session, layout = engine.session, engine.parts.layout
    if session is None or layout is None:
        return None
    longest = max(1, min(kv_bytes // layout.bytes_per_token, session.limits.max_positions or kv_bytes))
    available = sum(map(available_to_process, {spec.device for spec in layout.slots}))
    return shortfall(engine.estimate_memory(context=longest), kv_bytes=kv_bytes, available=available)


def estimate_engine(engine: KVBoost, *, context: int, batch: int, stored_tokens: int | None) -> MemoryEstimate:
    """The memory of a loaded engine under this workload; see :meth:`KVBoost.estimate_memory`."""
    session, parts, layout = engine.session, engine.parts, engine.parts.layout
    if session is None or layout is None:
        raise ConfigError(f"the memory of a model with unknown KV cannot be estimated ({parts.refusal})")
    work = workload(
        engine.config,
        context=context,
        batch=batch,
        layout=layout,
        step_tokens=parts.max_step,
        stored_tokens=stored_tokens,
    )
    shape, weights = shape_of(engine.model, layout), weights_of(engine.model)
    tiles = parts.runner.tiles
    shape = replace(shape, tiled=tiles is not None)
    weights = replace(weights, packed=tiles.packed_bytes if tiles is not None else 0)
    resident, held = resident_bytes(), session.store.stats().bytes + session.prefiller.pool.idle_bytes
    known = weights.in_memory + weights.packed + held if shape.on_host else 0
    # The rest of the process; not measured where the system does not report it.
    runtime = resident - known if resident > known else RUNTIME_BYTES
    return estimate_memory(shape, weights, work, runtime=runtime)
