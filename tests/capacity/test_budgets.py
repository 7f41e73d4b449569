"""Budgets of devices that are not here, by arithmetic: 24 and 80 GB, an 8B and a 70B model in bfloat16."""

from __future__ import annotations

import pytest
import torch

from kvboost.capacity import (
    HOST_BUDGETS,
    MemoryBudgets,
    ModelShape,
    WeightMemory,
    Workload,
    device_budgets,
    estimate_memory,
    request_bytes,
)
from kvboost.config import EngineConfig
from kvboost.core.workspaces import WorkspacePool
from kvboost.engine import memory
from kvboost.engine.memory import default_budgets, with_budgets
from kvboost.hf.cache import KVLayout, TensorSpec

GB = 10**9
_CONTEXT = 5 * 10**8  # what a CUDA context takes by itself
_8B = {"layers": 32, "weights": 16_060_522_496, "kv": 32 * 2 * 8 * 128 * 2}
_70B = {"layers": 80, "weights": 141_107_412_992, "kv": 80 * 2 * 8 * 128 * 2}
_PROMPT = 8192


def _budgets(model: dict[str, int], *sizes: int, weights: int | None = None) -> MemoryBudgets:
    """Of devices with these bytes, over which the layers are spread evenly."""
    held = model["weights"] if weights is None else weights
    free = {f"cuda:{index}": size - held // len(sizes) - _CONTEXT for index, size in enumerate(sizes)}
    return device_budgets(free, dict.fromkeys(free, model["kv"] // len(sizes)), host_free=64 * GB)


def _request(model: dict[str, int]) -> int:
    return request_bytes(_PROMPT, kv_per_token=model["kv"])


def test_the_models_are_what_they_are_called() -> None:
    assert (_8B["kv"], _70B["kv"]) == (128 * 2**10, 320 * 2**10)
    assert (_request(_8B), _request(_70B)) == (10_240 * _8B["kv"], 10_240 * _70B["kv"])
    # Why fixed sizes would not do: neither the pool nor the jobs of a server had place for one prompt.
    assert _request(_8B) > HOST_BUDGETS.workspace_bytes
    assert _request(_70B) > HOST_BUDGETS.jobs_kv_bytes


class _Cache:
    is_poolable = True

    def __init__(self, capacity: int, nbytes: int) -> None:
        self.capacity, self.nbytes = capacity, nbytes


@pytest.mark.parametrize(
    ("model", "sizes"),
    [(_8B, [24 * GB]), (_8B, [80 * GB]), (_70B, [80 * GB, 80 * GB])],
    ids=["8B on 24 GB", "8B on 80 GB", "70B on 2x80 GB"],
)
def test_a_prompt_of_8k_tokens_is_admitted_and_its_workspace_pooled(model: dict[str, int], sizes: list[int]) -> None:
    budgets = _budgets(model, *sizes)
    assert _request(model) <= budgets.jobs_kv_bytes
    make = lambda tokens: _Cache(tokens, tokens * model["kv"])  # noqa: E731
    pool = WorkspacePool(make, bytes_per_token=model["kv"], capacity_bytes=budgets.workspace_bytes)  # type: ignore[arg-type]
    cache, _ = pool.take(tokens=_PROMPT, chain=[])
    pool.give_back(cache, held=[b"a"])
    assert pool.idle_bytes == _request(model)
    assert pool.take(tokens=_PROMPT, chain=[b"a"]) == (cache, 1)


def test_a_70b_model_with_a_weight_budget_is_served_on_one_device() -> None:
    assert _request(_70B) <= _budgets(_70B, 24 * GB, weights=12 * GB).jobs_kv_bytes
    assert _request(_70B) <= _budgets(_70B, 80 * GB, weights=60 * GB).jobs_kv_bytes


@pytest.mark.parametrize("size", [24 * GB, 80 * GB])
def test_all_caches_full_leave_room_for_a_step(size: int) -> None:
    budgets = _budgets(_8B, size)
    shape = ModelShape(
        layers=32,
        hidden=4096,
        intermediate=14_336,
        vocab=128_256,
        heads=32,
        kv_heads=8,
        head_dim=128,
        element=2,
        parameters=7_500_000_000,
        kv_per_token=_8B["kv"],
        windows=(None,) * 32,
        on_host=False,
    )
    work = Workload(
        context=_PROMPT,
        step_tokens=1024,
        cache_bytes=budgets.cache_bytes,
        workspace_bytes=budgets.workspace_bytes,
    )
    estimate = estimate_memory(shape, WeightMemory(_8B["weights"]), work)
    waiting = 512 * 2**20  # blocks on their way to slower tiers
    taken = estimate.peak - estimate.kv + budgets.jobs_kv_bytes + waiting + _CONTEXT
    assert taken <= size


def test_the_device_that_is_full_first_sets_the_limit() -> None:
    even = device_budgets({"a": 10 * GB, "b": 10 * GB}, {"a": 100, "b": 100}, host_free=0)
    tight = device_budgets({"a": 10 * GB, "b": 2 * GB}, {"a": 100, "b": 100}, host_free=0)
    uneven = device_budgets({"a": 10 * GB, "b": 2 * GB}, {"a": 250, "b": 50}, host_free=0)
    assert even.jobs_kv_bytes == 8 * GB  # two fifths of both
    assert tight.jobs_kv_bytes == 16 * 10**8  # half of it on b, where it is two fifths
    assert uneven.jobs_kv_bytes == 48 * 10**8  # five sixths on a
    assert device_budgets({"a": -GB}, {"a": 1}, host_free=-1) == MemoryBudgets(0, 0, 0, 0)


def _layout(*devices: str) -> KVLayout:
    return KVLayout(tuple(TensorSpec(8, 128, torch.bfloat16, torch.device(device)) for device in devices))


def test_an_engine_takes_shares_of_what_is_free_and_what_was_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cuda:0": 10 * GB, "cpu": 40 * GB, "mps": 10 * GB}
    monkeypatch.setattr(memory, "memory_available", free.__getitem__)
    budgets = default_budgets(_layout("cuda:0", "cuda:0"))
    assert budgets == MemoryBudgets(2 * GB, 2 * GB, 4 * GB, 10 * GB)
    config = with_budgets(EngineConfig(), budgets)
    assert (config.cache_bytes, config.workspace_bytes, config.host_cache_bytes) == (2 * GB, 2 * GB, 10 * GB)
    config = with_budgets(EngineConfig(cache_bytes="1GB", workspace_bytes=0, host_cache_bytes=0), budgets)
    assert (config.cache_bytes, config.workspace_bytes, config.host_cache_bytes) == (GB, 0, 0)
    assert default_budgets(_layout("mps")).host_cache_bytes == 0
    assert default_budgets(_layout("cpu"), device=torch.device("cuda", 0), weights=5 * GB).cache_bytes == GB


def test_on_the_cpu_nothing_changes() -> None:
    assert default_budgets(_layout("cpu")) == HOST_BUDGETS == MemoryBudgets(2**31, 2**30, 2**31, 0)
