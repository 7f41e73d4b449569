"""The memory of a loaded engine, estimated from its settings and its model's shape.

Used by ``KVBoost.estimate_memory`` and ``kvboost serve``; :mod:`kvboost.engine.forecast` does the same without loading.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvboost.capacity import MemoryEstimate, estimate_memory, shortfall
from kvboost.core.session import Session
from kvboost.engine.memory import RUNTIME_BYTES, workload
from kvboost.engine.parts import EngineParts
from kvboost.errors import ConfigError
from kvboost.hf.device_memory import allocated_bytes, memory_available, resident_bytes
from kvboost.hf.shape import shape_of
from kvboost.hf.weights import weights_of


def available_to_process(device: torch.device) -> int:
    """Bytes that this process may come to take on one of the model's devices, with what it has taken already."""
    return memory_available(str(device)) + (resident_bytes() if device.type == "cpu" else allocated_bytes(device))


def memory_shortfall(parts: EngineParts, session: Session | None, *, kv_bytes: int) -> str | None:
    """What does not fit into memory if requests hold ``kv_bytes`` and all caches are full; None if it fits."""
    layout = parts.layout
    if session is None or layout is None:
        return None
    longest = max(1, min(kv_bytes // layout.bytes_per_token, session.limits.max_positions or kv_bytes))
    available = sum(map(available_to_process, {spec.device for spec in layout.slots}))
    return shortfall(estimate_engine(parts, session, context=longest), kv_bytes=kv_bytes, available=available)


def estimate_engine(
    parts: EngineParts, session: Session | None, *, context: int, batch: int = 1, stored_tokens: int | None = None
) -> MemoryEstimate:
    """The memory of a loaded engine under this workload; see :meth:`KVBoost.estimate_memory`."""
    layout = parts.layout
    if session is None or layout is None:
        raise ConfigError(f"the memory of a model with unknown KV cannot be estimated ({parts.refusal})")
    work = workload(
        parts.config,
        context=context,
        batch=batch,
        layout=layout,
        step_tokens=parts.max_step,
        stored_tokens=stored_tokens,
    )
    shape, weights = shape_of(parts.model, layout), weights_of(parts.model)
    tiles = parts.runner.tiles
    shape = replace(shape, tiled=tiles is not None or parts.runner.unmasked is not None)
    weights = replace(weights, packed=tiles.packed_bytes if tiles is not None else 0)
    resident, held = resident_bytes(), session.store.stats().bytes + session.prefiller.pool.idle_bytes
    known = weights.in_memory + weights.packed + held if shape.on_host else 0
    # The rest of the process; not measured where the system does not report it.
    runtime = resident - known if resident > known else RUNTIME_BYTES
    return estimate_memory(shape, weights, work, runtime=runtime)
