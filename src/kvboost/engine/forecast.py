"""Estimates the memory of an engine, and of a model that is not loaded also its speed, from its files.

Used by ``KVBoost.estimate_memory``, ``kvboost serve`` and ``kvboost doctor``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvboost.capacity import Machine, MemoryEstimate, Option, estimate_memory, list_options, shortfall, step_limit
from kvboost.config import EngineConfig
from kvboost.core.session import Session
from kvboost.engine.memory import default_budgets, with_budgets, workload
from kvboost.engine.parts import EngineParts
from kvboost.errors import ConfigError
from kvboost.hf.device_memory import allocated_bytes, memory_available, resident_bytes
from kvboost.hf.loading import ModelSource, load_tokenizer
from kvboost.hf.shape import shape_of, stored_bytes_per_token
from kvboost.hf.weights import weights_of
from kvboost.offload.rates import measure_rates
from kvboost.offload.weights import ModelOnDisk, model_on_disk

_RUNTIME_BYTES = 480 * 10**6
"""Of a process that has imported torch and Transformers and run a tiny model, where the system does not tell: as on the
machine of docs/results/memory_plan.md."""
_CONTEXT = 4096


@dataclass(frozen=True)
class Forecast:
    """Estimates for a model that is not loaded."""

    model: ModelOnDisk
    estimate: MemoryEstimate
    options: list[Option]
    machine: Machine

    def with_packed(self, nbytes: int) -> Forecast:
        """The same with packed copies of the weights, of which only a loaded model tells. Streamed ones have none."""

        def counted(option: Option) -> Option:
            weights = option.estimate.weights
            if weights.streamed:
                return option
            estimate = replace(option.estimate, weights=replace(weights, packed=nbytes))
            return replace(option, estimate=estimate, fits=estimate.peak <= self.machine.available)

        options = [counted(option) for option in self.options]
        return replace(self, estimate=options[0].estimate, options=options)


def forecast(
    source: ModelSource,
    config: EngineConfig,
    *,
    context: int | None = None,
    batch: int = 1,
    weight_budget: int | None = None,
) -> Forecast:
    """Estimate a model's memory and speed without loading its weights.

    The default ``context`` is 4096 tokens, or the model's maximum if that is less.
    """
    model = model_on_disk(source)
    if config.numerics == "fast":
        model = replace(model, shape=replace(model.shape, tiled=False))
    if context is None:
        context = min(_CONTEXT, model.shape.max_positions or _CONTEXT)
    weights = model.weights if weight_budget is None else model.streamed(weight_budget)
    budgets = default_budgets(model.layout, device=source.torch_device, weights=weights.in_memory)
    longest = step_limit(model.shape, available=memory_available(source.torch_device.type))
    work = workload(
        with_budgets(config, budgets), context=context, batch=batch, layout=model.layout, step_tokens=longest
    )
    machine = _measure(source, model, tokens=work.step_tokens)
    options = list_options(
        model.shape,
        weights,
        work,
        machine=machine,
        stored=stored_bytes_per_token(model.layout),
        stream=model.streamed,
    )
    return Forecast(model, options[0].estimate, options, machine)


def _measure(source: ModelSource, model: ModelOnDisk, *, tokens: int) -> Machine:
    """The memory and speed of this machine. A prefill step has ``tokens``."""
    device = source.torch_device
    rates = measure_rates(dtype=model.dtype, device=device, tokens=tokens, files=model.files)
    try:
        # Measured, not estimated: a large vocabulary takes hundreds of megabytes.
        tokenizer = load_tokenizer(source)
    except ConfigError:
        tokenizer = None  # token ids can be given instead
    runtime = resident_bytes() or _RUNTIME_BYTES
    del tokenizer
    available = memory_available(str(device)) + (runtime if device.type == "cpu" else 0)
    return Machine(available, runtime, rates)


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
    shape = replace(shape, tiled=tiles is not None)
    weights = replace(weights, packed=tiles.packed_bytes if tiles is not None else 0)
    resident, held = resident_bytes(), session.store.stats().bytes + session.prefiller.pool.idle_bytes
    known = weights.in_memory + weights.packed + held if shape.on_host else 0
    # The rest of the process; not measured where the system does not report it.
    runtime = resident - known if resident > known else _RUNTIME_BYTES
    return estimate_memory(shape, weights, work, runtime=runtime)
