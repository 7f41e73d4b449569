"""Where prompts are cut, and that the same text is cut alike wherever it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.core.chunking import ContentChunker, FixedChunker, make_chunker
from kvboost.core.keys import chunk_keys, token_array
from kvboost.errors import ConfigError
from kvboost.extend import Chunker
from tests.contracts import ChunkerContract

Ids = npt.NDArray[np.int64]


class TestFixedChunkerContract(ChunkerContract):
    def make_chunker(self) -> Chunker:
        return FixedChunker(32)


class TestFixedChunkerOfOneContract(ChunkerContract):
    def make_chunker(self) -> Chunker:
        return FixedChunker(1)


class TestContentChunkerContract(ChunkerContract):
    def make_chunker(self) -> Chunker:
        return ContentChunker(128)


class TestSmallContentChunkerContract(ChunkerContract):
    """Shorter chunks than the hash looks back."""

    def make_chunker(self) -> Chunker:
        return ContentChunker(4)


# Few distinct tokens repeat phrases; many make every window unlike the others.
texts = st.one_of(
    st.lists(st.integers(0, 2), max_size=200),
    st.lists(st.integers(0, 2**32 - 1), max_size=200),
)
chunkers = st.builds(lambda kind, size: kind(size), st.sampled_from([FixedChunker, ContentChunker]), st.integers(1, 40))


@st.composite
def marked_texts(draw: Any) -> tuple[list[int], list[int]]:
    tokens = draw(texts)
    return tokens, draw(st.lists(st.integers(0, len(tokens)), max_size=6))


@settings(max_examples=300, deadline=None)
@given(chunker=chunkers, marked=marked_texts(), data=st.data())
def test_equal_prefixes_have_equal_cuts(chunker: Chunker, marked: tuple[list[int], list[int]], data: Any) -> None:
    tokens, boundaries = marked
    t = data.draw(st.integers(0, len(tokens)))
    whole = chunker.cut(token_array(tokens), boundaries)
    part = chunker.cut(token_array(tokens[:t]), [b for b in boundaries if b <= t])
    assert part == [end for end in whole if end <= t]


@settings(max_examples=200, deadline=None)
@given(chunker=chunkers, marked=marked_texts(), data=st.data())
def test_what_follows_changes_no_cut_before_it(
    chunker: Chunker, marked: tuple[list[int], list[int]], data: Any
) -> None:
    tokens, boundaries = marked
    more = data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=60))
    later = data.draw(st.lists(st.integers(len(tokens) + 1, len(tokens) + len(more)), max_size=3)) if more else []
    alone = chunker.cut(token_array(tokens), boundaries)
    followed = chunker.cut(token_array(tokens + more), [*boundaries, *later])
    assert [end for end in followed if end <= len(tokens)] == alone


@settings(max_examples=200, deadline=None)
@given(chunker=chunkers, marked=marked_texts())
def test_cuts_ascend_hold_every_boundary_and_keep_the_bounds(
    chunker: Chunker, marked: tuple[list[int], list[int]]
) -> None:
    tokens, boundaries = marked
    ends = chunker.cut(token_array(tokens), boundaries)
    assert ends == sorted(set(ends))
    assert {b for b in boundaries if b > 0} <= set(ends) <= set(range(1, len(tokens) + 1))
    longest = getattr(chunker, "max_tokens", chunker.min_tokens)
    for start, end in zip([0, *ends], ends, strict=False):
        assert end - start <= longest
        assert end - start >= chunker.min_tokens or end in boundaries
    assert len(tokens) - (ends[-1] if ends else 0) < longest  # the tail would have been cut there


@settings(max_examples=100, deadline=None)
@given(chunker=chunkers, marked=marked_texts(), seed=st.randoms(use_true_random=False))
def test_order_and_repetition_of_boundaries_do_not_matter(
    chunker: Chunker, marked: tuple[list[int], list[int]], seed: Any
) -> None:
    tokens, boundaries = marked
    shuffled = [*boundaries, *boundaries]
    seed.shuffle(shuffled)
    assert chunker.cut(token_array(tokens), shuffled) == chunker.cut(token_array(tokens), sorted(set(boundaries)))


def test_fixed_cuts_count_from_the_last_boundary() -> None:
    tokens = token_array(range(20))
    assert FixedChunker(4).cut(tokens) == [4, 8, 12, 16, 20]
    assert FixedChunker(4).cut(tokens, [6]) == [4, 6, 10, 14, 18]
    assert FixedChunker(4).cut(tokens, [8]) == [4, 8, 12, 16, 20]
    assert FixedChunker(30).cut(tokens) == []


def test_content_cuts_are_what_they_were() -> None:
    """Stored keys depend on them. Change the rule, and the version in ``spec`` must change with it."""
    tokens = token_array([i * 2654435761 % 49152 for i in range(1200)])
    golden = [39, 81, 143, 198, 265, 365, 407, 535, 565, 640, 722, 753, 778, 882, 963, 999, 1127, 1164]
    chunker = ContentChunker(64)
    assert chunker.spec == "content:64:24:128:w8:v1"
    assert chunker.cut(tokens) == golden
    assert FixedChunker(64).spec == "fixed:64"


def test_chunks_have_the_size_that_was_asked_for_on_average() -> None:
    """The size decides how much a miss costs and how many keys a prompt has."""
    tokens = token_array(np.random.default_rng(0).integers(0, 50_000, 200_000).tolist())
    for size in (32, 128):
        mean = len(tokens) / len(ContentChunker(size).cut(tokens))
        assert mean == pytest.approx(size, rel=0.1)


def test_one_token_for_ever_is_cut_at_the_longest_length() -> None:
    """A hash that never falls below the threshold must not make one endless chunk."""
    chunker = ContentChunker(32)
    lengths = {
        length for token in range(40) for length in np.diff([0, *chunker.cut(token_array([token] * 500))]).tolist()
    }
    assert 64 in lengths
    assert max(lengths) == 64


@pytest.mark.parametrize("kind", [FixedChunker, ContentChunker])
@pytest.mark.parametrize("size", [0, -1, -8])
def test_a_size_without_tokens_is_refused(kind: Any, size: int) -> None:
    """Chunks of no tokens would be cut for ever."""
    with pytest.raises(ConfigError, match="size"):
        kind(size)


@pytest.mark.parametrize("chunker", [FixedChunker(8), ContentChunker(8)])
@pytest.mark.parametrize("bad", [[-1], [11], [3, 11], [-1, 3]])
def test_a_boundary_outside_the_prompt_is_refused(chunker: Chunker, bad: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"0\.\.10"):
        chunker.cut(token_array(range(10)), bad)


def test_make_chunker() -> None:
    assert make_chunker("content", size=64) == ContentChunker(64)
    assert make_chunker("fixed", size=64) == FixedChunker(64)
    own = FixedChunker(7)
    assert make_chunker(own, size=64) is own
    with pytest.raises(ConfigError, match="'content', 'fixed', 'natural'"):
        make_chunker("magic", size=64)
    with pytest.raises(ConfigError, match="int"):
        make_chunker(3, size=64)  # type: ignore[arg-type]


def test_every_parameter_is_in_the_spec() -> None:
    specs = {kind(size).spec for kind in (FixedChunker, ContentChunker) for size in range(4, 200)}
    assert len(specs) == 2 * 196


# Re-synchronisation: a text is found again behind something else.

ROOT = bytes(32)
SIZE = 128  # the engine's default
DOCUMENT, QUESTION, PREAMBLES, SEEDS = 2000, 300, 50, range(12)


def shared(chunker: Chunker, document: Ids, prompt: Ids, boundaries: Sequence[int] = ()) -> float:
    """The share of the tokens in the document's own chunks that are chunks of ``prompt`` too."""
    alone = token_array(document.tolist())
    whole = token_array(prompt.tolist())
    found = {chunk.content_key for chunk in chunk_keys(ROOT, whole, chunker.cut(whole, boundaries))}
    own = chunk_keys(ROOT, alone, chunker.cut(alone))
    total = sum(chunk.end - chunk.start for chunk in own)
    assert total > DOCUMENT - 2 * SIZE  # otherwise the share would be of next to nothing
    return sum(chunk.end - chunk.start for chunk in own if chunk.content_key in found) / total


