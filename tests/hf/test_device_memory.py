from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvboost.hf import device_memory
from kvboost.hf.device_memory import memory_available


def test_containers_limit_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"memory.max": 10**9, "memory.current": 4 * 10**8, "memory.stat": 10**8, "meminfo": 10**7}
    monkeypatch.setattr(device_memory, "_number", lambda file, pattern: limits[Path(file).name])
    assert memory_available() == 7 * 10**8
    limits["memory.max"] = 10**12
    assert memory_available() == 10**7 * 1024


class _Cuda:
    """What ``torch.cuda`` would tell of a device with 24 GB."""

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 7 * 10**9, 24 * 10**9

    def memory_reserved(self, device: torch.device) -> int:
        return 17 * 10**9

    def memory_allocated(self, device: torch.device) -> int:
        return 16 * 10**9


def test_what_the_allocator_keeps_for_itself_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: _Cuda())
    assert memory_available("cuda:0") == 8 * 10**9
    assert device_memory.allocated_bytes(torch.device("cuda", 0)) == 16 * 10**9
