"""Estimates a model's memory and speed from its files, without loading weights.

Used by ``kvboost doctor``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvboost.capacity import Machine, MemoryEstimate, Option, list_options, step_limit
from kvboost.config import EngineConfig
from kvboost.engine.memory import RUNTIME_BYTES, default_budgets, with_budgets, workload
from kvboost.errors import ConfigError
from kvboost.hf.device_memory import memory_available, resident_bytes
from kvboost.hf.loading import ModelSource, load_tokenizer
from kvboost.hf.shape import stored_bytes_per_token
from kvboost.offload.rates import measure_rates
from kvboost.offload.weights.load import ModelOnDisk, model_on_disk

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
    runtime = resident_bytes() or RUNTIME_BYTES
    del tokenizer
    available = memory_available(str(device)) + (runtime if device.type == "cpu" else 0)
    return Machine(available, runtime, rates)
