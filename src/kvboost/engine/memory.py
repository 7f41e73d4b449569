"""The memory plan of an engine, or of a model that is not loaded: its settings and its shape put together.

Used by ``KVBoost.memory_plan``, by ``kvboost doctor`` and when a server starts. Invariant: no weights are loaded here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvboost.capacity import (
    MemoryPlan,
    ModelShape,
    Option,
    Rates,
    WeightMemory,
    Workload,
    plan_memory,
    plan_options,
    request_bytes,
)
from kvboost.config import EngineConfig
from kvboost.core.chunking import make_chunker
from kvboost.hf.cache import KVLayout
from kvboost.hf.loading import load_tokenizer_of
from kvboost.hf.shape import ModelOnDisk, model_on_disk, stored_bytes_per_token
from kvboost.offload.kv.prefill import STEP_TOKENS, page_tokens_for
from kvboost.offload.rates import measure_rates

_CONTEXT = 4096
RUNTIME = 480 * 10**6
"""Bytes of a process that has imported torch and Transformers and run a tiny model, where nobody measured it: as on the
machine of docs/results/plan.md."""


@dataclass(frozen=True)
class Forecast:
    """What can be said about a model before it is loaded."""

    model: ModelOnDisk
    plan: MemoryPlan
    options: list[Option]
    room: int
    """Bytes this process may come to take."""
    rates: Rates | None


def workload(
    config: EngineConfig,
    *,
    context: int,
    batch: int,
    layout: KVLayout,
    stored_tokens: int | None = None,
) -> Workload:
    """What an engine with these settings is asked for."""
    chunker = make_chunker(config.chunking, size=config.chunk_size)
    step_rows = int(getattr(chunker, "max_tokens", config.chunk_size))
    pages: dict[str, int] = {}
    if config.kv_bytes is not None:
        budget = int(config.kv_bytes)
        pages = {"kv_bytes": budget, "block_tokens": page_tokens_for(layout, budget)}
        if request_bytes(context, kv_per_token=layout.bytes_per_token) > budget:
            step_rows = STEP_TOKENS
    return Workload(
        context=context,
        batch=batch,
        step_rows=step_rows,
        stored_per_token=stored_bytes_per_token(layout)[config.kv_cache_bits],
        packed=config.kv_cache_bits != 16,
        cache_bytes=int(config.cache_bytes),
        host_cache_bytes=int(config.host_cache_bytes),
        disk_cache_bytes=int(config.disk_cache_bytes) if config.disk_cache_dir is not None else 0,
        workspace_bytes=int(config.workspace_bytes),
        stored_tokens=stored_tokens,
        **pages,
    )


def engine_plan(
    shape: ModelShape, weights: WeightMemory, work: Workload, *, held: int = 0, runtime: int | None = None
) -> MemoryPlan:
    """The plan of a loaded engine, which holds ``held`` bytes of chunks and workspaces now."""
    if runtime is None:
        taken = resident_bytes()
        in_memory = weights.memory + held if shape.lazy else 0
        # What this process has beside them; nothing to measure where the system does not tell.
        runtime = taken - in_memory if taken > in_memory else RUNTIME
    return plan_memory(shape, weights, work, runtime=runtime)


def shortfall(plan: MemoryPlan, *, kv_bytes: int, room: int) -> str | None:
    """What to say if running requests that hold ``kv_bytes`` together, with all caches full, are more than there is."""
    peak = plan.peak - plan.kv + kv_bytes
    if peak <= room:
        return None
    return (
        f"with {kv_bytes / 1e9:.1f} GB of KV and all caches full this takes {peak / 1e9:.1f} GB, and there are "
        f"{room / 1e9:.1f} GB; lower kv_bytes, cache_bytes or workspace_bytes by {(peak - room) / 1e9:.1f} GB in all"
    )


def forecast(
    source: str,
    *,
    context: int | None,
    batch: int,
    config: EngineConfig,
    dtype: Any = "auto",
    device: str | None = None,
    weight_budget: int | None = None,
    measure: bool = True,
    load_tokenizer: bool = True,
) -> Forecast:
    """What a model would take and how fast it would be, without loading its weights.

    Without a ``context``, 4096 tokens or as many as the model was made for. The tokenizer, which is measured and not
    planned, is loaded unless told otherwise: that of a large vocabulary takes hundreds of megabytes.
    """
    where = device or str(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    model = model_on_disk(source, dtype=dtype, device=where)
    if context is None:
        context = min(_CONTEXT, model.shape.max_positions or _CONTEXT)
    work = workload(config, context=context, batch=batch, layout=model.layout)
    weights = model.weights
    if weight_budget is not None:
        weights = model.streamed_or_raise(weight_budget)
    rates = None
    if measure:
        rates = measure_rates(dtype=model.dtype, device=where, rows=work.step_rows, files=model.files)
    tokenizer = load_tokenizer_of(source) if load_tokenizer else None
    runtime = resident_bytes() or RUNTIME
    del tokenizer
    room = memory_available(where) + (runtime if where == "cpu" else 0)
    plan = plan_memory(model.shape, weights, work, runtime=runtime)
    options = plan_options(
        model.shape,
        weights,
        work,
        room=room,
        runtime=runtime,
        stored=stored_bytes_per_token(model.layout),
        stream=model.streamed,
        rates=rates,
    )
    return Forecast(model, plan, options, room, rates)


def memory_available(device: str = "cpu") -> int:
    """Bytes that can still be taken: the system's, or what the container has left of them; the accelerator's own."""
    if device != "cpu":
        free, _ = torch.accelerator.get_memory_info(torch.device(device))
        return int(free)
    found = _number("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB")
    system = found * 1024 if found is not None else _physical()
    limit = _number("/sys/fs/cgroup/memory.max", r"^(\d+)$")
    if limit is None:
        return system
    used = _number("/sys/fs/cgroup/memory.current", r"^(\d+)$") or 0
    cached = _number("/sys/fs/cgroup/memory.stat", r"^inactive_file (\d+)$") or 0
    return max(0, min(system, limit - used + cached))


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system does not tell."""
    found = _number("/proc/self/status", r"^VmRSS:\s+(\d+) kB")
    return found * 1024 if found is not None else 0


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(file: str, pattern: str) -> int | None:
    try:
        found = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None  # another system, or no such limit
    return int(found[1]) if found else None
