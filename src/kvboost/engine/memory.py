"""What an engine may take of the machine's memory, and the workload that its settings allow.

Used when an engine is made, and by :mod:`kvboost.engine.forecast`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from kvboost.capacity import HOST_BUDGETS, MemoryBudgets, Workload, device_budgets, request_bytes
from kvboost.config import AUTO, DEFAULT_PLACE_BYTES, EngineConfig
from kvboost.hf.cache import KVLayout
from kvboost.hf.device_memory import memory_available
from kvboost.hf.shape import stored_bytes_per_token

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
