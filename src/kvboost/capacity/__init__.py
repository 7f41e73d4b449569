"""What a model, a context and a batch take of memory, and how fast they would run: plain numbers, nothing is loaded."""

from kvboost.capacity.memory import (
    MAX_IDLE,
    Activations,
    MemoryPlan,
    ModelShape,
    WeightMemory,
    Workload,
    paged_memory,
    plan_memory,
    request_bytes,
    rounded_rows,
    workspace_rows,
)
from kvboost.capacity.options import Option, plan_options
from kvboost.capacity.speed import Rates, Speed, expected_speed

__all__ = [
    "MAX_IDLE",
    "Activations",
    "MemoryPlan",
    "ModelShape",
    "Option",
    "Rates",
    "Speed",
    "WeightMemory",
    "Workload",
    "expected_speed",
    "paged_memory",
    "plan_memory",
    "plan_options",
    "request_bytes",
    "rounded_rows",
    "workspace_rows",
]
