from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.approx.guard import ReuseGuard
from kvboost.approx.shadow import ServedRequest, ShadowChecks
from kvboost.core.spans import ApproxSpans
from kvboost.core.state import ChunkedPrompt
from tests.approx.test_find import HEAD, ONE, QUESTION, TWO, engine_for, joined, text, warm

pytestmark = pytest.mark.usefixtures("prices_as_guessed")

Tiny = Callable[..., Any]


def _ask(engine: KVBoost, *parts: list[int]) -> Any:
    tokens, ends = joined(*parts)
    return engine.generate(tokens, boundaries=ends, max_new_tokens=8, min_new_tokens=8, temperature=0)


def _ask_until_off(engine: KVBoost) -> None:
    assert engine.parts.shadow is not None
    for seed in range(40):
        if not engine.cache_stats()["non_prefix_reuse"]["allowed"]:
            return
        # Something new in front each time: what stood behind the same text before is computed, not moved.
        assert _ask(engine, HEAD, text(100 + seed, 40), TWO, ONE, QUESTION).reuse.moved_tokens > 0
        engine.parts.shadow.wait()
    raise AssertionError("the guard did not act within 40 requests")


def _served(number: int, produced: tuple[int, ...] = (5,)) -> ServedRequest:
    prompt = ChunkedPrompt([number], (), None, [])  # type: ignore[arg-type]
    return ServedRequest(prompt, ApproxSpans("none", {}), list(produced), prefiller=None)  # type: ignore[arg-type]


def offer(shadow: ShadowChecks, request: ServedRequest) -> None:
    """As if it had been chosen and given a slot when it began."""
    slot = shadow._guard.reserve() if shadow._guard.chooses() else None
    shadow.offer(replace(request, spans=replace(request.spans, slot=slot)))


def _offer(shadow: ShadowChecks, numbers: range) -> None:
    for number in numbers:
        offer(shadow, _served(number))
    shadow.wait()


def test_a_bad_repair_switches_itself_off_and_says_so(tiny: Tiny) -> None:
    """On a random model nothing but a full repair is good enough."""
    engine = engine_for(tiny("llama"), recompute_strategy="none", recompute_ratio=0.0, quality=0.05, shadow_share=1.0)
    warm(engine, HEAD, ONE, TWO)
    assert engine.parts.shadow is not None
    with pytest.warns(RuntimeWarning, match="non-prefix reuse is now off"):
        _ask_until_off(engine)
    stats = engine.cache_stats()["non_prefix_reuse"]
    assert stats["differing"] >= 2
    assert stats["reason"] is not None
    after = _ask(engine, HEAD, TWO, ONE, QUESTION).reuse
    assert (after.moved_tokens, after.bitwise, after.reason) == (0, True, stats["reason"])
    engine.close()


