from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost.hf import device_memory
from kvboost.hf.device_memory import memory_available, memory_total


def test_containers_limit_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"memory.max": 10**9, "memory.current": 4 * 10**8, "memory.stat": 10**8, "meminfo": 10**7}
    monkeypatch.setattr(device_memory, "_number", lambda file, pattern: limits.get(Path(file).name))
    assert memory_available() == 7 * 10**8
    limits["memory.max"] = 10**12
    assert memory_available() == 10**7 * 1024


@pytest.mark.parametrize("file", ["memory.max", "memory.limit_in_bytes"])
def test_all_memory_is_the_systems_or_the_containers(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system = memory_total()
    limits = {file: 10**8}
    monkeypatch.setattr(device_memory, "_number", lambda path, pattern: limits.get(Path(path).name))
    assert memory_total() == 10**8 < system
    limits[file] = 2**63 - 4096  # none, in the first version's words
    assert memory_total() >= system


_GIGABYTE = 10**9
_SECOND = {
    "/proc/self/cgroup": "0::/pods/mine\n",
    "/sys/fs/cgroup/memory.max": "max\n",
    "/sys/fs/cgroup/pods/memory.max": f"{_GIGABYTE}\n",
    "/sys/fs/cgroup/pods/memory.current": f"{9 * 10**8}\n",
    "/sys/fs/cgroup/pods/memory.stat": f"anon 5\ninactive_file {3 * 10**8}\n",
    "/sys/fs/cgroup/pods/mine/memory.max": f"{2 * _GIGABYTE}\n",
    "/sys/fs/cgroup/pods/mine/memory.current": f"{8 * 10**8}\n",
}
_FIRST = {
    "/proc/self/cgroup": "5:cpu:/elsewhere\n4:memory:/pods/mine\n0::/\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
    "/sys/fs/cgroup/memory/pods/memory.limit_in_bytes": f"{_GIGABYTE}\n",
    "/sys/fs/cgroup/memory/pods/memory.usage_in_bytes": f"{9 * 10**8}\n",
    "/sys/fs/cgroup/memory/pods/memory.stat": f"inactive_file 7\ntotal_inactive_file {3 * 10**8}\n",
    "/sys/fs/cgroup/memory/pods/mine/memory.limit_in_bytes": f"{2 * _GIGABYTE}\n",
    "/sys/fs/cgroup/memory/elsewhere/memory.limit_in_bytes": "5\n",
}


@pytest.mark.parametrize("files", [_FIRST, _SECOND], ids=["v1", "v2"])
def test_the_narrowest_group_around_the_process_counts(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {**files, "/proc/meminfo": "MemAvailable:   16000000 kB\n"}.items():
        (file := tmp_path / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(device_memory, "Path", lambda name: tmp_path / str(name)[1:])
    monkeypatch.setattr(os, "sysconf", lambda name: 2**20)
    assert memory_total() == _GIGABYTE
    assert memory_available() == 4 * 10**8


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


class _Untold(_Cuda):
    """Of a card whose driver does not tell, as ``torch.xpu`` says it."""

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        raise RuntimeError("The device (Intel(R) Graphics) doesn't support querying the available free memory.")

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=24 * 10**9)


def test_a_card_that_does_not_tell_its_free_memory_has_what_was_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: _Untold())
    with pytest.warns(RuntimeWarning, match="xpu:0 does not tell its free memory .*counts as free"):
        assert memory_available("xpu:0") == 8 * 10**9


def test_what_a_devices_module_lacks_torch_says_for_all_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    general = {"get_memory_info": (5 * 10**9, 24 * 10**9), "memory_reserved": 3 * 10**9, "memory_allocated": 10**9}
    for name, value in general.items():
        monkeypatch.setattr(torch.accelerator, name, lambda device, value=value: value, raising=False)
    assert memory_available("hpu:0") == 7 * 10**9
