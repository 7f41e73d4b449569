"""Which requests are put on trial and checked, the repairs that are tried in turn, and every way a request can end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.approx import setup
from kvboost.approx.find import ApproxReuse
from kvboost.approx.guard import ReuseGuard
from kvboost.approx.shadow import CheckSlots, ServedRequest, ShadowChecks, answers_differ
from kvboost.core.prefill import RequestCancelled
from kvboost.engine import parts
from kvboost.engine.single import Generator
from kvboost.scheduler.forwards import JobDecoder
from kvboost.scheduler.jobs import Job
from kvboost.scheduler.runner import BatchRunner
from kvboost.steps import StepRule
from tests.approx.test_find import HEAD, ONE, QUESTION, TWO, engine_for, joined, text, warm
from tests.approx.test_shadow import _served, offer

Tiny = Callable[..., Any]
_NEVER = {"temperature": 0, "eos_token_id": None, "pad_token_id": 0}

pytestmark = pytest.mark.usefixtures("prices_as_guessed")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer checks are enough, and a moment without requests is idle."""
    monkeypatch.setitem(setup._SHARE, "auto", 0.3)
    monkeypatch.setattr(parts, "_QUIET_S", -1.0)


def prompt(seed: int) -> list[int]:
    """Known text behind something new: eligible."""
    return joined(HEAD, text(100 + seed, 40), TWO, ONE, QUESTION)[0]


def on_trial(tiny: Tiny, **settings: Any) -> KVBoost:
    """An engine that knows the text and has earned nothing."""
    engine = engine_for(tiny("llama"), quality="auto", force_approx=True, chunking="content", **settings)
    warm(engine, HEAD, ONE, TWO)
    return engine


class Held:
    """Checks that wait; then they are noted instead of made."""

    def __init__(self, engine: KVBoost) -> None:
        assert engine.parts.shadow is not None
        self.shadow, self.idle, self.seen = engine.parts.shadow, threading.Event(), list[ServedRequest]()
        self.shadow._idle = self.idle.is_set
        self.shadow._check = lambda request: self.seen.append(request)

    def made(self) -> list[ServedRequest]:
        self.idle.set()
        self.shadow.wait()
        return self.seen

    @property
    def free(self) -> int:
        return self.shadow._slots._free


def test_slots_are_given_back_once() -> None:
    slots = CheckSlots(1)
    reserved = slots.reserve()
    assert reserved is not None
    assert (slots.reserve(), slots.any_free) == (None, False)
    reserved.release()
    reserved.release()
    assert slots.reserve() is not None
    assert slots.reserve() is None


def test_of_a_batch_the_first_three_are_on_trial_and_no_more_is_looked_up(tiny: Tiny) -> None:
    engine = on_trial(tiny)
    held = Held(engine)
    prompts = [prompt(seed) for seed in range(6)]
    engine.generate_batch(prompts, max_new_tokens=4, **_NEVER)
    assert held.free == 0
    assert [request.prompt.tokens for request in held.made()] == prompts[:3]
    assert all(request.spans.blocks for request in held.seen)
    assert held.free == 3
    engine.close()


def test_the_requests_that_begin_first_are_checked_not_those_that_end_first(tiny: Tiny) -> None:
    engine = on_trial(tiny)
    held = Held(engine)
    lengths = [24, 20, 16, 1, 1, 1]
    with BatchRunner(engine) as runner:
        jobs = [Job(token_ids=tuple(prompt(seed)), max_new_tokens=new) for seed, new in enumerate(lengths)]
        for ticket in [runner.submit(job) for job in jobs]:
            assert list(ticket.events())[-1].reason == "length"
    assert sorted(len(request.produced) for request in held.made()) == [16, 20, 24]
    engine.close()


