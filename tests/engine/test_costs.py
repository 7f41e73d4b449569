from __future__ import annotations

import random

import pytest

from kvboost.engine.costs import CostModel


def test_before_anything_was_seen_a_forward_costs_something() -> None:
    costs = CostModel()
    assert costs.read_seconds(forwards=2, rows=100) > costs.read_seconds(forwards=1, rows=100)
    assert costs.read_seconds(forwards=1, rows=200) > costs.read_seconds(forwards=1, rows=100)
    assert costs.move_seconds(100) == 0.0


@pytest.mark.parametrize(("fixed", "per_row"), [(0.04, 0.001), (0.5, 0.01), (0.0001, 0.00002), (0.0, 0.003)])
def test_it_learns_what_the_machine_takes(fixed: float, per_row: float) -> None:
    costs, noise = CostModel(), random.Random(1)
    for _ in range(60):
        forwards = noise.randint(1, 12)
        rows = forwards * noise.randint(40, 200)
        seconds = (fixed * forwards + per_row * rows) * noise.uniform(0.9, 1.1)
        costs.observe_read(forwards=forwards, rows=rows, seconds=seconds)
    for forwards, rows in ((1, 30), (10, 1300), (1, 2000)):
        expected = fixed * forwards + per_row * rows
        assert costs.read_seconds(forwards=forwards, rows=rows) == pytest.approx(expected, rel=0.35)


def test_a_machine_that_changes_is_learnt_again() -> None:
    costs = CostModel()
    for seconds_per_row in (0.001, 0.004):
        for forwards in (1, 2, 4, 8) * 60:
            costs.observe_read(forwards=forwards, rows=128 * forwards, seconds=seconds_per_row * 128 * forwards)
    assert costs.read_seconds(forwards=8, rows=1024) == pytest.approx(4.1, rel=0.1)


def test_requests_of_one_shape_are_charged_to_their_rows() -> None:
    costs = CostModel()
    for _ in range(400):
        costs.observe_read(forwards=1, rows=100, seconds=0.2)
    assert costs.read_seconds(forwards=1, rows=100) == pytest.approx(0.2, rel=0.05)
    assert costs.read_seconds(forwards=0, rows=0) == 0.0


def test_moving_costs_what_it_took_lately() -> None:
    costs = CostModel()
    costs.observe_move(rows=1000, seconds=0.01)
    assert costs.move_seconds(500) == pytest.approx(0.005)
    for _ in range(300):
        costs.observe_move(rows=1000, seconds=0.1)
    assert costs.move_seconds(500) == pytest.approx(0.05, rel=0.05)
