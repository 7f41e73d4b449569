"""The state machine of a prefill: what holds after every transition, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost import KVBoost
from kvboost.core.prefill import ApproxSpans, PrefillState, RepairOutcome
from kvboost.core.prefiller import Prefiller
from kvboost.types import KVBlock
from tests.helpers.models import tiny_model

_TEXT = torch.randint(3, 97, (100,), generator=torch.Generator().manual_seed(3)).tolist()
_ENGINE: list[KVBoost] = []


def prefiller() -> Prefiller:
    """Chunks of 16 tokens: 100 tokens are six steps and a tail."""
    if not _ENGINE:
        _ENGINE.append(KVBoost(tiny_model("llama"), chunk_size=16, chunking="fixed", quality="exact"))
    _ENGINE[0].clear()
    assert _ENGINE[0].session is not None
    return _ENGINE[0].session.prefiller


def holds(state: PrefillState) -> None:
    assert state.num_committed <= state.num_exact <= state.num_computed <= len(state.tokens)
    assert state.cache.get_seq_length() == state.num_computed


@given(stops=st.lists(st.integers(0, 96), max_size=6), warm=st.booleans(), commits=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_stops_give_the_same_tokens_and_exact_only_what_ran_whole(
    stops: list[int], warm: bool, commits: bool
) -> None:
    """``advance`` may stop inside a step: the rest of it is computed then, and nothing from it on is exact."""
    run = prefiller()
    with run.open(_TEXT) as state:
        run.advance_to_last_step(state)
        expected = run.finish(state)
        run.commit(state)
    if not warm:
        _ENGINE[0].clear()
    cut: int | None = None
    with run.open(_TEXT) as state:
        begin = state.num_computed
        for stop in stops:
            run.advance(state, to=stop)
            if commits:
                run.commit(state)
            holds(state)
            inside = [s.start for s in state.plan.steps if s.start < stop < s.end and stop > begin]
            if inside and (cut is None or inside[0] < cut) and stop == state.num_computed:
                cut = inside[0] if cut is None else cut
        run.advance_to_last_step(state)
        logits = run.finish(state)
        run.commit(state)
        holds(state)
        if cut is not None:
            assert state.num_exact <= cut
            assert all(block.end <= cut for block in state.prompt.chunks if block.end <= state.num_committed)
        else:
            assert state.num_exact == len(_TEXT)
    assert torch.allclose(logits, expected, atol=1e-5)


def test_a_second_advance_goes_on_inside_the_step() -> None:
    run = prefiller()
    with run.open(_TEXT) as state:
        run.advance(state, to=40)
        assert (state.num_computed, state.num_exact) == (40, 32)
        run.advance(state, to=60)
        assert (state.num_computed, state.num_exact) == (60, 32), "a step in two parts is not what a cold run computes"
        assert state.cache.get_seq_length() == 60
        run.commit(state)
        assert state.num_committed == 32


def test_nothing_is_finished_before_its_steps() -> None:
    run = prefiller()
    with run.open(_TEXT) as state, pytest.raises(ValueError, match="advance_to_last_step"):
        run.finish(state)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda state: state.computed(20),  # nothing was appended
        lambda state: state.computed(0),
        lambda state: state.computed(17),  # across a step's end
        lambda state: state.committed(16, new=True),  # not computed
        lambda state: state.repaired(RepairOutcome(0, None)),
        lambda state: state.drop_approx("no reason"),
        lambda state: state.in_steps_of(64),  # bitwise KV keeps its steps
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
            run.advance(state, to=64)
        state.drop_approx("as asked")
        assert (state.num_computed, state.num_exact, state.spans) == (32, 32, None)
        run.advance_to_last_step(state)
        run.finish(state)
        assert state.num_exact == len(_TEXT)
        assert state.report().reason == "as asked"
