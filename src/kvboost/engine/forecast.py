"""Estimates a model's memory and speed from its files, without loading weights, and what else would fit.

Used by ``kvboost doctor``: the model as asked, and with streamed weights, paged KV or smaller caches. Speeds are bounds
from what must be moved and multiplied, as if nothing else took time: a real run stays below them. Invariants: an option
that is said to fit has an estimated peak within the available memory; less memory never makes an estimate faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvboost.capacity import MemoryEstimate, ModelShape, WeightMemory, Workload, estimate_memory, step_limit
from kvboost.config import EngineConfig
from kvboost.engine.memory import RUNTIME_BYTES, default_budgets, with_budgets, workload
from kvboost.errors import ConfigError
from kvboost.hf.device_memory import memory_available, resident_bytes
from kvboost.hf.loading import ModelSource, load_tokenizer
from kvboost.hf.shape import stored_bytes_per_token
from kvboost.offload.rates import Rates, measure_rates
from kvboost.offload.weights.load import ModelOnDisk, model_on_disk

_CONTEXT = 4096
_SHARES = (2, 4, 8)  # a half, a quarter, an eighth of the KV stays in memory


@dataclass(frozen=True)
class Speed:
    """Tokens per second, of all requests together."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Machine:
    """What a model would run on."""

    available: int
    """Bytes this process may come to take in all."""
    runtime: int
    """Bytes of Python, torch and Transformers themselves."""
    rates: Rates


@dataclass(frozen=True)
class Option:
    """One way to run it."""

    name: str
    change: str
    """The settings that make it so; empty for what was asked."""
    estimate: MemoryEstimate
    fits: bool
    speed: Speed


@dataclass(frozen=True)
class Forecast:
    """Estimates for a model that is not loaded."""

    model: ModelOnDisk
    options: list[Option]
    """As asked first."""
    machine: Machine

    @property
    def estimate(self) -> MemoryEstimate:
        """The memory it takes as asked."""
        return self.options[0].estimate

    def with_packed(self, nbytes: int) -> Forecast:
        """The same with packed copies of the weights, of which only a loaded model tells. Streamed ones have none."""

        def counted(option: Option) -> Option:
            weights = option.estimate.weights
            if weights.streamed:
                return option
            estimate = replace(option.estimate, weights=replace(weights, packed=nbytes))
            return replace(option, estimate=estimate, fits=estimate.peak <= self.machine.available)

        return replace(self, options=[counted(option) for option in self.options])


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
    return Forecast(model, options, machine)


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


def list_options(
    shape: ModelShape,
    weights: WeightMemory,
    work: Workload,
    *,
    machine: Machine,
    stored: Mapping[int, int],
    stream: Callable[[int], WeightMemory],
) -> list[Option]:
    """As asked first, then what takes less.

    ``stored`` has the bytes of a stored token by bits. ``stream`` says where the weights are with a weight budget, and
    raises ConfigError for one that is too small.
    """

    def option(name: str, change: str, of: WeightMemory, asked: Workload) -> Option:
        estimate = estimate_memory(shape, of, asked, runtime=machine.runtime)
        speed = expected_speed(shape, asked, estimate, machine.rates)
        return Option(name, change, estimate, estimate.peak <= machine.available, speed)

    found = [option("as asked", "", weights, work)]
    over = found[0].estimate.peak - machine.available
    for bits in (8, 4):
        if stored[bits] < work.stored_per_token and work.cache_bytes:
            # As many chunks as before, in less memory.
            size = _round(work.cache_bytes * stored[bits] // work.stored_per_token)
            less = replace(work, stored_per_token=stored[bits], packed=True, cache_bytes=size)
            change = f"kv_cache_bits={bits}, cache_bytes={_text(size)}"
            found.append(option(f"KV stored in {bits} bits", change, weights, less))
    if over > 0 and work.cache_bytes:
        size = _round(max(0, work.cache_bytes - over))
        found.append(option("a smaller cache", f"cache_bytes={_text(size)}", weights, replace(work, cache_bytes=size)))
    budgets = [weights.in_memory - over] if over > 0 else []
    streamed = _streamed([*budgets, *(weights.in_memory // share for share in _SHARES)], stream)
    if streamed is not None:
        change, of = streamed
        found.append(option("weights streamed", change, of, work))
    # Requests side by side are not paged: several of them run one after the other, each as this one.
    paged = _paged(option, weights, work, shape) if work.batch == 1 else None
    if paged is not None:
        found.append(paged[0])
        if streamed is not None:
            found.append(option("both", f"{streamed[0]}, {paged[0].change}", streamed[1], paged[1]))
    return found


def expected_speed(shape: ModelShape, work: Workload, estimate: MemoryEstimate, rates: Rates) -> Speed:
    """Prefill of a prompt of ``work.context`` tokens, and decoding behind it."""
    # A token is multiplied with every matrix once, and attends to half of the context on average.
    flops = 2 * shape.parameters + 4 * shape.heads * shape.head_dim * shape.layers * work.context // 2
    tokens = min(work.step_tokens, work.context)
    streaming = estimate.weights.streamed / rates.disk
    spilled = estimate.kv_spilled / rates.disk
    prefill = max(flops / rates.multiply, (streaming + spilled / work.batch / 2) / tokens)
    in_memory = (shape.parameters * shape.element + estimate.kv + estimate.kv_spilled) / rates.memory
    decode = max(in_memory, streaming + spilled)
    return Speed(1.0 / prefill, work.batch / decode)


def _streamed(budgets: list[int], stream: Callable[[int], WeightMemory]) -> tuple[str, WeightMemory] | None:
    """The first of these budgets with which the model can be streamed, as a setting, and where its weights are then."""
    for budget in map(_round, budgets):
        try:
            weights = stream(budget)
        except ConfigError:
            continue  # too small for this model
        if weights.streamed:
            return f"weight_budget={_text(budget)}", weights
    return None


def _paged(
    option: Callable[[str, str, WeightMemory, Workload], Option],
    weights: WeightMemory,
    work: Workload,
    shape: ModelShape,
) -> tuple[Option, Workload] | None:
    """The largest share of the KV in memory with which it fits, else the smallest that pages allow, and its work."""
    best: tuple[Option, Workload] | None = None
    for share in _SHARES:
        budget = _round(work.context * shape.kv_per_token // share)
        asked = replace(work, kv_bytes=budget)
        try:
            best = option("KV paged", f"kv_bytes={_text(budget)}", weights, asked), asked
        except ConfigError:  # less than a page for every layer
            break
        if best[0].fits:
            break
    return best


def _round(size: int) -> int:
    """A size that is easy to write, and no larger."""
    return size - size % 10**6 if size >= 10**7 else size


def _text(size: int) -> str:
    return f"{size // 10**6}MB" if size and size % 10**6 == 0 else str(size)
