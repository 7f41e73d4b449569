from __future__ import annotations

import pytest

from kvboost.capacity import Rates, WeightMemory, estimate_memory, expected_speed
from tests.capacity.shapes import KV, WEIGHTS, shape, work

RATES = Rates(memory=10e6, multiply=1e9, disk=1e6)


def test_decoding_reads_weights_and_kv_once_for_the_whole_batch() -> None:
    asked = work(batch=4)
    speed = expected_speed(shape(), asked, estimate_memory(shape(), WEIGHTS, asked), RATES)
    assert speed.decode == pytest.approx(4 * 10e6 / (1_000_000 + 4 * 1000 * KV))
    assert speed.limited_by == "memory"


def test_reading_multiplies_every_matrix_and_attends_to_half_the_context() -> None:
    asked = work()
    speed = expected_speed(shape(), asked, estimate_memory(shape(), WEIGHTS, asked), RATES)
    assert speed.prefill == pytest.approx(1e9 / (2 * 250_000 + 4 * 4 * 8 * 3 * 500))


def test_streamed_weights_are_bounded_by_the_disk() -> None:
    streamed = WeightMemory(resident=200_000, buffers=50_000, streamed=800_000)
    asked = work(batch=2, stored_tokens=0)
    speed = expected_speed(shape(), asked, estimate_memory(shape(), streamed, asked), RATES)
    assert speed.decode == pytest.approx(2 * 1e6 / 800_000)  # batch * link / what passes
    assert speed.limited_by == "disk"


def test_spilled_kv_is_read_for_every_token() -> None:
    asked = work(kv_bytes=100_000, block_tokens=16)
    estimate = estimate_memory(shape(), WEIGHTS, asked)
    speed = expected_speed(shape(), asked, estimate, RATES)
    assert speed.decode == pytest.approx(1e6 / estimate.kv_spilled)