def shares(chunker: Chunker, seed: int, *, question: int, marked: bool) -> list[float]:
    """For one document: its share behind each of 50 preambles of different lengths."""
    source = np.random.default_rng(seed)
    document, asked = source.integers(0, 50_000, DOCUMENT), source.integers(0, 50_000, question)
    lengths = source.choice(np.arange(1, 1500), PREAMBLES, replace=False).tolist()
    return [
        shared(
            chunker,
            document,
            np.concatenate([source.integers(0, 50_000, length), document, asked]),
            [length] if marked else [],
        )
        for length in lengths
    ]


@pytest.mark.parametrize("question", [0, QUESTION])
def test_a_document_is_found_behind_any_preamble(question: int) -> None:
    by_document = [
        float(np.mean(shares(ContentChunker(SIZE), seed, question=question, marked=False))) for seed in SEEDS
    ]
    # One document re-synchronises at one and the same place behind nearly every preamble, so the mean over
    # documents is the measure; a single one whose first good cut comes late has less.
    assert np.mean(by_document) >= 0.90
    assert min(by_document) >= 0.75


@pytest.mark.parametrize("question", [0, QUESTION])
def test_a_fixed_grid_loses_the_document(question: int) -> None:
    """The control: the test above can fail, and what it measures is worth having."""
    by_document = [float(np.mean(shares(FixedChunker(SIZE), seed, question=question, marked=False))) for seed in SEEDS]
    assert max(by_document) < 0.10


@pytest.mark.parametrize("question", [0, QUESTION])
@pytest.mark.parametrize("chunker", [ContentChunker(SIZE), FixedChunker(SIZE)])
def test_a_marked_document_is_found_whole(chunker: Chunker, question: int) -> None:
    assert min(min(shares(chunker, seed, question=question, marked=True)) for seed in list(SEEDS)[:4]) == 1.0
