"""Plans tile the prompt, and the last token is always computed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.core.chunking import FixedChunker
from kvboost.core.keys import chunk_keys, token_array
from kvboost.core.plan import ReusePlan, Segment, SegmentKind, plan_reuse, reusable_chunks
from kvboost.types import Chunk

EXACT, FRESH = SegmentKind.EXACT, SegmentKind.FRESH


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
def test_plans_tile_the_prompt_and_end_fresh(prompt: tuple[int, list[Chunk]], data: Any) -> None:
    prompt_tokens, chunks = prompt
    reusable = reusable_chunks(chunks, prompt_tokens=prompt_tokens)
    available = data.draw(st.integers(0, len(reusable)))
    plan = plan_reuse(chunks, prompt_tokens=prompt_tokens, available=available)

    covered = [position for segment in plan.segments for position in range(segment.start, segment.end)]
    assert covered == list(range(prompt_tokens))
    assert plan.segments[-1].kind is FRESH
    assert [segment.chunk for segment in plan.reused] == chunks[:available]
    assert plan.exact_tokens == (chunks[available - 1].end if available else 0) < prompt_tokens
    assert plan.reused + plan.steps == plan.segments


@settings(max_examples=200, deadline=None)
@given(prompts())
def test_warm_steps_are_the_last_of_the_cold_steps(prompt: tuple[int, list[Chunk]]) -> None:
    """Same shapes, same kernels, same bits: a warm run skips steps and changes none."""
    prompt_tokens, chunks = prompt
    cold = plan_reuse(chunks, prompt_tokens=prompt_tokens, available=0)
    assert cold.exact_tokens == 0
    for available in range(len(reusable_chunks(chunks, prompt_tokens=prompt_tokens)) + 1):
        warm = plan_reuse(chunks, prompt_tokens=prompt_tokens, available=available)
        assert warm.steps == cold.steps[available:]
        assert warm.steps


@settings(max_examples=200, deadline=None)
@given(prompts())
def test_everything_but_the_chunk_of_the_last_token_is_reusable(prompt: tuple[int, list[Chunk]]) -> None:
    prompt_tokens, chunks = prompt
    assert list(reusable_chunks(chunks, prompt_tokens=prompt_tokens)) == [c for c in chunks if c.end < prompt_tokens]


def test_a_chunk_that_ends_with_the_prompt_is_never_reused() -> None:
    chunks = chunks_of(12, FixedChunker(4).cut(token_array(range(12))))
    assert [chunk.end for chunk in reusable_chunks(chunks, prompt_tokens=12)] == [4, 8]
    with pytest.raises(ValueError, match="last token"):
        plan_reuse(chunks, prompt_tokens=12, available=3)
    plan = plan_reuse(chunks, prompt_tokens=12, available=2)
    assert [(s.kind, s.start, s.end) for s in plan.segments] == [(EXACT, 0, 4), (EXACT, 4, 8), (FRESH, 8, 12)]


def test_one_more_token_makes_the_chunk_reusable() -> None:
    chunks = chunks_of(13, [4, 8, 12])
    plan = plan_reuse(chunks, prompt_tokens=13, available=len(reusable_chunks(chunks, prompt_tokens=13)))
    assert plan.exact_tokens == 12
    assert [(s.start, s.end, s.chunk) for s in plan.steps] == [(12, 13, None)]


def test_more_than_there_is_cannot_be_reused() -> None:
    chunks = chunks_of(13, [4, 8, 12])
    with pytest.raises(ValueError, match="last token"):
        plan_reuse(chunks, prompt_tokens=13, available=4)


def test_a_prompt_of_one_token() -> None:
    for chunks in ([], chunks_of(1, [1])):
        assert not reusable_chunks(chunks, prompt_tokens=1)
        plan = plan_reuse(chunks, prompt_tokens=1, available=0)
        assert [(s.kind, s.start, s.end) for s in plan.segments] == [(FRESH, 0, 1)]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(FRESH, 0, 4)], "cover 4 of 10"),
        ([(FRESH, 0, 4), (FRESH, 5, 10)], "tile"),
        ([(FRESH, 0, 6), (FRESH, 5, 10)], "tile"),
        ([(FRESH, 1, 10)], "tile"),
        ([(FRESH, 0, 4), (FRESH, 4, 4), (FRESH, 4, 10)], "tile"),
        ([(FRESH, 0, 12)], "cover 12 of 10"),
        ([(FRESH, 0, 4), (EXACT, 4, 10)], "last token"),
        ([], "cover 0 of 10"),
    ],
)
def test_a_plan_that_does_not_tile_cannot_be_made(segments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReusePlan(10, tuple(Segment(kind, start, end, None) for kind, start, end in segments))


def test_chunks_of_another_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="cover 12 of 10"):
        plan_reuse(chunks_of(12, [4, 12]), prompt_tokens=10, available=0)
