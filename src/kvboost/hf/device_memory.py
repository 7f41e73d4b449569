"""Memory in use and available, from the system or the accelerator.

Used by memory estimates and when a server starts.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

_GROUPS = (
    ("/sys/fs/cgroup", r"^0::(/.*)$", "memory.max", "memory.current", r"^inactive_file (\d+)$"),
    (
        "/sys/fs/cgroup/memory",
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        r"^total_inactive_file (\d+)$",
    ),
)
"""Control groups of version 2 and 1: where they are, which one this process is in, what it may take and has taken."""


def memory_available(device: str = "cpu") -> int:
    """Bytes that can still be taken: the system's, or what the container has left of them; the accelerator's own."""
    if device != "cpu":
        return _accelerator_free(torch.device(device))
    found = _number("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB")
    system = found * 1024 if found is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([system, *(free for _, free in _limits())]))


def memory_total() -> int:
    """Bytes of the system's memory, or the container's limit of them: the same at every start, whatever else runs."""
    system = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([system, *(limit for limit, _ in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """What each control group around this process may take, and what it has left."""
    for root, line, limit_file, used_file, cached_line in _GROUPS:
        # In a container the path may be the host's: then nothing is there, but for the root.
        group = PurePosixPath(root + (_find("/proc/self/cgroup", line) or "/"))
        for folder in (group, *group.parents[: len(group.parts) - len(PurePosixPath(root).parts)]):
            if (limit := _number(f"{folder}/{limit_file}", r"^(\d+)$")) is not None:
                used = _number(f"{folder}/{used_file}", r"^(\d+)$") or 0
                yield limit, limit - used + (_number(f"{folder}/memory.stat", cached_line) or 0)


def allocated_bytes(device: torch.device) -> int:
    """What the tensors of this process take on an accelerator."""
    if device.type == "mps":
        module: Any = torch.get_device_module(device)
        return int(module.current_allocated_memory())
    return int(_memory(device, "memory_allocated"))


def _accelerator_free(device: torch.device) -> int:
    """What the driver has left, and what torch's allocator holds without using it."""
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        return int(module.recommended_max_memory()) - int(module.driver_allocated_memory())
    try:
        free, _ = _memory(device, "mem_get_info", "get_memory_info")
    except RuntimeError as error:  # some XPUs do not tell, integrated ones most of all
        untold = f"{device} does not tell its free memory ({error}): what this process has not taken counts as free"
        warnings.warn(untold, RuntimeWarning, stacklevel=2)
        return int(module.get_device_properties(device).total_memory) - allocated_bytes(device)
    return int(free) + int(_memory(device, "memory_reserved")) - allocated_bytes(device)


def _memory(device: torch.device, own: str, general: str = "") -> Any:
    """What the device's module says, or a newer torch's for all accelerators where the module does not."""
    return (getattr(torch.get_device_module(device), own, None) or getattr(torch.accelerator, general or own))(device)


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not report it."""
    found = _number("/proc/self/status", r"^VmRSS:\s+(\d+) kB")
    return found * 1024 if found is not None else 0


def _number(file: str, pattern: str) -> int | None:
    found = _find(file, pattern)
    return None if found is None else int(found)


def _find(file: str, pattern: str) -> str | None:
    try:
        found = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None  # another system, or no such limit
    return found[1] if found else None
