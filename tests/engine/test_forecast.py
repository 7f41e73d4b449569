from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.capacity import WeightMemory, estimate_memory
from kvboost.engine.forecast import Machine, Option, expected_speed, list_options
from kvboost.errors import ConfigError
from kvboost.offload.rates import Rates
from tests.helpers.shapes import KV, WEIGHTS, shape, work

STORED = {16: KV, 8: KV // 4, 4: KV // 8}


def streamed(budget: int) -> WeightMemory:
    if budget < 100_000:
        raise ConfigError("too small")
    return WeightMemory(budget - 1000, 1000, 1_000_000 - budget)


def options(available: int, **changes: Any) -> list[Option]:
    return list_options(
        shape(),
        WEIGHTS,
        work(context=10_000, cache_bytes=10**6, block_tokens=16, **changes),
        machine=Machine(available, 1000, Rates(memory=1e9, multiply=1e9, disk=1e6)),
        stored=STORED,
        stream=streamed,
    )


def test_all_ways_are_told_with_their_settings() -> None:
    found = {option.name: option for option in options(10**9)}
    assert list(found) == [
        "as asked",
        "KV stored in 8 bits",
        "KV stored in 4 bits",
        "weights streamed",
        "KV paged",
        "both",
    ]
    assert all(option.fits for option in found.values())
    assert found["as asked"].change == ""
    assert found["KV stored in 8 bits"].change == "kv_cache_bits=8, cache_bytes=250000"
    assert found["weights streamed"].change == "weight_budget=500000"
    assert found["both"].change == f"weight_budget=500000, kv_bytes={10_000 * KV // 2}"
    assert found["both"].estimate.peak < min(found["weights streamed"].estimate.peak, found["KV paged"].estimate.peak)


def test_requests_side_by_side_are_not_told_to_page() -> None:
    """The runner refuses them, and a batch would run one by one."""
    names = [option.name for option in options(10**9, batch=4)]
    assert "weights streamed" in names
    assert not {"KV paged", "both"} & set(names)


def test_what_does_not_fit_is_given_the_budget_with_which_it_does() -> None:
    asked = options(10**9)[0].estimate.peak
    found = {option.name: option for option in options(asked - 300_000)}
    assert not found["as asked"].fits
    assert found["a smaller cache"].fits
    assert found["a smaller cache"].change == "cache_bytes=700000"
    assert found["weights streamed"].fits
    assert found["weights streamed"].change == "weight_budget=700000"


def test_slower_links_are_said() -> None:
    found = {option.name: option.speed for option in options(10**9)}
    plain, slow = found["as asked"], found["weights streamed"]
    assert slow.decode < plain.decode


@given(available=st.integers(0, 2 * 10**7))
def test_what_is_said_to_fit_does(available: int) -> None:
    for option in options(available):
        assert option.fits == (option.estimate.peak <= available)


RATES = Rates(memory=10e6, multiply=1e9, disk=1e6)


def test_decoding_reads_weights_and_kv_once_for_the_whole_batch() -> None:
    asked = work(batch=4)
    speed = expected_speed(shape(), asked, estimate_memory(shape(), WEIGHTS, asked), RATES)
    assert speed.decode == pytest.approx(4 * 10e6 / (1_000_000 + 4 * 1000 * KV))


def test_reading_multiplies_every_matrix_and_attends_to_half_the_context() -> None:
    asked = work()
    speed = expected_speed(shape(), asked, estimate_memory(shape(), WEIGHTS, asked), RATES)
    assert speed.prefill == pytest.approx(1e9 / (2 * 250_000 + 4 * 4 * 8 * 3 * 500))


def test_streamed_weights_are_bounded_by_the_disk() -> None:
    streamed = WeightMemory(resident=200_000, buffers=50_000, streamed=800_000)
    asked = work(batch=2, stored_tokens=0)
    speed = expected_speed(shape(), asked, estimate_memory(shape(), streamed, asked), RATES)
    assert speed.decode == pytest.approx(2 * 1e6 / 800_000)  # batch * link / what passes


def test_spilled_kv_is_read_for_every_token() -> None:
    asked = work(kv_bytes=100_000, block_tokens=16)
    estimate = estimate_memory(shape(), WEIGHTS, asked)
    speed = expected_speed(shape(), asked, estimate, RATES)
    assert speed.decode == pytest.approx(1e6 / estimate.kv_spilled)
