"""Log-probabilities of the tokens after a text whose KV is in a cache.

Used by :mod:`kvboost.engine.score`. Several sequences go on from one cache: in tiles in one forward, without a copy of
its KV, each with the bits it has alone; in other numerics one after another. Invariant: afterwards the cache holds what
it held before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
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
_PROBE = 20, ((3, 5), (7, 11, 13))  # tokens held before, and sequences after them

_log = logging.getLogger(__name__)


class Scored(NamedTuple):
    """What follows some tokens of a sequence."""

    sequence: int
    """Which one, by its index."""
    start: int
    """Of these tokens in it."""
    logprobs: torch.Tensor
    """[tokens, vocab], in float32."""


class Scorer:
    """Scores with one model."""

    def __init__(self, runner: ModelRunner, layout: KVLayout, *, max_step: int) -> None:
        """A forward computes at most ``max_step`` tokens."""
        self._runner, self._layout = runner, layout
        self._most = min(max_step, max(1, _MAX_LOGITS // runner.model.get_output_embeddings().weight.shape[0]))

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], cache: Any) -> Iterator[Scored]:
        """What follows each token of ``sequences``, each after what ``cache`` holds. Long sequences come in parts."""
        tiles, waiting = self._joint_tiles, list[int]()
        for index, tokens in enumerate(sequences):
            if tiles is None or len(tokens) > self._most:
                yield from self._alone(index, tokens, cache)
                continue
            if sum(len(sequences[other]) for other in waiting) + len(tokens) > self._most:
                yield from self._together(tiles, waiting, sequences, cache)
                waiting.clear()
            waiting.append(index)
        if tiles is not None and waiting:
            yield from self._together(tiles, waiting, sequences, cache)

    @cached_property
    def _joint_tiles(self) -> Tiles | None:
        """What several sequences are run with; None where it was not shown that each has the bits it has alone."""
        tiles, (held, sequences) = self._runner.tiles, _PROBE
        if tiles is None:
            return None
        cache = SlabCache(self._layout, capacity=held + 8)
        self._runner.append(list(range(held)), cache, logits=False)
        alone = [next(self._alone(index, tokens, cache)).logprobs for index, tokens in enumerate(sequences)]
        try:
            together = [found.logprobs for found in self._together(tiles, range(len(sequences)), sequences, cache)]
        except (UnsupportedAttentionError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            _log.info("continuations are scored one by one: %s", error)
            return None
        same = all(map(torch.equal, alone, together))
        if not same:
            _log.info("continuations are scored one by one: together they round differently")
        return tiles if same else None

    def _together(
        self, tiles: Tiles, indexes: Sequence[int], sequences: Sequence[Sequence[int]], cache: SlabCache
    ) -> Iterator[Scored]:
        """Several sequences in one forward."""
        start, rows = cache.get_seq_length(), [len(sequences[index]) for index in indexes]
        ids = [token for index in indexes for token in sequences[index]]
        positions = [start + place for count in rows for place in range(count)]
        inputs = torch.tensor([ids, positions], device=self._runner.device)
        new = Cache(layers=[StepLayer() for _ in cache.layers])
        try:
            with tiles.shared_step(cache, rows) as step:
                every = torch.arange(len(ids), device=self._runner.device)
                logits = self._runner.run_rows(inputs[0][None], new, every, position_ids=inputs[1][None])
            if any(part.calls != len(cache.layers) for part in step.parts):  # one would have seen the others
                raise UnsupportedAttentionError(f"its attention is not Transformers' {NAME!r} any more")
        finally:
            cache.set_length(start)
        for index, part in zip(indexes, torch.split(logits, rows), strict=True):
            yield Scored(index, 0, part.float().log_softmax(dim=-1))

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
