"""The memory an engine takes, loaded or not: its settings and its model's shape put together.

Used by ``KVBoost.estimate_memory`` and by ``kvboost doctor``. Invariant: no weights are loaded here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.capacity import (
    Machine,
    MemoryEstimate,
    ModelShape,
    Option,
    WeightMemory,
    Workload,
    estimate_memory,
    list_options,
    request_bytes,
)
from kvboost.config import EngineConfig
from kvboost.core.chunking import make_chunker
from kvboost.errors import ConfigError
from kvboost.hf.cache import KVLayout
from kvboost.hf.device_memory import memory_available, resident_bytes
from kvboost.hf.loading import ModelSource, load_tokenizer
from kvboost.hf.shape import stored_bytes_per_token
from kvboost.offload.kv.prefill import STEP_TOKENS, block_tokens_for
from kvboost.offload.rates import measure_rates
from kvboost.offload.weights import ModelOnDisk, model_on_disk

_CONTEXT = 4096
_RUNTIME_BYTES = 480 * 10**6
"""Of a process that has imported torch and Transformers and run a tiny model, where the system does not tell: as on the
machine of docs/results/plan.md."""


@dataclass(frozen=True)
class Forecast:
    """What can be said about a model before it is loaded."""

    model: ModelOnDisk
    estimate: MemoryEstimate
    options: list[Option]
    machine: Machine


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
    step_tokens = int(getattr(chunker, "max_tokens", config.chunk_size))
    pages: dict[str, int] = {}
    if config.kv_bytes is not None:
        budget = int(config.kv_bytes)
        pages = {"kv_bytes": budget, "block_tokens": block_tokens_for(layout, budget)}
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
        disk_cache_bytes=int(config.disk_cache_bytes) if config.disk_cache_dir is not None else 0,
        workspace_bytes=int(config.workspace_bytes),
        stored_tokens=stored_tokens,
        **pages,
    )


def estimate_loaded(shape: ModelShape, weights: WeightMemory, work: Workload, *, held: int) -> MemoryEstimate:
    """The memory of a loaded engine, which holds ``held`` bytes of chunks and workspaces now."""
    resident = resident_bytes()
    known = weights.in_memory + held if shape.on_host else 0
    # What this process has beside them; nothing to measure where the system does not tell.
    runtime = resident - known if resident > known else _RUNTIME_BYTES
    return estimate_memory(shape, weights, work, runtime=runtime)


def forecast(
    source: ModelSource,
    config: EngineConfig,
    *,
    context: int | None = None,
    batch: int = 1,
    weight_budget: int | None = None,
) -> Forecast:
    """What a model would take and how fast it would be, without loading its weights.

    Without a ``context``, 4096 tokens or as many as the model was made for.
    """
    model = model_on_disk(source)
    if context is None:
        context = min(_CONTEXT, model.shape.max_positions or _CONTEXT)
    work = workload(config, context=context, batch=batch, layout=model.layout)
    weights = model.weights if weight_budget is None else model.streamed(weight_budget)
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
    """What this machine has for the model. A step of prefill has ``tokens``."""
    device = source.torch_device
    rates = measure_rates(dtype=model.dtype, device=device, tokens=tokens, files=model.files)
    try:
        # Measured and not estimated: that of a large vocabulary takes hundreds of megabytes.
        tokenizer = load_tokenizer(source)
    except ConfigError:
        tokenizer = None  # token ids can be given instead
    runtime = resident_bytes() or _RUNTIME_BYTES
    del tokenizer
    available = memory_available(str(device)) + (runtime if device.type == "cpu" else 0)
    return Machine(available, runtime, rates)