@pytest.mark.parametrize("how", ["prefill", "generate", "generate_batch", "runner", "nothing to move"])
def test_a_request_without_an_answer_leaves_its_slot(tiny: Tiny, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = on_trial(tiny)
    held = Held(engine)
    if how == "prefill":
        engine.prefill(prompt(1))
    elif how == "nothing to move":
        engine.generate(text(50, 80), max_new_tokens=2, **_NEVER)
    elif how == "runner":
        with BatchRunner(engine) as runner:
            ticket = runner.submit(Job(token_ids=tuple(prompt(1)), max_new_tokens=100))
            events = ticket.events()
            next(events)
            assert held.free == 2
            ticket.cancel()
            assert list(events)[-1].reason == "cancelled"
    else:
        taken: list[int] = []

        def failing(*args: Any, **kwargs: Any) -> Any:
            taken.append(held.free)
            raise OSError("no more memory")

        monkeypatch.setattr(Generator, "_answer", failing)
        monkeypatch.setattr(JobDecoder, "together", failing)
        ask: Any = getattr(engine, how)
        with pytest.raises(OSError, match="no more memory"):
            ask(prompt(1) if how == "generate" else [prompt(1), prompt(2)], max_new_tokens=2, **_NEVER)
        assert taken == [2 if how == "generate" else 1]
    assert held.free == 3
    assert held.made() == []
    engine.close()


def test_in_use_a_request_has_its_slot_when_it_begins_too(tiny: Tiny) -> None:
    engine = on_trial(tiny, recompute_ratio=1.0)
    held = Held(engine)
    trust = engine.session.prefiller.approx.guard
    while not trust.allowed:
        trust.observe(False)
    prompts = [prompt(seed) for seed in range(5)]
    results = engine.generate_batch(prompts, max_new_tokens=2, **_NEVER)
    assert all(result.reuse.moved_tokens for result in results), "without a slot it is answered all the same"
    assert [request.prompt.tokens for request in held.made()] == prompts[:3]
    engine.close()


def test_only_what_could_have_been_checked_counts_as_dropped(tiny: Tiny) -> None:
    engine = on_trial(tiny, recompute_ratio=1.0)
    held = Held(engine)
    trust = engine.session.prefiller.approx.guard
    while not trust.allowed:
        trust.observe(False)
    engine.generate_batch([prompt(seed) for seed in range(3)], max_new_tokens=2, **_NEVER)
    assert (held.free, held.shadow.dropped) == (0, 0)
    engine.generate(text(50, 80), max_new_tokens=2, **_NEVER)
    assert held.shadow.dropped == 0, "nothing of it was known"
    engine.generate(prompt(3), max_new_tokens=2, **_NEVER)
    assert held.shadow.dropped == 1
    held.idle.set()
    engine.close()


@pytest.mark.parametrize(("how", "reserved"), [("prefill", 1), ("repair that fails", 1), ("nothing found", 0)])
def test_in_use_a_slot_comes_free_without_a_check(
    how: str, reserved: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(tiny("llama"), recompute_ratio=1.0, force_approx=True, shadow_share=1.0)
    warm(engine, HEAD, ONE, TWO)
    held = Held(engine)
    guard, given = engine.session.prefiller.approx.guard, list[Any]()
    reserve = guard.reserve
    monkeypatch.setattr(guard, "reserve", lambda: given.append(reserve()) or given[-1])
    if how == "prefill":
        engine.prefill(prompt(1))
    elif how == "repair that fails":
        monkeypatch.setattr(ApproxReuse, "_move", lambda *_: 1 // 0)
        with pytest.warns(RuntimeWarning, match="division"):
            assert engine.generate(prompt(1), max_new_tokens=2, **_NEVER).reuse.moved_tokens == 0
    else:
        engine.generate(text(50, 80), max_new_tokens=2, **_NEVER)
    assert (len(given), held.free, held.shadow.dropped) == (reserved, 3, 0)
    assert held.made() == []
    engine.close()


# Interrupted checks.


def test_a_check_that_is_interrupted_is_tried_again_and_counts() -> None:
    guard, tries = ReuseGuard(0.1), list[int]()

    def check(request: ServedRequest) -> bool:
        tries.append(request.prompt.tokens[0])
        if len(tries) < 4:
            raise RequestCancelled
        return False

    shadow = ShadowChecks(check, share=1.0, guard=guard)
    offer(shadow, _served(1))
    shadow.wait()
    assert (tries, guard.bound.checked, shadow.dropped) == ([1, 1, 1, 1], 1, 0)
    shadow.close()


def test_a_check_that_never_ends_does_not_keep_the_others_from_theirs() -> None:
    guard = ReuseGuard(0.1)

    def check(request: ServedRequest) -> bool:
        if request.prompt.tokens == [1]:
            raise RequestCancelled
        return False

    shadow = ShadowChecks(check, share=1.0, guard=guard)
    for number in (1, 2):
        offer(shadow, _served(number))
    shadow.wait()
    assert (guard.bound.checked, shadow.dropped, shadow._slots._free) == (1, 1, 3)
    shadow.close()


def test_an_interrupted_check_goes_on_where_it_stopped(tiny: Tiny) -> None:
    engine = on_trial(tiny, recompute_ratio=1.0)
    held = Held(engine)
    trust = engine.session.prefiller.approx.guard
    while not trust.allowed:
        trust.observe(False)
    assert engine.generate(prompt(1), max_new_tokens=8, **_NEVER).reuse.moved_tokens > 0
    [request] = held.made()
    if request.prefiller.rule.grid is not None:
        pytest.skip("this machine steps on a grid")
    slow = replace(request.prefiller, rule=StepRule(max_tokens=64))
    begun = left = 0

    def idle() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    differ: bool | None = None
    while differ is None:
        begun, left = begun + 1, 2
        assert begun < 10, "it began anew each time"
        try:
            differ = answers_differ(engine.parts.runner, replace(request, prefiller=slow), idle=idle)
            assert differ is not None
        except RequestCancelled:
            continue
    assert (differ, begun > 1) == (False, True)
    engine.close()


# The repairs in turn, as quality="auto" has them.


@pytest.mark.usefixtures("quick")
def test_a_repair_that_fails_is_followed_by_one_that_is_earned(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a random model nothing recomputed changes answers, and all recomputed none."""
    monkeypatch.setitem(setup._RATIO, "fast", 1.0)
    engine = on_trial(tiny)
    assert engine.parts.shadow is not None
    trust, seen = engine.session.prefiller.approx.guard, list[tuple[bool, bool, int]]()
    for seed in range(80):
        if trust.allowed:
            break
        seen.append(trust.standing)
        assert engine.generate(prompt(seed), max_new_tokens=8, **_NEVER).reuse.moved_tokens == 0
        engine.parts.shadow.wait()
    assert (trust.standing, {rung for _, _, rung in seen}) == ((True, False, 1), {0, 1})
    reuse = engine.generate(prompt(99), max_new_tokens=8, **_NEVER).reuse
    assert reuse.moved_tokens == reuse.recomputed_tokens > 0, "the second repair, not the first"
    engine.parts.shadow.wait()
    stats = engine.cache_stats()["non_prefix_reuse"]
    assert (stats["allowed"], stats["checked"], stats["differing"]) == (True, 1, 0), "the check used it too"
    engine.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["generate_batch", "runner"])
def test_a_trial_is_checked_however_it_was_asked(tiny: Tiny, how: str) -> None:
    engine = on_trial(tiny)
    assert engine.parts.shadow is not None
    if how == "runner":
        with BatchRunner(engine) as runner:
            list(runner.submit(Job(token_ids=tuple(prompt(1)), max_new_tokens=8)).events())
    else:
        [result] = engine.generate_batch([prompt(1)], max_new_tokens=8, **_NEVER)
        assert result.reuse.bitwise
    engine.parts.shadow.wait()
    assert engine.cache_stats()["non_prefix_reuse"]["checked"] == 1
    engine.close()
