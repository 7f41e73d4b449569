"""A shape small enough to count by hand."""

from __future__ import annotations

from typing import Any

from kvboost.capacity import ModelShape, WeightMemory, Workload

KV = 2 * 3 * 2 * 8 * 4  # keys and values, layers, heads, numbers of a head, bytes of one
WEIGHTS = WeightMemory(resident=1_000_000)


def shape(**changes: Any) -> ModelShape:
    given: dict[str, Any] = {
        "layers": 3,
        "hidden": 32,
        "intermediate": 64,
        "vocab": 100,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "element": 4,
        "parameters": 250_000,
        "kv_per_token": KV,
        "windows": (None,) * changes.get("layers", 3),
    }
    return ModelShape(**(given | changes))


def work(**changes: Any) -> Workload:
    return Workload(**({"context": 1000, "step_tokens": 128, "stored_per_token": KV} | changes))
