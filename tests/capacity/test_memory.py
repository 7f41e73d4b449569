from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.capacity import WeightMemory, estimate_memory, paged_memory, request_bytes, workspace_capacity
from kvboost.errors import ConfigError
from kvboost.steps import StepRule
from tests.capacity.shapes import KV, WEIGHTS, shape, work


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
