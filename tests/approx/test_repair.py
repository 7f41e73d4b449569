"""A repair that turns out slower than computing is stopped early, and the prompt is computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvboost.approx.find import ApproxReuse
from kvboost.approx.repair import Paced, RepairTooSlow, _Selector
from kvboost.core.spans import ApproxSpans
from kvboost.hf.runner import ModelRunner
from tests.approx.test_find import HEAD, ONE, QUESTION, TWO, engine_for, read, warm

Tiny = Callable[..., Any]


class Clock:
    """A time that passes only when a layer says so: a busy machine's own sleeps take much longer than asked."""

    def __init__(self) -> None:
        self.now = 100.0

    def layer(self, paced: Paced, number: int, *, seconds: float) -> None:
        """Run one layer that takes this long."""
        paced(number, torch.arange(3), None)
        self.now += seconds

    def layers(self, paced: Paced, count: int, *, seconds: float) -> None:
        """Run the first ``count`` layers."""
        for number in range(count):
            self.layer(paced, number, seconds=seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("kvboost.approx.repair.perf_counter", lambda: made.now)
    return made


SPANS = ApproxSpans("none", {}, expected_seconds=0.1, compute_seconds=0.2)


def _paced(seen: list[int], *, decided: int = 0, positions: int = 3) -> Paced:
    return Paced(lambda layer, *rest: seen.append(layer), SPANS, layers=20, positions=positions, decided=decided)


def test_it_is_stopped_after_the_layers_that_show_it_and_not_before(clock: Clock) -> None:
    seen: list[int] = []
    with pytest.raises(RepairTooSlow, match=r"would have taken \d") as raised:
        clock.layers(_paced(seen), 20, seconds=0.03)
    assert len(seen) == 3
    assert raised.value.seconds == pytest.approx(20 * 0.03)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_one_slow_layer_says_nothing(clock: Clock, slow: int) -> None:
    """Something else ran for a moment: the other layers are what the rest will be like."""
    seen: list[int] = []
    paced = _paced(seen)
    for layer in range(20):
        clock.layer(paced, layer, seconds=0.5 if layer == slow else 0.0005)
    assert len(seen) == 20


def test_one_that_is_fast_enough_runs_to_its_end(clock: Clock) -> None:
    seen: list[int] = []
    clock.layers(_paced(seen), 20, seconds=0.0005)
    assert len(seen) == 20


def test_one_that_slows_down_later_is_not_thrown_away(clock: Clock) -> None:
    seen: list[int] = []
    paced = _paced(seen)
    clock.layers(paced, 4, seconds=0.0005)
    for layer in range(4, 20):
        clock.layer(paced, layer, seconds=0.02)
    assert len(seen) == 20


def test_layers_before_the_choice_are_not_judged(clock: Clock) -> None:
    """All positions run through them; few are left behind."""
    seen: list[int] = []
    paced = _paced(seen, decided=2)
    for layer in range(20):
        clock.layer(paced, layer, seconds=0.05 if layer < 2 else 0.0005)
    assert len(seen) == 20


def test_the_forwards_that_follow_count_as_well(clock: Clock) -> None:
    seen: list[int] = []
    clock.layers(_paced(seen), 20, seconds=0.002)  # 20 layers, 0.04 s
    with pytest.raises(RepairTooSlow):
        clock.layers(_paced([], positions=20 * 2048), 20, seconds=0.002)


@pytest.mark.usefixtures("prices_as_guessed")
def test_a_stopped_repair_is_computed_exactly_and_said(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny("llama"), recompute_ratio=0.3)
    warm(engine, HEAD, ONE, TWO)
    approx = engine.session.prefiller.approx
    assert isinstance(approx, ApproxReuse)
    found = ApproxReuse._worth_it

    def hurried(self: ApproxReuse, *args: Any, **kwargs: Any) -> Any:
        spans = found(self, *args, **kwargs)
        return replace(spans, expected_seconds=1e-6, compute_seconds=1e-6) if isinstance(spans, ApproxSpans) else spans

    monkeypatch.setattr(ApproxReuse, "_worth_it", hurried)
    slow = _Selector.__call__
    monkeypatch.setattr(_Selector, "__call__", lambda self, *args: (time.sleep(0.01), slow(self, *args))[1])
    factor = approx.costs.repair_factor
    result = read(engine, HEAD, TWO, ONE, QUESTION)
    assert (result.reuse.moved_tokens, result.reuse.bitwise) == (0, True)
    assert result.reuse.reason is not None
    assert result.reuse.reason.startswith("the repair was stopped")
    assert approx.failures == 0
    assert approx.costs.repair_factor > factor
    cold = read(engine_for(tiny("llama"), quality="exact"), HEAD, TWO, ONE, QUESTION)
    assert torch.equal(result.logits, cold.logits)


@pytest.mark.usefixtures("prices_as_guessed")
@pytest.mark.parametrize("question", [QUESTION, QUESTION * 8], ids=["in one step", "in several"])
def test_on_a_grid_too_the_steps_behind_a_failed_repair_are_those_of_a_cold_run(
    tiny: Tiny, question: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.hf.numerics.choose.why_no_tiles", lambda model: "it is asked for a grid here")
    model = tiny("llama")
    engine, cold = engine_for(model, recompute_ratio=0.3), engine_for(model, quality="exact")
    prefiller = engine.session.prefiller
    assert prefiller.rule.grid is not None
    warm(engine, HEAD, ONE, TWO)
    parts = HEAD, TWO, ONE, question
    steps: list[tuple[int, int]] = []
    append = ModelRunner.append

    def recorded(self: ModelRunner, ids: Any, cache: Any, **kwargs: Any) -> Any:
        start = cache.get_seq_length()
        result = append(self, ids, cache, **kwargs)
        steps.append((start, cache.get_seq_length()))
        return result

    monkeypatch.setattr(ModelRunner, "append", recorded)
    full = read(cold, *parts)
    of_cold, steps = steps, []
    monkeypatch.setattr("kvboost.approx.repair.Repairer.repair", lambda *args: 1 // 0)
    with pytest.warns(RuntimeWarning, match="repositioning chunks failed"):
        found = read(engine, *parts)
    assert (found.reuse.moved_tokens, found.reuse.bitwise) == (0, True)
    assert set(steps) - set(of_cold) <= {step for step in steps if step[1] <= len(HEAD)}, "before the moved text"
    assert steps[-1] == of_cold[-1]
    assert torch.equal(found.logits, full.logits)
