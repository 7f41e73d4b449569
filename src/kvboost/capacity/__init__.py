"""How much memory a model, a context and a batch take, and how fast they would run: arithmetic, nothing is loaded."""

from kvboost.capacity.memory import (
    MAX_IDLE,
    Activations,
    MemoryEstimate,
    ModelShape,
    WeightMemory,
    Workload,
    estimate_memory,
    paged_memory,
    request_bytes,
    rounded_capacity,
    shortfall,
    workspace_capacity,
)
from kvboost.capacity.options import Machine, Option, list_options
from kvboost.capacity.speed import Rates, Speed, expected_speed

__all__ = [
    "MAX_IDLE",
    "Activations",
    "Machine",
    "MemoryEstimate",
    "ModelShape",
    "Option",
    "Rates",
    "Speed",
    "WeightMemory",
    "Workload",
    "estimate_memory",
    "expected_speed",
    "list_options",
    "paged_memory",
    "request_bytes",
    "rounded_capacity",
    "shortfall",
    "workspace_capacity",
]
