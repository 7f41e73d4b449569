"""The state machine of a prefill: what holds after every transition, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost import KVBoost
from kvboost.core.guarded import EmptyLease, ReleasedLease
from kvboost.core.prefill import Prefiller
from kvboost.core.spans import ApproxSpans, RepairOutcome
from kvboost.core.state import ExactHits, PrefillState, tokens_by_tier
from kvboost.core.verify import same_bits
from kvboost.steps import StepRule
from kvboost.types import DeclinedLoad, KVBlock, LoadReport
from tests.helpers.models import tiny_model

_TEXT = torch.randint(3, 97, (100,), generator=torch.Generator().manual_seed(3)).tolist()
_ENGINE: list[KVBoost] = []


_GRID = StepRule(16, 16)  # what a model gets that cannot run in tiles, with shorter steps


def prefiller(rule: StepRule | None = None) -> Prefiller:
    """Chunks of 16 tokens: 100 tokens are six chunks and a tail. Without ``rule``, the model's own: any step."""
    if not _ENGINE:
        _ENGINE.append(KVBoost(tiny_model("llama"), chunk_size=16, chunking="fixed", quality="exact"))
    _ENGINE[0].clear()
    assert _ENGINE[0].session is not None
    own = _ENGINE[0].session.prefiller
    assert own.rule.grid is None
    return own if rule is None else replace(own, rule=rule)


def holds(state: PrefillState) -> None:
    assert state.num_committed <= state.num_exact <= state.num_computed <= len(state.tokens)
    assert state.cache.get_seq_length() == state.num_computed


@given(stops=st.lists(st.integers(0, 99), max_size=6), warm=st.booleans(), commits=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_stops_give_the_same_bits_and_all_of_it_is_exact(stops: list[int], warm: bool, commits: bool) -> None:
    """In tiles a prefill may stop anywhere: every bit is the same, so everything may be stored."""
    run = prefiller()
    with run.open(_TEXT) as state:
        run.advance_to_last_step(state)
        run.finish(state)
        expected = state.cache.extract(0, len(_TEXT))
        if warm:
            run.commit(state)
    run.pool.clear()
    with run.open(_TEXT) as state:
        assert state.num_computed == (len(_TEXT) - 1 if warm else 0)
        for stop in stops:
            run.advance(state, to=stop)
            if commits:
                run.commit(state)
            holds(state)
        run.advance_to_last_step(state)
        if state.num_computed < len(_TEXT):
            run.finish(state)
        run.commit(state)
        holds(state)
        assert state.num_exact == state.num_committed == len(_TEXT)
        found = state.cache.extract(0, len(_TEXT))
    assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True))


