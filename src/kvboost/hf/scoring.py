"""Log-probabilities of the tokens after a text whose KV is in a cache.

Used by :mod:`kvboost.engine.score`. Several sequences go on from one cache: in tiles in one forward, with what is
missing of the text before them and without a copy of its KV, each with the bits it has alone; in other numerics one
after another. Invariant: afterwards the cache holds the text, and nothing that follows it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from kvboost.hf.attention import NAME, UnsupportedAttentionError
from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.cache_layers import StepLayer
from kvboost.hf.numerics.tiles import Tiles
from kvboost.hf.runner import ModelRunner

_MAX_LOGITS = 1 << 26  # numbers made at a time: 256 MB in float32, and as much again as logarithms
_PROBE = 20, (3, 5, 7), ((), (11,), (13, 17))  # tokens held before, a text after them, and what follows that

_log = logging.getLogger(__name__)


class Scored(NamedTuple):
    """What follows some tokens of a sequence."""

    sequence: int
    """Which one, by its index."""
    start: int
    """Tokens of it before these."""
    logprobs: torch.Tensor
    """[tokens, vocab], in float32."""


class Scorer:
    """Scores with one model."""

    def __init__(self, runner: ModelRunner, layout: KVLayout, *, max_step: int) -> None:
        """A forward computes at most ``max_step`` tokens."""
        self._runner, self._layout = runner, layout
        self._most = min(max_step, max(1, _MAX_LOGITS // runner.model.get_output_embeddings().weight.shape[0]))

    @property
    def most(self) -> int:
        """Tokens of a text that :meth:`score` takes at most; what is before them is prefilled."""
        return self._most if self._joint_tiles is not None else 1

    @torch.no_grad()
    def score(self, text: Sequence[int], following: Sequence[Sequence[int]], cache: Any) -> Iterator[Scored]:
        """What comes after ``text``, which goes on after what ``cache`` holds, and after each token that follows it.

        Long sequences come in parts. In tiles the cache then holds the text too; else what it held before.
        """
        tiles = self._joint_tiles
        if tiles is None:
            for index, tokens in enumerate(following):
                yield from self._alone(index, [*text, *tokens], cache)
            return
        end, room = cache.get_seq_length() + len(text), self._most - len(text)
        groups, long = [dict[int, Sequence[int]]()], dict[int, Sequence[int]]()
        for index, tokens in enumerate(following):
            if len(tokens) >= self._most:
                long[index] = tokens
                continue
            if len(tokens) > room:
                groups.append({})
                room = self._most - 1
            groups[-1][index] = tokens
            room -= len(tokens)
        for group in groups:
            yield from self._together(tiles, text, group, cache)
            text = text[-1:]
            cache.set_length(end - 1)
        for index, tokens in long.items():
            yield from self._alone(index, [*text, *tokens], cache)
        cache.set_length(end)

    @cached_property
    def _joint_tiles(self) -> Tiles | None:
        """What several sequences are run with; None where it was not shown that each has the bits it has alone."""
        tiles, (held, text, following) = self._runner.tiles, _PROBE
        if tiles is None:
            return None
        cache = SlabCache(self._layout, capacity=held + 16)
        self._runner.append(list(range(held)), cache, logits=False)
        alone = [next(self._alone(index, [*text, *tokens], cache)).logprobs for index, tokens in enumerate(following)]
        try:
            found = list(self._together(tiles, text, dict(enumerate(following)), cache))
        except (UnsupportedAttentionError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            _log.info("continuations are scored one by one: %s", error)
            return None
        rows = [alone[each.sequence][len(text) - 1 + each.start :][: len(each.logprobs)] for each in found]
        same = all(torch.equal(row, each.logprobs) for row, each in zip(rows, found, strict=True))
        if not same:
            _log.info("continuations are scored one by one: together they round differently")
        return tiles if same else None

    @torch.no_grad()
    def _together(
        self, tiles: Tiles, text: Sequence[int], following: Mapping[int, Sequence[int]], cache: SlabCache
    ) -> Iterator[Scored]:
        """A text and several sequences that follow it, in one forward."""
        start = cache.get_seq_length()
        end = start + len(text)
        some = [index for index, tokens in following.items() if tokens]
        rows = [len(following[index]) for index in some]
        ids = [*text, *(token for index in some for token in following[index])]
        positions = [*range(start, end), *(end + place for count in rows for place in range(count))]
        inputs = torch.tensor([ids, positions], device=self._runner.device)
        new = Cache(layers=[StepLayer() for _ in cache.layers])
        length = start  # where it fails
        try:
            with tiles.shared_step(cache, len(text), rows) as step:
                wanted = torch.arange(len(text) - 1, len(ids), device=self._runner.device)
                logits = self._runner.run_rows(inputs[0][None], new, wanted, position_ids=inputs[1][None])
            if any(part.calls != len(cache.layers) for part in step.parts):  # one would have seen the others
                raise UnsupportedAttentionError(f"its attention is not Transformers' {NAME!r} any more")
            length = end
        finally:
            cache.set_length(length)
        first, *others = torch.split(logits, [1, *rows])
        after_text = first.float().log_softmax(dim=-1)
        yield from (Scored(index, 0, after_text) for index in following)
        for index, part in zip(some, others, strict=True):
            yield Scored(index, 1, part.float().log_softmax(dim=-1))

    def _alone(self, index: int, tokens: Sequence[int], cache: SlabCache) -> Iterator[Scored]:
        """One sequence, in parts where it is long."""
        start, states = cache.get_seq_length(), [state.clone() for state in cache.states()]
        try:
            for first in range(0, len(tokens), self._most):
                logits = self._runner.all_logits(tokens[first : first + self._most], cache)
                yield Scored(index, first, logits.float().log_softmax(dim=-1))
        finally:
            cache.set_length(start)
            cache.place_states(states)
