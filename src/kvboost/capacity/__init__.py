"""How much memory a model, a context and a batch take, and how fast they would run: arithmetic, nothing is loaded."""

from kvboost.capacity.budgets import HOST_BUDGETS, MemoryBudgets, device_budgets
from kvboost.capacity.memory import (
    MAX_IDLE,
    MAX_STEP,
    Activations,
    MemoryEstimate,
    ModelShape,
    WeightMemory,
    Workload,
    estimate_memory,
    paged_memory,
    request_bytes,
    rounded_capacity,
    row_capacity,
    shortfall,
    step_limit,
    workspace_capacity,
)
from kvboost.capacity.options import Machine, Option, list_options
from kvboost.capacity.speed import Rates, Speed, expected_speed

__all__ = [
    "HOST_BUDGETS",
    "MAX_IDLE",
    "MAX_STEP",
    "Activations",
    "Machine",
    "MemoryBudgets",
    "MemoryEstimate",
    "ModelShape",
    "Option",
    "Rates",
    "Speed",
    "WeightMemory",
    "Workload",
    "device_budgets",
    "estimate_memory",
    "expected_speed",
    "list_options",
    "paged_memory",
    "request_bytes",
    "rounded_capacity",
    "row_capacity",
    "shortfall",
    "step_limit",
    "workspace_capacity",
]