@given(stops=st.lists(st.integers(0, 96), max_size=6))
@settings(max_examples=60, deadline=None)
def test_on_a_grid_only_whole_steps_are_exact(stops: list[int]) -> None:
    run = prefiller(_GRID)
    cut = len(_TEXT) // 16 * 16  # the tail is no whole step
    with run.open(_TEXT) as state:
        done = 0
        for stop in stops:
            run.advance(state, to=stop)
            holds(state)
            if stop > done:
                done = stop
                cut = min(cut, stop // 16 * 16) if stop % 16 else cut
        run.advance_to_last_step(state)
        run.finish(state)
        run.commit(state)
        holds(state)
        assert (state.num_exact, state.num_committed) == (cut, cut)
    with run.open(_TEXT) as state:
        assert state.num_computed == cut


def test_on_a_grid_a_second_advance_goes_on_inside_the_step() -> None:
    run = prefiller(_GRID)
    with run.open(_TEXT) as state:
        run.advance(state, to=40)
        assert (state.num_computed, state.num_exact) == (40, 32)
        run.advance(state, to=60)
        assert (state.num_computed, state.num_exact) == (60, 32), "a step in two parts is not what a cold run computes"
        run.commit(state)
        assert state.num_committed == 32


def test_a_found_piece_longer_than_the_missing_chunk_leaves_the_prompt_to_be_stored() -> None:
    run = prefiller()
    for boundaries, hit in (((), 0), ((21,), 32), ((21,), len(_TEXT) - 1)):
        tokens = _TEXT if boundaries else _TEXT[:40]
        with run.open(tokens, boundaries=boundaries) as state:
            assert state.num_computed == hit  # of the second prompt: up to 32, behind the cut at 21
            run.advance_to_last_step(state)
            run.finish(state)
            run.commit(state)
            assert state.num_committed == len(tokens)


def test_fast_numerics_resume_anywhere_and_say_so() -> None:
    run = prefiller(StepRule(64, numerics="fast"))
    with run.open(_TEXT) as state:
        run.advance_to_last_step(state)
        run.finish(state)
        run.commit(state)
        assert state.bitwise, "nothing was reused"
    with run.open([*_TEXT, 5, 6]) as state:
        assert state.num_computed == len(_TEXT)
        assert not state.report().bitwise


def test_nothing_is_finished_before_its_steps() -> None:
    run = prefiller(_GRID)
    with run.open(_TEXT) as state, pytest.raises(ValueError, match="advance_to_last_step"):
        run.finish(state)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda state: state.computed(20),  # nothing was appended
        lambda state: state.computed(0),
        lambda state: state.committed(16, new=True),  # not computed
        lambda state: state.repaired(RepairOutcome(0, None)),
        lambda state: state.drop_approx("no reason"),
    ],
)
def test_transitions_that_do_not_fit_are_refused(wrong: Callable[[PrefillState], Any]) -> None:
    with prefiller().open(_TEXT) as state:
        with pytest.raises(AssertionError):
            wrong(state)
        holds(state)


def test_chunks_are_repositioned_once_and_before_anything_is_computed() -> None:
    run = prefiller()
    block = KVBlock(b"k", None, b"c", b"", (), 0, bitwise=False)
    with run.open(_TEXT) as state:
        state.reposition(ApproxSpans("none", {2: block}))
        assert state.plan.approx_start == 32
        assert state.awaits_repair
        with pytest.raises(AssertionError, match="once"):
            state.reposition(ApproxSpans("none", {3: block}))
        run.advance(state, to=32)
        with pytest.raises(AssertionError, match="by their repair"):
            state.computed(48)
        with pytest.raises(ValueError, match="cannot stop"):
            run.advance(state, to=40)
        assert state.last_step == 48, "what follows runs with the last token"
        state.drop_approx("as asked")
        assert (state.num_computed, state.num_exact, state.spans) == (32, 32, None)
        run.finish(state)
        assert state.num_exact == len(_TEXT)
        assert state.report().reason == "as asked"


@pytest.mark.parametrize(("limit", "expected"), [(None, {"memory": 4, "disk": 2}), (3, {"memory": 2, "disk": 1})])
def test_tokens_are_counted_by_tier_up_to_the_limit(limit: int | None, expected: dict[str, int]) -> None:
    def block(name: bytes) -> KVBlock:
        return KVBlock(name, None, name, bytes(8), (), 1, bitwise=True)  # two tokens

    loads = LoadReport({b"b": "disk"})
    assert tokens_by_tier([block(name) for name in (b"a", b"b", b"c")], loads, limit=limit) == expected


def test_reasons_are_joined_and_none_clears_them() -> None:
    with prefiller().open(_TEXT) as state:
        state.explain("one")
        state.explain("two")
        assert state.report().reason == "one; two"
        state.explain(None)
        assert state.report().reason is None


def test_a_prefill_is_observed_once() -> None:
    with prefiller().open(_TEXT) as state:
        assert [state.observe_once() for _ in range(3)] == [True, False, False]


class Pool:
    """Notes what comes back."""

    def __init__(self) -> None:
        self.returned: list[tuple[Any, list[bytes]]] = []

    def give_back(self, cache: Any, *, held: list[bytes]) -> None:
        self.returned.append((cache, held))


