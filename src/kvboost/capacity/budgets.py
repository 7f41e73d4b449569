"""What an engine takes of a device's memory where no setting says: shares of what is free once the weights are there.

Used when an engine is made, and by ``kvboost doctor``. Invariant: the shares of a device leave a fifth of it free, for
activations, for what waits to be written to slower tiers, and for the allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CACHE = 0.2
_WORKSPACES = 0.2  # one sequence of 8,192 tokens of an 8B model beside its weights on 24 GB
_RUNNING = 0.4
_HOST = 0.25  # pinned memory is taken from everybody else on the machine


@dataclass(frozen=True)
class MemoryBudgets:
    """Bytes for each purpose."""

    cache_bytes: int
    workspace_bytes: int
    jobs_kv_bytes: int
    """KV that the jobs of a batch runner hold together. ``generate`` has no limit unless ``kv_bytes`` is set."""
    host_cache_bytes: int = 0


HOST_BUDGETS = MemoryBudgets(cache_bytes=2 * 2**30, workspace_bytes=2**30, jobs_kv_bytes=2 * 2**30)
"""On the CPU, where other programs use the same memory."""


def device_budgets(free: Mapping[str, int], kv_per_token: Mapping[str, int], *, host_free: int) -> MemoryBudgets:
    """Shares of the free memory of the devices that hold KV, with the bytes of one token's KV on each.

    KV grows on all devices at once, so the device that is full first sets the limit.
    """
    token = sum(kv_per_token.values())
    usable = min(max(0, free[device]) * token // part for device, part in kv_per_token.items() if part)
    return MemoryBudgets(
        cache_bytes=int(_CACHE * usable),
        workspace_bytes=int(_WORKSPACES * usable),
        jobs_kv_bytes=int(_RUNNING * usable),
        host_cache_bytes=int(_HOST * max(0, host_free)),
    )
