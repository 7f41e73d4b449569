from __future__ import annotations

import random
from functools import partial

import pytest

from kvboost.core.costs import CostModel, StageClock
from tests.helpers.late_device import LateDevice


def test_before_anything_was_seen_a_forward_costs_something() -> None:
    costs = CostModel()
    assert costs.prefill_seconds(forwards=2, tokens=100) > costs.prefill_seconds(forwards=1, tokens=100)
    assert costs.prefill_seconds(forwards=1, tokens=200) > costs.prefill_seconds(forwards=1, tokens=100)
    assert costs.reposition_seconds(100) == 0.0


@pytest.mark.parametrize(("fixed", "per_row"), [(0.04, 0.001), (0.5, 0.01), (0.0001, 0.00002), (0.0, 0.003)])
def test_it_learns_what_the_machine_takes(fixed: float, per_row: float) -> None:
    costs, noise = CostModel(), random.Random(1)
    for _ in range(60):
        forwards = noise.randint(1, 12)
        rows = forwards * noise.randint(40, 200)
        seconds = (fixed * forwards + per_row * rows) * noise.uniform(0.9, 1.1)
        costs.observe_prefill(forwards=forwards, tokens=rows, seconds=seconds)
    for forwards, rows in ((1, 30), (10, 1300), (1, 2000)):
        expected = fixed * forwards + per_row * rows
        assert costs.prefill_seconds(forwards=forwards, tokens=rows) == pytest.approx(expected, rel=0.35)


def test_a_machine_that_changes_is_learnt_again() -> None:
    costs = CostModel()
    for seconds_per_row in (0.001, 0.004):
        for forwards in (1, 2, 4, 8) * 60:
            costs.observe_prefill(forwards=forwards, tokens=128 * forwards, seconds=seconds_per_row * 128 * forwards)
    assert costs.prefill_seconds(forwards=8, tokens=1024) == pytest.approx(4.1, rel=0.1)


@pytest.mark.parametrize("repeats", [1, 200])
def test_requests_of_one_shape_do_not_make_rows_or_forwards_free(repeats: int) -> None:
    """Eight steps of 128 rows in a second say nothing about what a step costs and what a row does."""
    costs = CostModel()
    for _ in range(repeats):
        costs.observe_prefill(forwards=8, tokens=1024, seconds=1.0)
    assert costs.prefill_seconds(forwards=8, tokens=1024) == pytest.approx(1.0, rel=0.01)
    assert 0.05 < costs.prefill_seconds(forwards=1, tokens=64) < 0.15
    assert 0.7 < costs.prefill_seconds(forwards=1, tokens=1024) < 0.95


def test_noise_does_not_make_rows_free() -> None:
    costs, noise = CostModel(), random.Random(3)
    for _ in range(30):
        chunks = noise.randint(1, 16)
        seconds = (0.005 * chunks + 0.001 * 128 * chunks) * noise.uniform(0.85, 1.15)
        costs.observe_prefill(forwards=chunks, tokens=128 * chunks, seconds=seconds)
    assert costs.prefill_seconds(forwards=1, tokens=1024) > 0.5 * 1.029


def test_repairs_that_take_longer_are_expected_to() -> None:
    costs = CostModel()
    first = costs.repair_factor
    for _ in range(40):
        costs.observe_repair(expected=1.0, seconds=3.0)
    assert costs.repair_factor == pytest.approx(3.0, rel=0.05)
    for _ in range(200):
        costs.repair_refused()
    assert costs.repair_factor == pytest.approx(first, rel=0.05), "bad luck must not put an end to moving"


def test_one_slow_repair_changes_what_is_expected_by_a_fifth_at_most() -> None:
    """A repair beside another busy process may take ten times as long; the next one does not."""
    costs = CostModel()
    for _ in range(40):
        costs.observe_repair(expected=1.0, seconds=1.0)
    costs.observe_repair(expected=1.0, seconds=10.0)
    assert costs.repair_factor == pytest.approx(1.2, rel=0.01)


def test_moving_costs_what_it_took_lately() -> None:
    costs = CostModel()
    costs.observe_reposition(tokens=1000, seconds=0.01)
    assert costs.reposition_seconds(500) == pytest.approx(0.005)
    for _ in range(300):
        costs.observe_reposition(tokens=1000, seconds=0.1)
    assert costs.reposition_seconds(500) == pytest.approx(0.05, rel=0.05)


def test_a_stage_gets_the_time_since_the_last_lap_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 11.5, 11.75, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = StageClock()
    clock.lap("plan")
    clock.lap("prefill")
    clock.lap("plan")
    assert clock.stages() == {"plan": 750.0, "prefill": 1000.0}
    assert clock.elapsed_ms == 3000.0


def test_a_step_of_a_given_time() -> None:
    costs = CostModel()
    assert costs.tokens_within(1.0) is None, "nothing was observed"
    costs.observe_prefill(forwards=1, tokens=20, seconds=1.5)
    assert costs.tokens_within(1.0) is None, "the first one loads kernels"
    for forwards in (1, 4) * 20:
        costs.observe_prefill(forwards=forwards, tokens=500, seconds=0.1 * forwards + 0.5)
    assert costs.tokens_within(1.1) == pytest.approx(1000, rel=0.05)
    assert costs.tokens_within(0.01) == 0


def _prefilled(device: LateDevice, costs: CostModel, *, tokens: int) -> StageClock:
    """A prefill that takes the host 1 ms for a forward and the device 1 ms for a token."""
    clock = StageClock()
    clock.mark = device.mark
    clock.lap("place")
    for stage, part in (("prefill", tokens - 10), ("first_token", 10)):
        device.ask(host=0.001, device=0.001 * part)
        clock.lap(stage)
    costs.observe_done(clock, partial(costs.observe_stages, forwards=2, tokens=tokens))
    return clock


def test_a_device_that_lags_is_timed_by_its_own_events_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device, costs = LateDevice(), CostModel()
    device.use(monkeypatch)
    clock = _prefilled(device, costs, tokens=100)
    assert not costs.in_seconds, "the device is at work"
    assert sum(clock.stages().values()) == pytest.approx(2.0), "until then it is known what the host took"
    device.now += 0.05
    costs.settle()
    assert not costs.in_seconds, "it has done half"
    device.read()
    costs.settle()
    assert costs.prefill_seconds(forwards=2, tokens=100) == pytest.approx(0.1, rel=0.02)
    assert clock.stages()["first_token"] == pytest.approx(10.0)


def test_a_request_behind_another_is_not_charged_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one's work is in the queue when it begins."""
    device, costs = LateDevice(), CostModel()
    device.use(monkeypatch)
    for _ in range(3):
        _prefilled(device, costs, tokens=100)
    device.read()
    costs.settle()
    assert costs.prefill_seconds(forwards=2, tokens=100) == pytest.approx(0.1, rel=0.02)


def test_what_is_not_done_keeps_no_later_observation_from_being_made_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    device, costs, seen = LateDevice(), CostModel(), list[str]()
    device.use(monkeypatch)
    late, quick = StageClock(), StageClock()
    late.mark = device.mark
    device.ask(host=0.0, device=1.0)
    late.lap("first_token")
    costs.observe_done(late, lambda stages: seen.append("late"))
    costs.observe_done(quick, lambda stages: seen.append("quick"))
    assert seen == []
    device.read()
    costs.settle()
    assert seen == ["late", "quick"]
