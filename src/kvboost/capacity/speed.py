"""How fast a plan would run on a machine whose links were measured.

Used by the options and by ``kvboost doctor``. Bounds from what must be moved and multiplied, as if nothing else took
time: a real run stays below them. Invariant: less memory never makes a plan faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.capacity.memory import MemoryPlan, ModelShape, Workload


@dataclass(frozen=True)
class Rates:
    """What this machine does in a second, measured."""

    memory: float
    """Bytes of weights multiplied with one row: what decoding reads."""
    multiply: float
    """Multiplications and additions, with as many rows as a step of reading has."""
    disk: float
    """Bytes read past the page cache."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second, of all requests together."""

    prefill: float
    decode: float
    limited_by: str
    """What decoding waits for: ``memory`` or ``disk``."""


def expected_speed(shape: ModelShape, work: Workload, plan: MemoryPlan, rates: Rates) -> Speed:
    """Reading a prompt of ``work.context`` tokens, and decoding behind it."""
    # A token's new row is multiplied with every matrix once, and attends to half of the context on average.
    flops = 2 * shape.parameters + 4 * shape.heads * shape.head_dim * shape.layers * work.context // 2
    rows = min(work.step_rows, work.context)
    passing = plan.weights.streamed / rates.disk
    reading = max(flops / rates.multiply, (passing + plan.kv_spilled / work.batch / 2 / rates.disk) / rows)
    in_memory = (shape.parameters * shape.element + plan.kv + plan.kv_spilled) / rates.memory
    from_disk = passing + plan.kv_spilled / rates.disk
    step = max(in_memory, from_disk)
    return Speed(1.0 / reading, work.batch / step, "disk" if from_disk > in_memory else "memory")
