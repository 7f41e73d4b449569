"""Where the states of recurrent layers are kept, and how they are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvboost.core.keys import chunk_keys, token_array
from kvboost.core.state import ChunkedPrompt
from kvboost.core.states import ends_to_keep, resumable, state_chunk
from kvboost.steps import StepRule
from kvboost.types import Chunk

_ON_GRID, _ANYWHERE = StepRule(128, 128), StepRule(1024, numerics="fast")
_ROOT = b"r" * 32


def _prompt(tokens: int, *, every: int = 32, boundaries: tuple[int, ...] = ()) -> ChunkedPrompt:
    ids = [1 + i % 90 for i in range(tokens)]
    ends = sorted({*range(every, tokens + 1, every), *boundaries})
    snapshot: Any = SimpleNamespace()
    return ChunkedPrompt(ids, ends, snapshot, chunk_keys(_ROOT, token_array(ids), ends), None, boundaries)


def _kept(prompt: ChunkedPrompt, rule: StepRule = _ON_GRID, **given: int) -> tuple[int, ...]:
    return ends_to_keep(prompt, rule, **{"start": 0, "shared": 0, "state_tokens": 100, **given})


def test_a_state_has_a_key_of_its_own_behind_its_chunk_and_no_tokens() -> None:
    one, other = _prompt(64).chunks
    state = state_chunk(one)
    assert (state.start, state.end, state.tokens, state.parent_key) == (32, 32, b"", one.prefix_key)
    assert len({state.prefix_key, state_chunk(other).prefix_key, one.prefix_key, other.prefix_key}) == 4
    theirs = one._replace(tenant="b")
    assert state_chunk(theirs).tenant == "b", "it counts to the tenant of its chunk"


def test_a_step_begins_only_where_the_rule_allows_it() -> None:
    chunks = _prompt(300).chunks
    assert [chunk.end for chunk in resumable(chunks, _ON_GRID)] == [128, 256]
    assert resumable(chunks, _ANYWHERE) == chunks


def test_the_last_end_that_leaves_a_token_to_compute_is_kept() -> None:
    assert _kept(_prompt(300)) == (256,)
    assert _kept(_prompt(300), _ANYWHERE) == (288,)
    assert _kept(_prompt(257)) == (256,), "the 257th token is left for the logits"
    assert _kept(_prompt(256)) == (128,)
    assert _kept(_prompt(100)) == ()


def test_nothing_is_kept_that_is_there_already() -> None:
    assert _kept(_prompt(300), start=256) == ()
    assert _kept(_prompt(500), start=256) == (384,)


def test_the_end_of_what_is_shared_is_kept() -> None:
    assert _kept(_prompt(1000), shared=300) == (256, 896)
    assert _kept(_prompt(1000), _ANYWHERE, shared=320) == (320, 992)
    assert _kept(_prompt(1000), start=256, shared=300) == (896,)


def test_boundaries_are_kept_the_first_and_the_last_ones() -> None:
    assert _kept(_prompt(1000, boundaries=(200, 700))) == (128, 640, 896)
    assert _kept(_prompt(1000, boundaries=(200, 700)), _ANYWHERE) == (200, 700, 992)
    many = tuple(range(100, 2000, 100))
    assert _kept(_prompt(2000, boundaries=many), _ANYWHERE) == (100, 200, 300, 1700, 1800, 1900, 1984)


def test_long_texts_have_sparse_ends_further_apart_the_larger_a_state_is() -> None:
    assert _kept(_prompt(10_000)) == (2048, 4096, 6144, 8192, 9984)
    assert _kept(_prompt(10_000), state_tokens=1500) == (4608, 9216, 9984)
    assert _kept(_prompt(10_000), start=4096, shared=6000) == (5888, 7936, 9984)


@given(
    tokens=st.integers(1, 6000),
    boundaries=st.lists(st.integers(1, 6000), max_size=12),
    start=st.integers(0, 6000),
    shared=st.integers(0, 6000),
    state_tokens=st.integers(1, 3000),
    fast=st.booleans(),
)
def test_every_end_can_be_resumed_and_leaves_something_to_compute(
    tokens: int, boundaries: list[int], start: int, shared: int, state_tokens: int, fast: bool
) -> None:
    rule = _ANYWHERE if fast else _ON_GRID
    prompt = _prompt(tokens, boundaries=tuple(b for b in boundaries if b <= tokens))
    kept = _kept(prompt, rule, start=start, shared=shared, state_tokens=state_tokens)
    ends = {chunk.end: chunk for chunk in prompt.chunks}
    assert list(kept) == sorted(set(kept))
    for end in kept:
        chunk: Chunk = ends[end]
        assert start < chunk.end < tokens
        assert rule.resume(end) == end
