"""The default chunker: it cuts at natural places, and finds its cuts again behind any preamble."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.core.chunking import BreakTable, NaturalChunker, chunk_size_for, make_chunker
from kvboost.core.keys import token_array
from kvboost.errors import ConfigError
from kvboost.extend import Chunker
from kvboost.types import Break
from tests.contracts import ChunkerContract

# A small language: ids 0 to 5 are breaks of these kinds, 6 is another special token, the rest are words.
WORD, STOP, LINE, NEWLINE, BLANK, MARK, OTHER_MARK = range(7)
FIRST_WORD = 7


def table(size: int = 40) -> BreakTable:
    breaks = np.zeros(size, dtype=np.uint8)
    breaks[[STOP, LINE, NEWLINE, BLANK, MARK, OTHER_MARK]] = [
        Break.SENTENCE,
        Break.LINE,
        Break.NEWLINE,
        Break.PARAGRAPH,
        Break.SPECIAL,
        Break.SPECIAL,
    ]
    return breaks


class TestNaturalChunkerContract(ChunkerContract):
    def make_chunker(self) -> Chunker:
        return NaturalChunker(32, table())


class TestNaturalChunkerWithoutTokenizerContract(ChunkerContract):
    def make_chunker(self) -> Chunker:
        return NaturalChunker(32)


class TestSmallNaturalChunkerContract(ChunkerContract):
    """Shorter chunks than the hash looks back."""

    def make_chunker(self) -> Chunker:
        return NaturalChunker(4, table(FIRST_WORD))


def words(count: int) -> list[int]:
    """Words in turn, between which no hash cuts: only breaks do."""
    return [FIRST_WORD + 1 - i % 2 for i in range(count)]


def cut(*parts: list[int] | int, size: int = 32) -> list[int]:
    tokens = [token for part in parts for token in (part if isinstance(part, list) else [part])]
    return NaturalChunker(size, table()).cut(token_array(tokens))


def test_a_line_or_a_sentence_ends_a_chunk_from_half_the_size_on() -> None:
    for end in (LINE, NEWLINE, STOP):
        assert cut(words(15), end, words(5)) == [16]
        assert cut(words(14), end, words(5)) == []


def test_a_paragraph_or_a_message_ends_nearly_any_chunk() -> None:
    for end in (BLANK, MARK):
        assert cut(words(3), end, words(5)) == [4]
        assert cut(words(2), end, words(5)) == []  # such as a header of a few tokens between two marks
        assert cut(words(6), end, words(6), end) == [7, 14]


def test_a_blank_line_may_be_two_tokens() -> None:
    assert cut(words(6), NEWLINE, NEWLINE, words(5)) == [8]
    assert cut(words(6), LINE, NEWLINE, words(5)) == [8]
    assert cut(words(6), NEWLINE, words(1), NEWLINE, words(5)) == []
    assert cut(words(6), MARK, NEWLINE, words(9)) == [7]  # behind a message there is no blank line


def test_nothing_ends_between_placeholders() -> None:
    """An image stands in a prompt as hundreds of one special token."""
    assert cut(words(3), [MARK] * 60) == [4]
    assert cut(words(3), MARK, OTHER_MARK, MARK, OTHER_MARK, MARK) == [4, 8]


def test_where_nothing_ends_the_hash_decides_and_the_longest_chunk_has_twice_the_size() -> None:
    random = token_array(np.random.default_rng(0).integers(FIRST_WORD, 2**32, 20_000))
    lengths = np.diff([0, *NaturalChunker(32, table()).cut(random)])
    assert lengths.min() >= 24
    assert lengths.max() == 64
    assert 35 < lengths.mean() < 42
    assert (lengths == 64).mean() < 0.1
    alone = np.diff([0, *NaturalChunker(32).cut(random)])
    assert alone.min() >= 16
    assert alone.mean() == pytest.approx(32, rel=0.1)


def test_natural_cuts_are_what_they_were() -> None:
    """Stored keys depend on them. Change the rule, and the version in ``spec`` must change with it."""
    tokens = token_array([i * 2654435761 % 83 for i in range(600)])
    chunker = NaturalChunker(32, table())
    assert chunker.spec == "natural:32:4:64:w8:1330ca50c7fc93e83ece81c0167d6b18:v1"
    assert chunker.cut(tokens) == [
        28,
        60,
        64,
        68,
        101,
        143,
        147,
        151,
        184,
        226,
        230,
        234,
        267,
        309,
        313,
        317,
        350,
        392,
        396,
        400,
        433,
        475,
        479,
        483,
        516,
        558,
        562,
        566,
        599,
    ]


def test_every_parameter_is_in_the_spec() -> None:
    """The table too: two tokenizers must not share keys."""
    other = table()
    other[30] = Break.LINE
    tables = (None, table(), table(41), other)
    assert len({NaturalChunker(size, breaks).spec for size in range(8, 80) for breaks in tables}) == 72 * 4
    assert NaturalChunker(32, table()).spec == NaturalChunker(32, table()).spec


def test_make_chunker_hands_the_table_on() -> None:
    chunker = make_chunker("natural", size=24, breaks=table())
    assert chunker.spec == NaturalChunker(24, table()).spec
    with pytest.raises(ConfigError, match="size"):
        NaturalChunker(0)


@pytest.mark.parametrize(
    ("bytes_per_token", "size"),
    [
        (2 * 24 * 2 * 64 * 2, 32),  # Qwen2.5-0.5B in bfloat16: 0.4 MB
        (2 * 30 * 3 * 64 * 2, 32),  # SmolLM2-135M: 0.7 MB
        (2 * 32 * 8 * 128 * 2, 16),  # Llama 8B: 2 MB
        (2 * 80 * 8 * 128 * 2, 16),  # Llama 70B: 5 MB, but chunks do not get shorter
        (2 * 28 * 8 * 128 * 2, 18),
        (6000, 43),
        (64, 64),
        (10**9, 16),
    ],
)
def test_the_size_follows_from_the_models_bytes_per_token(bytes_per_token: int, size: int) -> None:
    assert chunk_size_for(bytes_per_token) == size


# Properties.

tokens_of_language = st.lists(st.integers(0, 39), max_size=300)
chunkers = st.builds(
    NaturalChunker, st.integers(1, 48), st.one_of(st.none(), st.builds(table, st.integers(FIRST_WORD, 40)))
)


@settings(max_examples=300, deadline=None)
@given(chunker=chunkers, tokens=tokens_of_language, data=st.data())
def test_equal_prefixes_have_equal_cuts(chunker: NaturalChunker, tokens: list[int], data: Any) -> None:
    boundaries = data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))
    t = data.draw(st.integers(0, len(tokens)))
    whole = chunker.cut(token_array(tokens), boundaries)
    part = chunker.cut(token_array(tokens[:t]), [b for b in boundaries if b <= t])
    assert part == [end for end in whole if end <= t]


@settings(max_examples=300, deadline=None)
@given(chunker=chunkers, tokens=tokens_of_language, data=st.data())
def test_every_length_is_one_that_its_place_allows(chunker: NaturalChunker, tokens: list[int], data: Any) -> None:
    """And no chunk runs over a place that allows its length."""
    boundaries = data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))
    ends = chunker.cut(token_array(tokens), boundaries)
    half, strong = max(1, chunker.size // 2), chunker.min_tokens
    for start, end in pairwise([0, *ends, len(tokens)]):
        for place in range(start + 1, end + 1):
            kind = None if chunker.breaks is None else tokens[place - 1]
            cuts = (
                place in boundaries
                or place - start == chunker.max_tokens
                or (kind == BLANK and place - start >= strong)
                or (kind in (STOP, LINE, NEWLINE) and place - start >= half)
            )
            assert not cuts or place in ends
            by_hash = place - start >= half
            marked = kind in (MARK, OTHER_MARK, NEWLINE) and place - start >= strong
            assert place not in ends or cuts or by_hash or marked


@settings(max_examples=200, deadline=None)
@given(
    before=tokens_of_language,
    passage=st.lists(st.integers(STOP, 39), min_size=1, max_size=300).filter(lambda ids: ids[0] not in (NEWLINE, MARK)),
    end=st.sampled_from([BLANK, MARK]),
)
def test_a_passage_behind_a_blank_line_is_cut_as_alone(before: list[int], passage: list[int], end: int) -> None:
    """From its first token on, whatever the preamble and its length: only the hash may look back across the break.

    Unless the hash has cut a few tokens before the break: then the chunk that begins there is too short to end at it.
    """
    preamble = [*before, *words(4), end]
    natural = NaturalChunker(32, table())
    whole = natural.cut(token_array([*preamble, *passage]))
    if any(len(preamble) - natural.min_tokens < place < len(preamble) for place in whole):
        return
    assert len(preamble) in whole
    behind = [place - len(preamble) for place in whole if place > len(preamble)]
    alone = natural.cut(token_array([MARK, *passage]), [1])
    assert behind == [place - 1 for place in alone if place > 1]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(16, 48), min_size=4, max_size=12), first=st.integers(0, 200), other=st.integers(0, 200)
)
def test_sentences_resynchronise_at_the_end_of_the_second(lengths: list[int], first: int, other: int) -> None:
    """Each may end a chunk: behind two preambles of any length the cuts are the same from there on."""
    passage = [token for length in lengths for token in [*words(length - 1), STOP]]
    chunker, cuts = NaturalChunker(32, table()), []
    for length in (first, other):
        ends = chunker.cut(token_array([*words(length), *passage]))
        cuts.append({end - length for end in ends if end - length >= sum(lengths[:2])})
    assert cuts[0] == cuts[1]


@pytest.mark.parametrize(("breaks", "lost"), [(None, 64), (table(), 100)])
def test_text_without_any_break_resynchronises_by_content(breaks: BreakTable | None, lost: int) -> None:
    """Before two or three chunks are over, on average over documents; ``lost`` tokens were cut otherwise."""
    chunker, late = NaturalChunker(32, breaks), []
    for seed in range(200):
        source = np.random.default_rng(seed)
        document = source.integers(FIRST_WORD, 50_000, 1000).tolist()
        lengths = source.integers(0, 400, 2).tolist()
        one, two = (
            {end - n for end in chunker.cut(token_array([*source.integers(FIRST_WORD, 50_000, n), *document]))}
            for n in lengths
        )
        late.append(max((place for place in one ^ two if place > 0), default=0))
    assert np.mean(late) < lost
    assert max(late) < 600