@pytest.mark.parametrize("bitwise", [True, False])
def test_a_cache_goes_back_once_with_the_chunks_that_are_stored(bitwise: bool) -> None:
    run, pool = prefiller(), Pool()
    with run.open(_TEXT) as state:
        run.advance(state, to=40)
        run.commit(state)
        state.hits = replace(state.hits, bitwise=bitwise)
        state._pool = pool  # type: ignore[assignment]
        cache, keys = state.cache, [chunk.prefix_key for chunk in state.prompt.chunks]
    state.close()
    assert pool.returned == [(cache, keys[:2] if bitwise else [])], "without those that others may not take for bits"


def test_a_cache_that_was_handed_over_does_not_go_back() -> None:
    pool = Pool()
    with prefiller().open(_TEXT) as state:
        state._pool = pool  # type: ignore[assignment]
        assert state.detach() is state.cache
    assert pool.returned == []


def test_a_prefill_goes_on_in_another_cache() -> None:
    run, pool = prefiller(), Pool()
    with run.open(_TEXT) as state:
        run.advance(state, to=40)
        state._pool = pool  # type: ignore[assignment]
        before, other = state.cache, run.pool.make(tokens=200)
        state.move_to(other)
        assert [cache for cache, _ in pool.returned] == [before]
        assert state.cache is other
        holds(state)
        expected, moved = before.extract(0, 40), other.extract(0, 40)
        assert all(same_bits(one, two) for one, two in zip(expected, moved, strict=True))
        run.finish(state)


def test_closing_releases_every_lease() -> None:
    released: list[str] = []

    def lease(name: str) -> Any:
        return SimpleNamespace(release=lambda: released.append(name), blocks=[])

    block = KVBlock(b"k", None, b"c", b"", (), 0, bitwise=False)
    with prefiller().open(_TEXT) as state:
        state.hits = ExactHits(lease=lease("exact"))
        state.reposition(ApproxSpans("none", {2: block}, lease=lease("moved")))
        state.trial = ApproxSpans("none", {2: block}, lease=lease("trial"))
    assert released == ["exact", "moved", "trial"]


def test_only_what_was_repaired_is_checked_and_the_lease_stays() -> None:
    released: list[int] = []
    lease: Any = SimpleNamespace(release=lambda: released.append(1), blocks=[])
    slot: Any = SimpleNamespace(release=lambda: released.append(2))
    block = KVBlock(b"k", None, b"c", b"", (), 0, bitwise=False)
    run = prefiller()
    with run.open(_TEXT) as state:
        state.reposition(ApproxSpans("none", {2: block}, lease=lease, slot=slot, ratio=0.5))
        assert state.repair_tokens == 8, "half of what is repositioned; nothing is missing before it"
        assert state.take_checked() is None
        run.advance(state, to=32)
        run.runner.append(run.runner.upload(_TEXT[32:48]), state.cache, logits=False)
        state.repaired(RepairOutcome(8, None))
        assert (state.num_computed, state.num_exact) == (48, 32)
        checked = state.take_checked()
        assert checked is not None
        assert (checked.slot, type(checked.lease)) == (slot, EmptyLease)
        assert state.spans is not None
        assert (state.spans.slot, state.spans.lease) == (None, lease)
    assert released == [1], "the slot is the check's"


def test_tiers_and_declined_loads_of_both_leases_are_reported() -> None:
    disk, redis = DeclinedLoad("disk", 16, 2.0, 1.0), DeclinedLoad("redis", 32, 3.0, 1.0)
    block = KVBlock(b"k", None, b"c", bytes(64), (), 0, bitwise=False)
    with prefiller().open(_TEXT) as state:
        exact = ReleasedLease(LoadReport({}, (disk,), {32: 16, 48: 16}))
        state.hits = replace(state.hits, lease=exact, tiers={"disk": 5})
        report = state.report()
        assert (report.declined, report.declined_tokens, report.tiers) == ((disk,), 32, {"disk": 5})
        moved = ReleasedLease(LoadReport({b"k": "disk"}, (redis,), {64: 16, 48: 16}))
        state.reposition(ApproxSpans("none", {2: block}, lease=moved))
        report = state.report()
        assert report.declined == (disk, redis)
        assert report.declined_tokens == 32, "the chunk at 32 was repositioned after all"
        assert report.tiers == {"disk": 5 + 16}
