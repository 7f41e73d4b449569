"""Bounds of what the engine must reuse, and the comparison of warm against cold runs.

The bounds are written naively and apart from the package: lists of tokens, no keys, no tensors.
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
from kvboost.store import MemoryStore
from tests.helpers.models import VOCAB


def hit_bounds(
    tokens: Sequence[int], earlier: Sequence[Sequence[int]], ends: Sequence[int], *, grid: int | None
) -> tuple[int, int]:
    """How much of ``tokens`` must and may be reused after these requests, if nothing was evicted.

    ``ends`` are the cuts of ``tokens``. On a grid only whole steps are stored, and computing resumes at one.
    """
    last = len(tokens) - 1
    least = most = 0
    for other in earlier:
        common = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None)
        if common is None:
            common = min(len(tokens), len(other))
        most = max(most, common)
        stored = len(other) if grid is None else len(other) // grid * grid
        reached = max((end for end in ends if end <= min(common, stored)), default=0)
        if grid is None and common == len(other):  # its end is stored too, wherever the last cut was
            reached = common
        least = max(least, min(reached, last))
    return (least if grid is None else least // grid * grid), min(most, last)


def assert_same_bits(warm: Any, cold: Any, length: int) -> None:
    """Logits, every stored row and every recurrent state of two prefills are equal to the last bit."""
    assert same_bits(warm.logits, cold.logits), "first-token logits differ"
    for one, other in zip(warm.cache.states(), cold.cache.states(), strict=True):
        assert same_bits(one, other), "recurrent states differ"
    for one, other in zip(warm.cache.extract(0, length), cold.cache.extract(0, length), strict=True):
        assert same_bits(one, other), "KV rows differ"


def assert_warm_equals_cold(warm: KVBoost, cold: KVBoost, tokens: list[int], *, expected_hit: int | None = None) -> int:
    """One prefill on a warm engine against the same on an empty one. Returns the hit's length."""
    cold.clear()
    one, other = warm.prefill(tokens), cold.prefill(tokens)
    assert expected_hit is None or one.reuse.exact_tokens == expected_hit
    assert other.reuse.exact_tokens == 0
    assert one.reuse.exact_tokens + one.reuse.fresh_tokens == len(tokens)
    assert one.reuse.bitwise
    assert_same_bits(one, other, len(tokens))
    return one.reuse.exact_tokens


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
        chunking=st.sampled_from(["fixed", "content", "natural"]),
        limit=st.sampled_from([3, 10, 1000]),
        workspace=st.sampled_from(["0", "1GiB"]),
        seed=st.integers(0, 2**16),
    )
    def start(self, size: int, chunking: str, limit: int, workspace: str, seed: int) -> None:
        settings = {"chunk_size": size * self.scale, "chunking": chunking, "quality": "exact"}
        store = MemoryStore(2**31, max_chunks=limit)
        self.warm = KVBoost(self.model, None, store=store, workspace_bytes=workspace, **settings)
        self.cold = KVBoost(self.model, None, **settings)
        self.grid = self.warm.session.prefiller.rule.grid
        self.recurrent = self.warm.session.prefiller.state_tokens > 0
        self.evicts = limit < 1000
        self.earlier: list[list[int]] = []  # since the last clear
        generator = torch.Generator().manual_seed(seed)
        self.texts = [
            torch.randint(3, self.vocab, (self.longest * self.scale,), generator=generator).tolist() for _ in range(2)
        ]

    def teardown(self) -> None:
        if hasattr(self, "warm"):
            assert self.warm._store.stats().leased == 0, "a lease was leaked"

    def _prompt(self, text: int, length: int, tail: list[int], at_step: bool) -> list[int]:
        tokens = self.texts[text][: length * self.scale] + tail
        if at_step and self.grid and len(tokens) > self.grid:  # as long as what is stored, state and all
            tokens = tokens[: len(tokens) // self.grid * self.grid]
        return tokens

    def _check_hit(self, tokens: list[int], hit: int) -> None:
        least, most = hit_bounds(tokens, self.earlier, self._ends(tokens), grid=self.grid)
        assert hit <= most, "reused more than any earlier request has in common with this one"
        # With recurrent layers a hit ends where a state was kept: tests/core/test_states.py says where.
        assert self.evicts or self.recurrent or hit >= least, "reused less than is stored"
        self.earlier.append(tokens)
        type(self).requests += 1
        type(self).hits += hit > 0

    prompts = {
        "text": st.integers(0, 1),
        "length": st.one_of(
            st.integers(0, longest),
            st.sampled_from([k * c + d for c in (4, 8, 16) for k in (1, 2, 3, 4) for d in (-1, 0, 1)]),
        ),
        "tail": st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=5),
        "at_step": st.booleans(),
    }

    @rule(**prompts)
    def prefill(self, text: int, length: int, tail: list[int], at_step: bool) -> None:
        tokens = self._prompt(text, length, tail, at_step)
        self._check_hit(tokens, assert_warm_equals_cold(self.warm, self.cold, tokens))

    @rule(**prompts)
    def generate(self, text: int, length: int, tail: list[int], at_step: bool) -> None:
        tokens = self._prompt(text, length, tail, at_step)
        wanted = {"max_new_tokens": 2, "temperature": 0, "return_dict_in_generate": True, "output_logits": True}
        self.cold.clear()
        one, other = self.warm.generate(tokens, **wanted), self.cold.generate(tokens, **wanted)
        self._check_hit(tokens, one.reuse.exact_tokens)
        assert one.token_ids == other.token_ids
        for mine, theirs in zip(one.raw.logits, other.raw.logits, strict=True):
            assert same_bits(mine, theirs), "logits differ"

    @rule(text=st.integers(0, 1), length=st.integers(1, longest))
    def warm_up(self, text: int, length: int) -> None:
        tokens = self.texts[text][: length * self.scale]
        before = self.warm._store.stats().chunks
        new = self.warm.warm(tokens)
        self.earlier.append(tokens)
        if not (self.evicts or self.recurrent):  # the count is what was added; states are blocks too
            assert new == self.warm._store.stats().chunks - before

    def _ends(self, tokens: list[int]) -> list[int]:
        return self.warm.parts.chunker.cut(token_array(tokens))

    @precondition(lambda self: len(self.earlier) > 4)
    @rule()
    def clear(self) -> None:
        self.warm.clear()
        self.earlier.clear()
