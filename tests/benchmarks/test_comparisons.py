"""What exactness and fidelity compare with: the reference store, bit equality, KL, first differences, alternation."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch

from benchmarks.common.measure import alternate
from benchmarks.exact.exactness import ReferenceStore, _same_bits, edge_lengths
from benchmarks.exact.fidelity import first_difference, kl_divergence
from kvboost.core.chunking import FixedChunker
from kvboost.core.keys import chunk_keys, token_array
from kvboost.store import LeafFirstLRU, MemoryStore
from kvboost.types import KVBlock, PutOutcome


def read(store: MemoryStore, tokens: list[int], ends: list[int], stored_to: int) -> int:
    """One request to a real store, as the engine makes it."""
    chunks = chunk_keys(b"r" * 32, token_array(tokens), ends)
    last = len(tokens) - 1
    with store.lease([chunk for chunk in chunks if chunk.start < last]) as lease:
        done = hits = len(lease.blocks)
        for c in chunks[hits:]:
            size = c.end - c.start
            block = KVBlock(c.prefix_key, c.parent_key, c.content_key, c.tokens, (), size, True)
            if c.end > stored_to or store.put(block) is PutOutcome.REFUSED:
                break
            done += 1
        store.used([c.prefix_key for c in chunks[:done]])
    return min(ends[hits - 1], last) if hits else 0


@pytest.mark.parametrize(("max_chunks", "max_tokens"), [(7, None), (None, 30), (3, None), (None, 3), (0, None)])
def test_the_reference_store_predicts_the_real_one(max_chunks: int | None, max_tokens: int | None) -> None:
    rng = random.Random(5)
    store = MemoryStore(10**9 if max_tokens is None else max_tokens, max_chunks=max_chunks, policy=LeafFirstLRU())
    # A grid of 1: chunks alone, without the ends of prompts.
    reference = ReferenceStore(size=4, grid=1, max_chunks=max_chunks, max_tokens=max_tokens)
    for _ in range(400):
        tokens = [rng.randrange(2) for _ in range(4)] * 8
        tokens = tokens[: rng.randint(1, 32)]
        ends = FixedChunker(4).cut(token_array(tokens), [rng.randint(1, len(tokens))] if rng.random() < 0.3 else [])
        stored_to = len(tokens) - rng.randrange(2)
        assert reference.request(tokens, ends, stored_to=stored_to) == read(store, tokens, ends, stored_to)
        stats = store.stats()
        assert (stats.chunks, stats.evictions) == (len(reference.held), reference.evictions)


def test_bits_are_compared_not_values() -> None:
    zero = torch.tensor([0.0, 1.0])
    assert _same_bits(zero, zero.clone())
    assert not _same_bits(zero, torch.tensor([-0.0, 1.0]))


def test_edge_lengths_stand_around_every_chunk_end() -> None:
    lengths = edge_lengths(32)
    assert lengths[:3] == [63, 64, 65]
    assert {383, 384, 385} <= set(lengths)
    assert min(lengths) >= 40
    assert max(lengths) <= 400


def test_kl_divergence_of_two_known_distributions() -> None:
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert kl_divergence(p, q) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert kl_divergence(p, p) == 0.0


def test_first_difference() -> None:
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


def test_contestants_alternate_and_take_turns_in_going_first() -> None:
    order: list[str] = []

    def contestant(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = alternate({n: lambda n=n: contestant(n) for n in "abcd"}, repeat=39, warmups=1, label="x")
    rounds = ["".join(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert all(sorted(each) == list("abcd") for each in rounds)
    assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))
    behind = Counter(pair for each in rounds for pair in pairwise(each))
    assert behind["a", "b"] == behind["b", "a"] > 0
    assert len(behind) == 12, "everybody runs behind everybody"
    assert [len(samples) for samples in times.values()] == [39] * 4
    assert times["a"][0] == order.index("a", 4) + 1, "the warm-up is left out"
