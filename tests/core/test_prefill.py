"""One prefill path: what is looked up, computed, stored, given back and reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost.core.costs import CostModel
from kvboost.core.guarded import GuardedStore
from kvboost.core.keys import PromptKeys
from kvboost.core.non_prefix import NonPrefixReuse
from kvboost.core.prefill import Prefiller, RequestCancelled, finish_together
from kvboost.core.spans import ApproxSpans, RepairOutcome
from kvboost.core.state import PrefillState
from kvboost.core.verify import same_bits, warm_equals_cold
from kvboost.core.workspaces import KVLoader
from kvboost.steps import StepRule
from kvboost.store import MemoryStore
from kvboost.types import KVBlock, LoadReport
from tests.core.test_state import _TEXT, prefiller

_OTHER = [96 - token for token in _TEXT]
_BLOCK = KVBlock(b"k", None, b"c", b"", (), 0, bitwise=False)


@pytest.fixture
def run() -> Prefiller:
    return replace(prefiller(), costs=CostModel())


def read(run: Prefiller, tokens: list[int], **asked: Any) -> PrefillState:
    """Prefill and store; the state is closed."""
    with run.open(tokens, **asked) as state:
        run.advance_to_last_step(state)
        run.finish(state)
        run.commit(state)
    return state


def leased(run: Prefiller) -> int:
    store: Any = run.store._store
    return store.stats().leased


class Approx(NonPrefixReuse):
    """Finds these spans, and repairs by computing everything behind the exact tokens."""

    def __init__(self, run: Prefiller, spans: ApproxSpans | None = None, *, error: Exception | None = None) -> None:
        super().__init__("as asked")
        self._run, self._spans, self._error = run, spans, error
        self.asked: list[Any] = []

    def boundaries(self, tokens: Sequence[int]) -> Sequence[int]:
        return (40,)

    def find(self, chunks: Any, *, available: int, prompt_tokens: int, fetched: Any = None) -> Any:
        self.asked.append((len(chunks), available, prompt_tokens, fetched))
        return self._spans, None if self._spans else self.reason

    def replay(self, blocks: Mapping[int, KVBlock]) -> ApproxSpans:
        return ApproxSpans("replayed", blocks, replayed=True)

    def repair(self, state: PrefillState) -> str | None:
        self.asked.append("repair")
        if self._error is not None:
            return f"because of {self._error}"
        state.clock.lap("move")
        ids = self._run.runner.upload(state.tokens[state.num_computed : state.last_step])
        self._run.runner.append(ids, state.cache, logits=False)
        state.repaired(RepairOutcome(5, 0.25, (40, 41)))
        return None

    def keep(self, state: PrefillState) -> int:
        return 3

    def observe(self, stages: Mapping[str, float], *, moved_tokens: int, expected: float) -> None:
        self.asked.append("observe")


def test_a_cancelled_request_computes_nothing_more(run: Prefiller) -> None:
    stepwise = replace(run, rule=StepRule(16))
    with stepwise.open(_TEXT) as state:
        for advance in (partial(stepwise.advance, to=80), stepwise.advance_to_last_step):
            answers = iter([False, True])
            before = state.num_computed
            with pytest.raises(RequestCancelled):
                advance(state, cancelled=answers.__next__)
            assert state.num_computed == before + 16


def test_a_measurement_has_a_store_workspaces_and_costs_of_its_own(run: Prefiller) -> None:
    read(run, _TEXT)
    other = replace(run, approx=Approx(run)).exact_over(GuardedStore(MemoryStore(10**7)))
    state = read(other, _TEXT)
    assert state.plan.exact_tokens == 0
    assert other.pool is not run.pool
    assert other.costs is not run.costs
    assert type(other.approx) is NonPrefixReuse
    assert other.runner is run.runner


def test_a_prompt_is_cut_at_boundaries_known_documents_and_the_grid(run: Prefiller) -> None:
    cut = replace(run, approx=Approx(run)).chunk(_TEXT, [70])
    assert [chunk.end for chunk in cut.chunks] == [16, 32, 40, 56, 70, 86]
    assert cut.tail is not None
    assert (cut.tail.start, cut.tail.end) == (86, 100)
    on_grid = replace(run, rule=StepRule(16, 48)).chunk(_TEXT[:96], [20])
    assert [chunk.end for chunk in on_grid.chunks] == [16, 20, 36, 48, 64, 80, 96]
    assert on_grid.boundaries == [20, 48, 96]
    assert replace(run, rule=StepRule(16, 48)).chunk(_TEXT, []).tail is None


def test_what_is_known_is_asked_for_in_portions(run: Prefiller, monkeypatch: pytest.MonkeyPatch) -> None:
    read(run, _TEXT)
    asked: list[int] = []
    right = GuardedStore.contains_content

    def contains(self: GuardedStore, chunks: Any) -> Sequence[bool]:
        asked.append(len(chunks))
        return right(self, chunks)

    monkeypatch.setattr(GuardedStore, "contains_content", contains)
    monkeypatch.setattr("kvboost.core.prefill._ASKED_AT_ONCE", 5)
    assert run.knows([(_TEXT, ()), (_OTHER, ()), (_TEXT[:32], ()), ([*_TEXT[:16], *_OTHER[:16]], ())]) == [
        True,
        False,
        True,
        False,
    ]
    assert asked == [5, 5, 5, 1]


def test_the_time_without_reuse_is_what_was_learnt(run: Prefiller) -> None:
    assert run.expected_seconds(100) is None
    assert read(run, _TEXT).report().plain_ms is None
    assert run.costs.in_seconds, "learnt from the prefill"
    stepwise = replace(run, rule=StepRule(30), costs=CostModel())
    stepwise.costs.observe_prefill(forwards=1, tokens=100, seconds=2.0)
    expected = stepwise.costs.prefill_seconds(forwards=4, tokens=100)
    assert stepwise.expected_seconds(100) == expected
    with stepwise.open(_OTHER) as state:
        assert state.report().plain_ms == 1000.0 * expected


def test_the_costs_learn_from_what_was_computed(run: Prefiller, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(CostModel, "observe_prefill", lambda self, **observed: seen.append(observed))
    stepwise = replace(run, rule=StepRule(32))
    read(stepwise, _TEXT[:48])
    state = read(stepwise, _TEXT)
    stages = state.clock.stages()
    assert [(entry["forwards"], entry["tokens"]) for entry in seen] == [(2, 48), (2, 52)]
    assert seen[1]["seconds"] == pytest.approx((stages["prefill"] + stages["first_token"]) / 1000.0)
    stepwise.commit(state)
    assert len(seen) == 2, "once"


def test_the_tiers_of_reused_tokens_are_reported(run: Prefiller, monkeypatch: pytest.MonkeyPatch) -> None:
    read(run, _TEXT)
    right = GuardedStore.lease

    def lease(self: GuardedStore, chunks: Any, **asked: Any) -> Any:
        found: Any = right(self, chunks, **asked)
        loads = LoadReport({chunk.prefix_key: "disk" for chunk in chunks[1:]})
        return SimpleNamespace(blocks=found.blocks, release=found.release, loads=loads)

    monkeypatch.setattr(GuardedStore, "lease", lease)
    with run.open(_TEXT) as state:
        assert state.report().tiers == {"memory": 16, "disk": 83}, "the last token is computed"
    assert leased(run) == 0


def test_the_stages_of_a_prefill_are_named(run: Prefiller) -> None:
    assert set(read(run, _TEXT).report().timings_ms) == {"plan", "lease", "place", "prefill", "first_token"}


def test_nothing_is_stored_under_the_keys_of_other_weights(run: Prefiller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptKeys, "is_current", lambda self, snapshot: False)
    state = read(run, _TEXT)
    assert (state.num_committed, state.new_chunks) == (0, 0)
    assert run.commit_decoded(state, [5]) == 0
    assert read(run, _TEXT).plan.exact_tokens == 0


def test_a_refused_chunk_ends_storing(run: Prefiller) -> None:
    full = replace(run, store=GuardedStore(MemoryStore(1)))
    assert (state := read(full, _TEXT)).num_committed == 0
    assert state.new_chunks == 0
    assert read(run, _TEXT).new_chunks == 7
    again = read(run, _TEXT)
    assert (again.new_chunks, again.num_committed) == (0, 100)


def test_a_lossy_codec_stores_nothing_bitwise(run: Prefiller) -> None:
    codec: Any = SimpleNamespace(pack_each=run.codec.pack_each, place_each=run.codec.place_each, lossless=False)
    read(replace(run, codec=codec), _TEXT)
    with run.open([*_TEXT, 5]) as state:
        assert state.plan.exact_tokens == 100
        assert not state.bitwise
        run.finish(state)
        run.commit(state)
    run.pool.clear()
    assert not read(run, [*_TEXT, 5, 6]).bitwise, "nor what was computed behind it"


def test_decoded_chunks_are_stored_and_are_not_bitwise(run: Prefiller) -> None:
    generated = _OTHER[:30]
    with run.open(_TEXT, new_tokens=30) as state:
        run.advance_to_last_step(state)
        run.finish(state)
        run.commit(state)
        run.runner.append(run.runner.upload(generated[:-1]), state.cache, logits=False)
        assert run.commit_decoded(state, generated) == 2
        assert run.commit_decoded(state, generated) == 0, "they are there"
    run.pool.clear()
    with run.open([*_TEXT, *generated, 5]) as state:
        assert state.plan.exact_tokens == 128
        assert not state.bitwise


def test_decoding_behind_repositioned_or_paged_kv_stores_nothing(run: Prefiller) -> None:
    with run.open(_TEXT, new_tokens=30) as state:
        run.advance_to_last_step(state)
        run.finish(state)
        state.paged = True
        assert run.commit_decoded(state, _OTHER[:30]) == 0


def test_a_last_step_that_ran_elsewhere_is_noted_once(run: Prefiller) -> None:
    with run.open(_TEXT) as state:
        run.last_step_ran(state)
        assert state.num_computed == 0, "it did not run"
        run.runner.append(run.runner.upload(_TEXT), state.cache, logits=False)
        run.last_step_ran(state)
        assert state.num_computed == 100
        run.last_step_ran(state)
        assert state.forwards == 1


def test_last_steps_together_are_those_of_each(run: Prefiller) -> None:
    read(run, _TEXT[:64])

    class Joint:
        def append(self, tokens: Any, caches: Any) -> torch.Tensor:
            self.tokens = tokens
            rows = [
                run.runner.append(run.runner.upload(ids), cache, logits=True)
                for ids, cache in zip(tokens, caches, strict=True)
            ]
            return torch.stack([row for row in rows if row is not None])

    joint = Joint()
    with run.open(_TEXT) as one, run.open(_OTHER[:20]) as two:
        logits = finish_together(joint.append, [one, two])
        assert joint.tokens == [_TEXT[64:], _OTHER[:20]]
        assert (one.num_exact, two.num_exact) == (100, 20)
        assert "first_token" in one.clock.stages()
        assert not one.observe_once(), "its time was that of both"
    run.pool.clear()
    with run.open(_OTHER[:20]) as alone:
        assert same_bits(run.finish(alone), logits[1])
    with replace(run, rule=StepRule(16, 16)).open(_TEXT) as early, pytest.raises(ValueError, match="have not run"):
        finish_together(joint.append, [early])


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_failed_placing_holds_nothing(run: Prefiller, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(self: KVLoader, blocks: Any, chunks: Any) -> Any:
        raise error

    read(run, _TEXT)
    released: list[int] = []
    spans = ApproxSpans("none", {6: _BLOCK}, lease=SimpleNamespace(release=lambda: released.append(1)))
    monkeypatch.setattr(KVLoader, "finish", finish)
    with pytest.raises(type(error)):
        replace(run, approx=Approx(run, spans)).open(_TEXT, approx=True)
    assert leased(run) == 0
    assert released == [1]


def test_why_nothing_was_repositioned_is_reported(run: Prefiller) -> None:
    read(run, _TEXT[:32])
    approx = Approx(run)
    other = replace(run, approx=approx)
    fetched: Any = SimpleNamespace(exact=None, content="content")
    with other.open(_TEXT, approx=True, fetched=fetched) as state:
        assert state.report().reason == "as asked"
        assert state.plan.exact_tokens == 32
    assert approx.asked == [(6, 2, 100, "content")]
    with other.open(_TEXT) as state:
        assert state.report().reason is None
    assert len(approx.asked) == 1


def test_repositioned_chunks_are_repaired_and_reported(run: Prefiller) -> None:
    approx = Approx(run, ApproxSpans("some", {3: _BLOCK}))
    other = replace(run, approx=approx)
    with other.open(_TEXT, approx=True) as state:
        assert state.plan.approx_start == 40
        assert state.repair_tokens == 0
        other.advance_to_last_step(state)
        assert (state.num_computed, state.num_exact) == (56, 40)
        assert state.is_repaired
        assert not state.awaits_repair
        other.finish(state)
        other.commit(state)
        report = state.report()
        assert other.commit_decoded(state, [5]) == 0
    assert approx.asked[1:] == ["repair", "observe"]
    assert (report.exact_tokens, report.moved_tokens, report.recomputed_tokens, report.fresh_tokens) == (0, 16, 5, 84)
    assert report.segments == (("fresh", 40), ("recomputed", 2), ("moved", 14), ("fresh", 44))
    assert (report.error_estimate, report.approximate, report.bitwise) == (0.25, "some", False)
    assert "move" in report.timings_ms
    assert (state.num_committed, state.new_chunks) == (40, 3 + 3), "three exact chunks, and three that it kept"


def test_a_failed_repair_is_computed_instead(run: Prefiller) -> None:
    approx = Approx(run, ApproxSpans("some", {3: _BLOCK}), error=RuntimeError("a fault"))
    other = replace(run, approx=approx)
    with other.open(_TEXT, approx=True) as state:
        other.advance_to_last_step(state)
        logits = other.finish(state)
        other.commit(state)
        assert state.report().reason == "because of a fault"
        assert "move" in state.clock.stages()
        assert (state.num_exact, state.bitwise) == (100, True)
        assert not other.costs.in_seconds, "a time with a failed repair in it says nothing"
    run.pool.clear()
    with run.exact_over(GuardedStore(MemoryStore(10**7))).open(_TEXT, boundaries=[40]) as cold:
        assert same_bits(run.finish(cold), logits)


def test_chunks_on_trial_are_not_used_and_not_held(run: Prefiller) -> None:
    released: list[int] = []
    lease: Any = SimpleNamespace(release=lambda: released.append(1))
    other = replace(run, approx=Approx(run, ApproxSpans("some", {3: _BLOCK}, lease=lease, on_trial=True)))
    with other.open(_TEXT, approx=True) as state:
        assert released == [1]
        assert state.spans is None
        trial = state.take_checked()
        assert trial is not None
        assert trial.blocks == {3: _BLOCK}
        assert state.take_checked() is None


def test_replayed_chunks_are_those_given_and_documents_do_not_cut_them(run: Prefiller) -> None:
    read(run, _TEXT)
    with replace(run, approx=Approx(run)).replay(_TEXT, boundaries=(), new_tokens=0, using={3: _BLOCK}) as state:
        assert state.plan.exact_tokens == 48, "stored chunks before it only"
        assert state.spans is not None
        assert state.spans.strategy == "replayed"
        assert [segment.start for segment in state.plan.moved] == [48]


def test_a_warm_run_equals_a_cold_one_only_if_it_reuses_something(run: Prefiller) -> None:
    assert warm_equals_cold(run, _TEXT)
    assert not warm_equals_cold(replace(run, store=GuardedStore(MemoryStore(1))), _TEXT)
