"""Log-probabilities of the tokens after a text whose KV is in a cache.

Used by :mod:`kvboost.engine.score`. Several sequences go on from one cache: in tiles in one forward, with what is
missing of the text before them, with other texts, and without a copy of the KV, each with the bits it has alone; in
other numerics one after another. Invariant: afterwards a cache holds its text at most, and nothing that follows it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
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


class Text(NamedTuple):
    """The end of a text, and what may follow it."""

    cache: Any
    """Holds what is before it."""
    tokens: Sequence[int]
    """At least one."""
    following: Mapping[int, Sequence[int]]
    """Several sequences, each after the text; they may be empty."""

    @property
    def rows(self) -> int:
        """Tokens of all of them."""
        return len(self.tokens) + sum(map(len, self.following.values()))


class Scored(NamedTuple):
    """What follows some tokens of a sequence."""

    text: int
    """Which one, by its index."""
    sequence: int
    """Which of those that follow it."""
    start: int
    """Which token of the sequence the first of these is about; token 0 comes right after the text."""
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
        """Tokens that one forward of :meth:`score` computes at most; what is before them is prefilled."""
        return self._most if self._joint_tiles is not None else 1

    @torch.no_grad()
    def score(self, texts: Sequence[Text]) -> Iterator[Scored]:
        """What comes after each text, and after each token that follows it: in one forward, where all of it fits.

        Long sequences come in parts. In tiles the caches then hold the texts too; else what they held before.
        """
        tiles = self._joint_tiles
        if tiles is not None and sum(text.rows for text in texts) <= self._most:
            yield from self._together(tiles, texts)
            return
        for number, text in enumerate(texts):
            for found in self._each(text) if tiles is None else self._in_parts(tiles, text):
                yield found._replace(text=number)

    def _each(self, text: Text) -> Iterator[Scored]:
        for index, tokens in text.following.items():
            yield from self._alone(index, [*text.tokens, *tokens], text.cache)

    def _in_parts(self, tiles: Tiles, text: Text) -> Iterator[Scored]:
        """One text with what follows it in as few forwards as hold it."""
        end, room = text.cache.get_seq_length() + len(text.tokens), self._most - len(text.tokens)
        groups, long = [dict[int, Sequence[int]]()], dict[int, Sequence[int]]()
        for index, tokens in text.following.items():
            if len(tokens) >= self._most:
                long[index] = tokens
                continue
            if len(tokens) > room:
                groups.append({})
                room = self._most - 1
            groups[-1][index] = tokens
            room -= len(tokens)
        for group in groups:
            yield from self._together(tiles, [text._replace(following=group)])
            text = text._replace(tokens=text.tokens[-1:])
            text.cache.set_length(end - 1)
        yield from self._each(text._replace(following=long))
        text.cache.set_length(end)

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
            found = list(self._together(tiles, [Text(cache, text, dict(enumerate(following)))]))
        except (UnsupportedAttentionError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            _log.info("continuations are scored one by one: %s", error)
            return None
        rows = [alone[each.sequence][len(text) - 1 + each.start :][: len(each.logprobs)] for each in found]
        same = all(torch.equal(row, each.logprobs) for row, each in zip(rows, found, strict=True))
        if not same:
            _log.info("continuations are scored one by one: together they round differently")
        return tiles if same else None

    @torch.no_grad()
    def _together(self, tiles: Tiles, texts: Sequence[Text]) -> Iterator[Scored]:
        """Texts and what follows them, in one forward."""
        ids, positions, wanted, rows = list[int](), list[int](), list[int](), list[list[int]]()
        ends = [text.cache.get_seq_length() + len(text.tokens) for text in texts]
        for text, end in zip(texts, ends, strict=True):
            following = [tokens for tokens in text.following.values() if tokens]
            rows.append([len(tokens) for tokens in following])
            wanted += range(len(ids) + len(text.tokens) - 1, len(ids) + text.rows)
            ids += [*text.tokens, *chain.from_iterable(following)]
            positions += [*range(end - len(text.tokens), end), *(end + at for count in rows[-1] for at in range(count))]
        inputs = torch.tensor([ids, positions], device=self._runner.device)
        new = Cache(layers=[StepLayer() for _ in texts[0].cache.layers])
        lengths = [text.cache.get_seq_length() for text in texts]  # where it fails
        try:
            parts = [(text.cache, len(text.tokens), counts) for text, counts in zip(texts, rows, strict=True)]
            with tiles.shared_step(parts) as step:
                kept = torch.tensor(wanted, device=self._runner.device)
                logits = self._runner.run_rows(inputs[0][None], new, kept, position_ids=inputs[1][None])
            if any(part.calls != len(new.layers) for part in step.parts):  # one would have seen the others
                raise UnsupportedAttentionError(f"its attention is not Transformers' {NAME!r} any more")
            lengths = ends
        finally:
            for text, length in zip(texts, lengths, strict=True):
                text.cache.set_length(length)
        found = iter(torch.split(logits, [count for counts in rows for count in (1, *counts)]))
        for number, text in enumerate(texts):
            after_text = next(found).float().log_softmax(dim=-1)
            for index, tokens in text.following.items():
                yield Scored(number, index, 0, after_text)
                if tokens:
                    yield Scored(number, index, 1, next(found).float().log_softmax(dim=-1))

    def _alone(self, index: int, tokens: Sequence[int], cache: SlabCache) -> Iterator[Scored]:
        """One sequence, in parts where it is long."""
        start = cache.get_seq_length()
        states = [state.clone() for state in cache.states()] if start else []
        try:
            for first in range(0, len(tokens), self._most):
                logits = self._runner.all_logits(tokens[first : first + self._most], cache)
                yield Scored(0, index, first, logits.float().log_softmax(dim=-1))
        finally:
            cache.set_length(start)
            if start:
                cache.place_states(states)