def test_a_full_repair_stays_on_and_its_bound_sinks(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"), recompute_ratio=1.0, force_approx=True, quality=0.05, shadow_share=1.0)
    warm(engine, HEAD, ONE, TWO)
    assert engine.parts.shadow is not None
    bounds = []
    for seed in range(30):
        _ask(engine, HEAD, text(200 + seed, 40), TWO, ONE, QUESTION)
        engine.parts.shadow.wait()
        bounds.append(engine.cache_stats()["non_prefix_reuse"]["differing_at_most"])
    stats = engine.cache_stats()["non_prefix_reuse"]
    assert (stats["allowed"], stats["checked"], stats["differing"]) == (True, 30, 0)
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < 0.25
    engine.close()


def test_checks_store_nothing_and_exact_requests_are_not_checked(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"), recompute_ratio=1.0, force_approx=True, shadow_share=1.0)
    warm(engine, HEAD, ONE, TWO)
    assert engine.parts.shadow is not None
    _ask(engine, HEAD, ONE, QUESTION)  # a plain prefix
    engine.parts.shadow.wait()
    assert engine.cache_stats()["non_prefix_reuse"]["checked"] == 0
    stored = engine.cache_stats()["hot_chunks"]
    assert _ask(engine, HEAD, TWO, ONE, QUESTION).reuse.moved_tokens == len(ONE + TWO)  # keeps nothing itself
    engine.parts.shadow.wait()
    assert engine.cache_stats()["non_prefix_reuse"]["checked"] == 1
    assert engine.cache_stats()["hot_chunks"] == stored
    assert engine._store.stats().leased == 0
    engine.close()


def test_without_a_share_nothing_is_checked(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"))
    warm(engine, HEAD, ONE, TWO)
    _ask(engine, HEAD, TWO, ONE, QUESTION)
    assert engine.parts.shadow is None
    assert engine.cache_stats()["non_prefix_reuse"] == {
        "allowed": True,
        "reason": None,
        "checked": 0,
        "differing": 0,
        "differing_at_most": 1.0,
    }


def test_checks_that_cannot_keep_up_are_dropped() -> None:
    go_on = threading.Event()

    def slow(*args: Any) -> bool:
        go_on.wait()
        return False

    guard = ReuseGuard(0.1)
    shadow = ShadowChecks(slow, share=1.0, guard=guard)
    for _ in range(50):
        offer(shadow, _served(1))
    assert shadow.dropped >= 40
    go_on.set()
    shadow.wait()
    assert guard.bound.checked + shadow.dropped == 50
    shadow.close()


def test_a_check_that_fails_does_not_count_and_does_not_end_the_others() -> None:
    guard, seen = ReuseGuard(0.1), []

    def failing(request: ServedRequest) -> bool | None:
        seen.append(request.prompt.tokens)
        if request.prompt.tokens == [0]:
            raise OSError("no memory")
        return None if request.prompt.tokens == [1] else False

    shadow = ShadowChecks(failing, share=1.0, guard=guard)
    with pytest.warns(RuntimeWarning, match="does not count"):
        _offer(shadow, range(1))
    _offer(shadow, range(1, 3))
    assert seen == [[0], [1], [2]]
    assert guard.bound.checked == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offer(shadow, _served(3, produced=()))  # nothing to compare
        shadow.close()


def test_about_the_asked_share_is_checked() -> None:
    guard = ReuseGuard(0.5)
    shadow = ShadowChecks(lambda *args: False, share=0.3, guard=guard)
    for _ in range(1000):
        offer(shadow, _served(1))
        shadow.wait()
    assert 230 <= guard.bound.checked <= 370
    shadow.close()


def test_what_stands_behind_the_end_of_an_answer_is_not_compared(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny("llama"), recompute_ratio=1.0, force_approx=True, shadow_share=1.0)
    warm(engine, HEAD, ONE, TWO)
    kept: list[int] = []
    likeliest = engine.parts.runner.last_logits
    monkeypatch.setattr(
        engine.parts.runner, "last_logits", lambda *a, keep: (kept.append(keep), likeliest(*a, keep=keep))[1]
    )
    tokens, ends = joined(HEAD, TWO, ONE, QUESTION)
    engine.generate(tokens, boundaries=ends, max_new_tokens=3, min_new_tokens=3, temperature=0)
    assert engine.parts.shadow is not None
    engine.parts.shadow.wait()
    assert kept == [3, 3]
    engine.close()


def test_an_engine_with_checks_can_be_forgotten(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"), shadow_share=1.0)
    assert engine.parts.shadow is not None
    thread, gone = engine.parts.shadow._thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_moving_may_be_allowed_again(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"), quality=0.05)
    assert engine.parts is not None
    assert engine.session.prefiller.approx is not None
    for _ in range(10):
        engine.session.prefiller.approx.guard.observe(True)
    assert "off" in engine.describe()["non-prefix reuse"]
    engine.allow_non_prefix_reuse()
    assert "on: auto" in engine.describe()["non-prefix reuse"]


def test_a_share_of_answers_is_checked_unless_told_otherwise(tiny: Tiny) -> None:
    """quality=0.05 would be an empty promise if nobody looked."""
    assert engine_for(tiny("llama")).parts.shadow is None
    assert engine_for(tiny("llama"), quality=0.05, shadow_share=0.0).parts.shadow is None
    engine = engine_for(tiny("llama"), quality=0.05)
    assert engine.parts.shadow is not None
    assert engine.parts.shadow._share == 0.02
    engine.close()
