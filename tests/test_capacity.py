from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost.capacity import (
    HOST_BUDGETS,
    MemoryBudgets,
    ModelShape,
    WeightMemory,
    Workload,
    device_budgets,
    estimate_memory,
    paged_memory,
    request_bytes,
    workspace_capacity,
)
from kvboost.config import EngineConfig
from kvboost.core.workspaces import WorkspacePool
from kvboost.engine import memory
from kvboost.engine.memory import default_budgets, with_budgets
from kvboost.errors import ConfigError
from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.steps import StepRule
from tests.helpers.shapes import KV, WEIGHTS, shape, work


def test_workspaces_have_headroom_and_round_numbers() -> None:
    assert workspace_capacity(1) == 256
    assert workspace_capacity(1000) == 1280  # and a quarter: 1250
    assert workspace_capacity(100_000) == 102_144  # and 2048: 102,048
    assert request_bytes(1000, kv_per_token=KV) == 1280 * KV


def test_an_estimate_counted_by_hand() -> None:
    estimate = estimate_memory(shape(), WEIGHTS, work(batch=2, stored_tokens=2000, cache_bytes=10**9), runtime=7)
    assert estimate.kv == 2 * 1000 * KV
    assert estimate.kv_reserved == 2 * 1280 * KV
    assert estimate.cache == 2000 * KV
    held = 2 * 128 * 32 * 4 + 128 * 32 * 4
    attention = held + (4 * 128 * 4 * 8 + 2 * 2 * 128 * 2 * 8) * 4 + 128 * 1000 * (3 + 4) + 2 * 4 * 1000 * 8 * 4
    assert estimate.activations.attention == attention
    assert estimate.activations.mlp == held + 3 * 128 * 64 * 4
    assert estimate.activations.logits == 2 * 100 * 12
    assert estimate.peak == 1_000_000 + 2 * 1000 * KV + attention + 2000 * KV + 7
    assert sum(estimate.lines().values()) == estimate.peak


def test_heads_with_keys_of_their_own_are_not_repeated() -> None:
    alone = estimate_memory(shape(kv_heads=4), WEIGHTS, work()).activations.attention
    shared = estimate_memory(shape(), WEIGHTS, work()).activations.attention
    assert shared - alone == 2 * 4 * 1000 * 8 * 4 - 2 * 2 * 128 * 2 * 8 * 4


def test_attention_without_a_kernel_holds_its_scores() -> None:
    estimate = estimate_memory(shape(masks=False), WEIGHTS, work())
    assert estimate.activations.attention > 4 * 128 * 1000 * 8


def test_full_caches_are_counted_unless_told_what_was_stored() -> None:
    asked = work(cache_bytes=5 * 10**6, workspace_bytes=10**6)
    assert estimate_memory(shape(), WEIGHTS, asked).cache == 5 * 10**6
    assert estimate_memory(shape(), WEIGHTS, asked).workspaces == 10**6
    assert estimate_memory(shape(), WEIGHTS, replace(asked, stored_tokens=10)).cache == 10 * KV
    assert estimate_memory(shape(), WEIGHTS, replace(asked, stored_tokens=10**6)).cache == 5 * 10**6


def test_a_converted_checkpoint_peaks_while_it_is_loaded() -> None:
    estimate = estimate_memory(shape(), WeightMemory(10**8, converted_from=2 * 10**8), work())
    assert estimate.loading == estimate.device_bytes == 3 * 10**8


def test_an_accelerator_reserves_and_the_host_holds_the_rest() -> None:
    asked = work(host_cache_bytes=10**6, disk_cache_bytes=10**7, kv_bytes=80_000, block_tokens=16)
    estimate = estimate_memory(shape(on_host=False), WEIGHTS, asked, runtime=5)
    assert estimate.host_bytes == 5 + 10**6 + estimate.kv_spilled
    assert estimate.peak == estimate.device_bytes
    assert estimate.disk_bytes == 10**7
    whole = estimate_memory(shape(on_host=False), WEIGHTS, replace(asked, kv_bytes=None))
    assert whole.kv == 1280 * KV


