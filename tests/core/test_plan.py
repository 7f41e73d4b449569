"""Plans tile the prompt, and the last token is always computed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.core.keys import chunk_keys, token_array
from kvboost.core.plan import ReusePlan, Segment, SegmentKind, plan_reuse, reusable_chunks
from kvboost.types import Chunk

APPROX, FRESH = SegmentKind.APPROX, SegmentKind.FRESH


def chunks_of(prompt_tokens: int, ends: list[int]) -> list[Chunk]:
    return chunk_keys(bytes(32), token_array(range(prompt_tokens)), ends)


@st.composite
def prompts(draw: Any) -> tuple[int, list[Chunk]]:
    """Any prompt cut anywhere; often the last chunk ends with the prompt."""
    prompt_tokens = draw(st.integers(1, 60))
    ends = draw(st.sets(st.integers(1, prompt_tokens)))
    if draw(st.booleans()):
        ends = ends | {prompt_tokens}
    return prompt_tokens, chunks_of(prompt_tokens, sorted(ends))


@settings(max_examples=300, deadline=None)
@given(prompts(), st.data())
def test_plans_tile_the_rest_of_the_prompt_and_end_fresh(prompt: tuple[int, list[Chunk]], data: Any) -> None:
    prompt_tokens, chunks = prompt
    exact = data.draw(st.integers(0, prompt_tokens - 1))
    behind = [i for i, c in enumerate(reusable_chunks(chunks, prompt_tokens=prompt_tokens)) if c.start >= exact]
    approx = data.draw(st.sets(st.sampled_from(behind))) if behind else set()
    plan = plan_reuse(chunks, prompt_tokens=prompt_tokens, exact_tokens=exact, approx=approx)

    covered = [position for segment in plan.segments for position in range(segment.start, segment.end)]
    assert covered == list(range(exact, prompt_tokens))
    assert plan.segments[-1].kind is FRESH
    assert [segment.chunk for segment in plan.moved] == [chunks[i] for i in sorted(approx)]
    assert plan.approx_start == (chunks[min(approx)].start if approx else prompt_tokens)
    moved = {position for segment in plan.moved for position in range(segment.start, segment.end)}
    recomputed = data.draw(st.lists(st.integers(0, prompt_tokens - 1)))  # only what was moved counts
    names = ["fresh" if at not in moved else "recomputed" if at in recomputed else "moved" for at in covered]
    runs = plan.runs(recomputed=recomputed)
    assert [kind for kind, tokens in runs for _ in range(tokens)] == ["exact"] * exact + names
    assert all(one != next_one for (one, _), (next_one, _) in pairwise(runs))
    # What lies between repositioned chunks is stored chunk by chunk.
    assert all(s.chunk is not None or s is plan.segments[-1] for s in plan.segments if s.start >= plan.approx_start)


@settings(max_examples=200, deadline=None)
@given(prompts())
def test_everything_but_the_chunk_of_the_last_token_is_reusable(prompt: tuple[int, list[Chunk]]) -> None:
    prompt_tokens, chunks = prompt
    assert list(reusable_chunks(chunks, prompt_tokens=prompt_tokens)) == [c for c in chunks if c.end < prompt_tokens]


@pytest.mark.parametrize("exact", [12, 13, -1])
def test_the_last_token_is_never_reused(exact: int) -> None:
    with pytest.raises(ValueError, match="the last one is computed"):
        plan_reuse((), prompt_tokens=12, exact_tokens=exact)


def test_only_chunks_behind_the_exact_tokens_and_before_the_last_are_repositioned() -> None:
    chunks = chunks_of(12, [4, 8, 12])
    for exact, approx in ((5, {1}), (0, {2})):
        with pytest.raises(ValueError, match="can be repositioned"):
            plan_reuse(chunks, prompt_tokens=12, exact_tokens=exact, approx=approx)
    plan = plan_reuse(chunks, prompt_tokens=12, exact_tokens=2, approx={1})
    assert [(s.kind, s.start, s.end) for s in plan.segments] == [(FRESH, 2, 4), (APPROX, 4, 8), (FRESH, 8, 12)]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(FRESH, 0, 4)], "cover 4 of 10"),
        ([(FRESH, 0, 4), (FRESH, 5, 10)], "tile"),
        ([(FRESH, 0, 6), (FRESH, 5, 10)], "tile"),
        ([(FRESH, 1, 10)], "tile"),
        ([(FRESH, 0, 4), (FRESH, 4, 4), (FRESH, 4, 10)], "tile"),
        ([(FRESH, 0, 12)], "cover 12 of 10"),
        ([(FRESH, 0, 4), (APPROX, 4, 10)], "last token"),
        ([], "cover 0 of 10"),
    ],
)
def test_a_plan_that_does_not_tile_cannot_be_made(segments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReusePlan(10, 0, tuple(Segment(kind, start, end, None) for kind, start, end in segments))
