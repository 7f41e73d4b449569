from __future__ import annotations

from pathlib import Path

import pytest

from kvboost.hf import device_memory
from kvboost.hf.device_memory import memory_available


def test_containers_limit_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"memory.max": 10**9, "memory.current": 4 * 10**8, "memory.stat": 10**8, "meminfo": 10**7}
    monkeypatch.setattr(device_memory, "_number", lambda file, pattern: limits[Path(file).name])
    assert memory_available() == 7 * 10**8
    limits["memory.max"] = 10**12
    assert memory_available() == 10**7 * 1024