def test_pages_counted_by_hand() -> None:
    # Blocks of 64 tokens: 8 KiB for each of 3 layers. 1000 tokens are 16 blocks a layer, 48 in all.
    kv, spilled = paged_memory(shape(), tokens=1000, budget=10 * 8192 + 100, block_tokens=64)
    assert kv == 10 * 8192
    assert spilled == (48 - 8) * 8192
    assert paged_memory(shape(), tokens=1000, budget=60 * 8192, block_tokens=64) == (50 * 8192, 0)
    assert estimate_memory(shape(), WEIGHTS, work(kv_bytes=1280 * KV)).kv == 1000 * KV  # in one piece
    assert (
        estimate_memory(shape(), WEIGHTS, work(kv_bytes=1280 * KV - 1)).kv == 14 * 256 * 128
    )  # 4 pages a layer, and 2
    with pytest.raises(ConfigError, match=f"at least {5 * 8192}"):
        paged_memory(shape(), tokens=1000, budget=5 * 8192 - 1, block_tokens=64)


def test_a_paged_request_never_takes_more_than_its_budget() -> None:
    estimate = estimate_memory(shape(), WEIGHTS, work(context=50_000, batch=3, kv_bytes=200_000))
    assert estimate.kv <= 3 * 200_000
    assert estimate.kv + estimate.kv_spilled >= 3 * 50_000 * KV


@pytest.mark.parametrize("name", ["context", "batch", "step_tokens", "block_tokens"])
def test_nothing_is_less_than_one(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        work(**{name: 0})


def test_windows_are_one_for_each_layer() -> None:
    with pytest.raises(ConfigError, match="1 windows for 3 layers"):
        shape(windows=(None,))


_SIZES = st.integers(1, 20_000)


@given(
    context=_SIZES,
    more=st.integers(0, 5000),
    batch=st.integers(1, 16),
    on_host=st.booleans(),
    bits=st.sampled_from([16, 8, 4]),
    full=st.booleans(),
)
def test_more_never_takes_less(context: int, more: int, batch: int, on_host: bool, bits: int, full: bool) -> None:
    def peak(context: int, batch: int, bits: int) -> int:
        asked = work(
            context=context,
            batch=batch,
            stored_per_token=KV * bits // 16,
            cache_bytes=10**7,
            workspace_bytes=10**6,
            stored_tokens=None if full else batch * context,
        )
        return estimate_memory(shape(on_host=on_host), WEIGHTS, asked).peak

    here = peak(context, batch, bits)
    assert peak(context + more, batch, bits) >= here
    assert peak(context, batch + 1, bits) >= here
    assert peak(context, batch, 16) >= here


@given(tokens=_SIZES, budget=st.integers(5 * 8192, 10**7), more=st.integers(0, 10**6))
def test_a_larger_budget_spills_less(tokens: int, budget: int, more: int) -> None:
    kv, spilled = paged_memory(shape(), tokens=tokens, budget=budget, block_tokens=64)
    assert kv <= budget
    assert kv + spilled >= tokens * KV
    assert paged_memory(shape(), tokens=tokens, budget=budget + more, block_tokens=64)[1] <= spilled


def test_in_tiles_only_windows_have_a_mask_and_no_keys_are_repeated() -> None:
    def attention(**changes: object) -> int:
        return estimate_memory(shape(tiled=True, **changes), WEIGHTS, work()).activations.attention

    held = 2 * 128 * 32 * 4 + 128 * 32 * 4 + (4 * 128 * 4 * 8 + 2 * 2 * 128 * 2 * 8) * 4
    assert attention() == held
    assert attention(windows=(None, 100, 100)) == held + 128 * 1000 * (3 + 4)


def test_a_mask_is_counted_as_the_steps_make_it() -> None:
    asked = work(context=100_000, step_tokens=16_384)
    rule = StepRule(16_384, masked="all")
    ends = [0]
    while ends[-1] < asked.context:
        ends.append(rule.step_end(ends[-1], asked.context))
    largest = max((end - start) * end for start, end in pairwise(ends))
    alone, masked = (
        estimate_memory(shape(tiled=True, windows=windows), WEIGHTS, asked).activations.attention
        for windows in ((None,) * 3, (100,) * 3)
    )
    assert largest <= (masked - alone) // 7 <= 1.01 * largest


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
