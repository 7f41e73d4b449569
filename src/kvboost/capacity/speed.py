"""How fast a model would run on a machine whose links were measured.

Used by the options and by ``kvboost doctor``. Bounds from what must be moved and multiplied, as if nothing else took
time: a real run stays below them. Invariant: less memory never makes an estimate faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.capacity.memory import MemoryEstimate, ModelShape, Workload


@dataclass(frozen=True)
class Rates:
    """What this machine does in a second, measured."""

    memory: float
    """Bytes of weights multiplied with one token's states: what decoding reads."""
    multiply: float
    """Multiplications and additions, with as many tokens as a step of prefill has."""
    disk: float
    """Bytes read past the page cache."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second, of all requests together."""

    prefill: float
    decode: float
    limited_by: str
    """What decoding waits for: ``memory`` or ``disk``."""


def expected_speed(shape: ModelShape, work: Workload, estimate: MemoryEstimate, rates: Rates) -> Speed:
    """Prefill of a prompt of ``work.context`` tokens, and decoding behind it."""
    # A token is multiplied with every matrix once, and attends to half of the context on average.
    flops = 2 * shape.parameters + 4 * shape.heads * shape.head_dim * shape.layers * work.context // 2
    tokens = min(work.step_tokens, work.context)
    streaming = estimate.weights.streamed / rates.disk
    spilled = estimate.kv_spilled / rates.disk
    prefill = max(flops / rates.multiply, (streaming + spilled / work.batch / 2) / tokens)
    in_memory = (shape.parameters * shape.element + estimate.kv + estimate.kv_spilled) / rates.memory
    from_disk = streaming + spilled
    decode = max(in_memory, from_disk)
    return Speed(1.0 / prefill, work.batch / decode, "disk" if from_disk > in_memory else "memory")
