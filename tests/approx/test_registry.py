"""Documents found in prompts: whatever stands around them, by their own cuts, and nothing that is not there."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvboost.approx.registry import DocumentRegistry
from kvboost.core.chunking import HASH_WINDOW, NaturalChunker
from kvboost.core.keys import token_array
from kvboost.hf.prompt import PromptEncoder
from tests.helpers.tokenizer import word_tokenizer

_CHUNKER = NaturalChunker(16)
_TOKENS = st.lists(st.integers(0, 3), max_size=40)  # few values: the same words turn up everywhere


def _registered(documents: Sequence[Sequence[int]], **options: int) -> tuple[DocumentRegistry, list[list[int]]]:
    registry = DocumentRegistry(**options)
    cuts = [[0, *_CHUNKER.cut(token_array(list(tokens)), [len(tokens)])] for tokens in documents]
    for name, (tokens, ends) in enumerate(zip(documents, cuts, strict=True)):
        registry.add(name, tokens, ends)
    return registry, cuts


@given(before=_TOKENS, length=st.integers(20, 150), seed=st.integers(0, 999), behind=_TOKENS)
@settings(max_examples=50, deadline=None)
def test_a_document_is_cut_in_a_prompt_as_it_was_alone(
    before: list[int], length: int, seed: int, behind: list[int]
) -> None:
    document = random.Random(seed).sample(range(4, 1000), length)
    registry, (cuts,) = _registered([document])
    found = registry.boundaries([*before, *document, *behind])
    assert {len(before) + cut for cut in cuts} - {0} <= set(found)


@given(documents=st.lists(_TOKENS, min_size=1, max_size=4), prompt=_TOKENS)
@settings(max_examples=100, deadline=None)
def test_every_boundary_belongs_to_a_chunk_that_is_there(documents: list[list[int]], prompt: list[int]) -> None:
    """No false finds: by every boundary the tokens of whole chunks of one document stand, a window of them at least."""
    registry, cuts = _registered(documents)
    found = registry.boundaries(prompt)
    there: set[int] = set()
    for tokens, ends in zip(documents, cuts, strict=True):
        pairs = [(a, b) for i, a in enumerate(ends) for b in ends[i + 1 :] if b - a >= HASH_WINDOW]
        for a, b in pairs:
            for at in range(len(prompt) - (b - a) + 1):
                if prompt[at : at + b - a] == tokens[a:b]:
                    there |= {at + cut - a for cut in ends if a <= cut <= b}
    assert set(found) <= there
    assert found == sorted(set(found))


def test_a_part_of_a_document_and_several_in_any_order_are_found() -> None:
    rng = random.Random(3)
    documents = [[rng.randrange(1000) for _ in range(120)] for _ in range(500)]
    registry, cuts = _registered(documents)
    middle = cuts[7][2]
    prompt = [1, 2, 3, *documents[7][middle:], *documents[3], *documents[300], 4, *documents[3]]
    found = set(registry.boundaries(prompt))
    at = 3 - middle
    assert {at + cut for cut in cuts[7] if cut >= middle} <= found
    begin = 3 + 120 - middle
    assert {begin + cut for cut in cuts[3]} | {begin + 120 + cut for cut in cuts[300]} <= found
    assert {begin + 241 + cut for cut in cuts[3]} <= found


def test_removed_replaced_and_cleared_documents_are_found_no_more() -> None:
    one, two, three = (list(range(start, start + 40)) for start in (0, 100, 200))
    registry, _ = _registered([one, two])
    assert registry.remove([0, "unknown"]) == 1
    assert registry.boundaries(one) == []
    assert registry.boundaries(two)[-1] == 40
    registry.add(1, three, [20])
    assert registry.boundaries(two) == []
    assert registry.boundaries([9, *three]) == [1, 21, 41]
    registry.clear()
    assert registry.boundaries(three) == []
    assert registry.remove([0, 1]) == 0


def test_tokens_are_bounded_and_the_oldest_go(caplog: pytest.LogCaptureFixture) -> None:
    documents = [list(range(100 * n, 100 * n + 40)) for n in range(4)]
    with caplog.at_level(logging.WARNING):
        registry, _ = _registered(documents, max_tokens=100)
    assert [bool(registry.boundaries(document)) for document in documents] == [False, False, True, True]
    assert "oldest documents" in caplog.text


_WORDS = ("the cache", "keeps", "what", "a model", "has read", "and gives", "it", "back when", "the same words", "come")


def _texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(_WORDS) for _ in range(60)) for _ in range(count)]


_TOKENIZER = word_tokenizer(_texts(0, 20), vocab_size=400)


@given(
    seed=st.integers(0, 10**6),
    before=st.sampled_from(["", "x", " ", "\n\n", "1. ", '"', "(", "Passage: ", "the", "<doc>"]),
    behind=st.sampled_from(["", "x", " ", "\n\n", '"', ")", "...", "s", "</doc>"]),
)
@settings(max_examples=40, deadline=None)
def test_merges_across_the_edges_cost_a_few_tokens_only(seed: int, before: str, behind: str) -> None:
    encoder = PromptEncoder(_TOKENIZER, max_tokens=None, vocab_size=400)
    (text,) = _texts(seed, 1)
    tokens, edges = encoder.encode_document(text)
    cuts = _CHUNKER.cut(token_array(tokens), [*edges, len(tokens)])
    registry = DocumentRegistry()
    registry.add(text, tokens, cuts)
    prompt = encoder.encode_part(f"Some text. {before}{text}{behind} And more.")
    found = registry.boundaries(prompt)
    assert len(tokens) - (found[-1] - found[0]) <= 6
    ids, known = token_array(prompt), token_array(tokens)
    chunks = _CHUNKER.cut(ids, found)
    own = {known[a:b].tobytes() for a, b in pairwise([0, *cuts])}
    reused = sum(b - a for a, b in pairwise([0, *chunks]) if ids[a:b].tobytes() in own)
    assert reused >= len(tokens) - 6
