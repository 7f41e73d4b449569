"""A reference for what the engine must do, and the comparison of warm against cold runs.

The reference cache is written naively and apart from the package: lists of token tuples, no keys, no
tensors. It predicts the hit length of every request, evictions included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvboost import KVBoost
from kvboost.core.keys import token_array
from kvboost.core.verify import same_bits
from kvboost.store import LeafFirstLRU, MemoryStore
from tests.helpers.models import VOCAB

Prefix = tuple[int, ...]


class ReferenceCache:
    """Which prefixes are stored, by a slow and obvious leaf-first LRU with room for ``limit`` chunks."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.by_recency: list[Prefix] = []  # oldest first
        self.parent: dict[Prefix, Prefix | None] = {}

    def request(self, tokens: Sequence[int], ends: Sequence[int], *, commits_to: int) -> int:
        """Predict one request's hit length in tokens, then store its chunks that end by ``commits_to``."""
        chain = [tuple(tokens[:end]) for end in ends]
        hits = 0
        while hits < len(chain) and len(chain[hits]) < len(tokens) and chain[hits] in self.parent:
            hits += 1
        self._refresh(chain[:hits])
        stored = hits
        for index in range(hits, len(chain)):
            if len(chain[index]) > commits_to:
                break
            if chain[index] not in self.parent:
                parent = chain[index - 1] if index else None
                if not self._evict_for(held=set(chain[:hits]), parent=parent):
                    break
                self.parent[chain[index]] = parent
                self.by_recency.append(chain[index])
            stored += 1
        self._refresh(chain[:stored])
        return len(chain[hits - 1]) if hits else 0

    def clear(self) -> None:
        self.by_recency.clear()
        self.parent.clear()

    def _refresh(self, chain: list[Prefix]) -> None:
        for prefix in reversed(chain):
            self.by_recency.remove(prefix)
            self.by_recency.append(prefix)

    def _evict_for(self, *, held: set[Prefix], parent: Prefix | None) -> bool:
        while len(self.parent) >= self.limit:
            inner = {p for p in self.parent.values() if p is not None} | {parent}
            leaves = [p for p in self.by_recency if p not in inner and p not in held]
            if not leaves:
                return False
            self.by_recency.remove(leaves[0])
            del self.parent[leaves[0]]
        return True


def assert_same_bits(warm: Any, cold: Any, length: int) -> None:
    """Logits and every stored row of two prefills are equal to the last bit."""
    assert same_bits(warm.logits, cold.logits), "first-token logits differ"
    for one, other in zip(warm.cache.extract(0, length), cold.cache.extract(0, length), strict=True):
        assert same_bits(one, other), "KV rows differ"


def assert_warm_equals_cold(warm: KVBoost, cold: KVBoost, tokens: list[int], *, expected_hit: int) -> None:
    """One prefill on a warm engine against the same on an empty one."""
    cold.clear()
    one, other = warm.prefill(tokens), cold.prefill(tokens)
    assert one.reuse.exact_tokens == expected_hit
    assert other.reuse.exact_tokens == 0
    assert one.reuse.exact_tokens + one.reuse.fresh_tokens == len(tokens)
    assert one.reuse.bitwise
    assert_same_bits(one, other, len(tokens))


class ExactReuseMachine(RuleBasedStateMachine):
    """Random warm, prefill, generate and clear on one engine; every answer is held against a cold one."""

    model: Any = None
    cold: KVBoost
    requests = 0
    hits = 0
    longest = 70
    vocab = VOCAB
    scale = 1  # of prompts and chunks: on larger models and longer prompts rounding depends on a step's shape

    @initialize(
        size=st.sampled_from([4, 8, 16]),
        chunking=st.sampled_from(["fixed", "content"]),
        limit=st.sampled_from([3, 6, 10, 1000]),
        workspace=st.sampled_from(["0", "1GiB"]),
        seed=st.integers(0, 2**16),
    )
    def start(self, size: int, chunking: str, limit: int, workspace: str, seed: int) -> None:
        settings = {"chunk_size": size * self.scale, "chunking": chunking, "quality": "exact"}
        # What another order of eviction would keep, the reference could not tell.
        store = MemoryStore(2**31, max_chunks=limit, policy=LeafFirstLRU())
        self.warm = KVBoost(self.model, None, store=store, workspace_bytes=workspace, **settings)
        self.cold = KVBoost(self.model, None, **settings)
        self.reference = ReferenceCache(limit)
        generator = torch.Generator().manual_seed(seed)
        self.texts = [
            torch.randint(3, self.vocab, (self.longest * self.scale,), generator=generator).tolist() for _ in range(2)
        ]

    def teardown(self) -> None:
        if hasattr(self, "warm"):
            assert self.warm._store.stats().leased == 0, "a lease was leaked"

    def _prompt(self, text: int, length: int, tail: list[int]) -> list[int]:
        return self.texts[text][: length * self.scale] + tail

    def _expect(self, tokens: list[int], *, generates: bool = False) -> int:
        type(self).requests += 1
        hit = self.reference.request(
            tokens, self._ends(tokens), commits_to=len(tokens) - 1 if generates else len(tokens)
        )
        type(self).hits += hit > 0
        return hit

    prompts = {
        "text": st.integers(0, 1),
        "length": st.one_of(
            st.integers(0, longest),
            st.sampled_from([k * c + d for c in (4, 8, 16) for k in (1, 2, 3, 4) for d in (-1, 0, 1)]),
        ),
        "tail": st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=5),
    }

    @rule(**prompts)
    def prefill(self, text: int, length: int, tail: list[int]) -> None:
        tokens = self._prompt(text, length, tail)
        assert_warm_equals_cold(self.warm, self.cold, tokens, expected_hit=self._expect(tokens))

    @rule(**prompts)
    def generate(self, text: int, length: int, tail: list[int]) -> None:
        tokens = self._prompt(text, length, tail)
        expected = self._expect(tokens, generates=True)
        wanted = {"max_new_tokens": 2, "temperature": 0, "return_dict_in_generate": True, "output_logits": True}
        self.cold.clear()
        one, other = self.warm.generate(tokens, **wanted), self.cold.generate(tokens, **wanted)
        assert one.reuse.exact_tokens == expected
        assert one.token_ids == other.token_ids
        for mine, theirs in zip(one.raw.logits, other.raw.logits, strict=True):
            assert same_bits(mine, theirs), "logits differ"

    @rule(text=st.integers(0, 1), length=st.integers(1, longest))
    def warm_up(self, text: int, length: int) -> None:
        tokens = self.texts[text][: length * self.scale]
        before = len(self.reference.parent)
        self.reference.request([*tokens, -1], self._ends(tokens), commits_to=len(tokens))
        new = self.warm.warm(tokens)
        if self.reference.limit > 100:  # without evictions the count is what was added
            assert new == len(self.reference.parent) - before

    def _ends(self, tokens: list[int]) -> list[int]:
        return self.warm.parts.chunker.cut(token_array(tokens))

    @precondition(lambda self: len(self.reference.parent) > 4)
    @rule()
    def clear(self) -> None:
        self.warm.clear()
        self.reference.clear()
