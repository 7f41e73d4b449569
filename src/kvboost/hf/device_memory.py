"""Memory in use and available, from the system or the accelerator.

Used by memory estimates and when a server starts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch


def memory_available(device: str = "cpu") -> int:
    """Bytes that can still be taken: the system's, or what the container has left of them; the accelerator's own."""
    if device != "cpu":
        return _accelerator_free(torch.device(device))
    found = _number("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB")
    system = found * 1024 if found is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _number("/sys/fs/cgroup/memory.max", r"^(\d+)$")
    if limit is None:
        return system
    used = _number("/sys/fs/cgroup/memory.current", r"^(\d+)$") or 0
    cached = _number("/sys/fs/cgroup/memory.stat", r"^inactive_file (\d+)$") or 0
    return max(0, min(system, limit - used + cached))


def allocated_bytes(device: torch.device) -> int:
    """What the tensors of this process take on an accelerator."""
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        return int(module.current_allocated_memory())
    return int(module.memory_allocated(device))


def _accelerator_free(device: torch.device) -> int:
    """What the driver has left, and what torch's allocator holds without using it."""
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        return int(module.recommended_max_memory()) - int(module.driver_allocated_memory())
    free, _ = module.mem_get_info(device)
    return int(free) + int(module.memory_reserved(device)) - int(module.memory_allocated(device))


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not report it."""
    found = _number("/proc/self/status", r"^VmRSS:\s+(\d+) kB")
    return found * 1024 if found is not None else 0


def _number(file: str, pattern: str) -> int | None:
    try:
        found = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None  # another system, or no such limit
    return int(found[1]) if found else None
