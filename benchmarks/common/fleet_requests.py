"""Prompts of token ids in the shape of a trace, for a real fleet: made-up text by the trace's ids, lengths scaled down.

Used by :mod:`benchmarks.fleet.ray_fleet`. Invariants: equal ids are equal text, wherever they stand; every piece of
text ends with a paragraph, so that an engine cuts it alike wherever it stands, if a blank line is one token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.fleet_load import Request
from benchmarks.common.report import BenchError
from benchmarks.common.traces import Prompt, read
from benchmarks.internals import break_table, make_chunker, token_array
from kvboost.fleet.route import RoutePrompt

_WORD = re.compile(r"[Ġ▁]?[A-Za-z]+")  # as vocabularies write a word, with or without the blank before it
_LEAST = 4  # tokens of a piece of text
_ROOT = bytes(32)


@dataclass(frozen=True)
class FleetRequests:
    """The first requests of a trace, scaled down."""

    name: str
    prompts: Sequence[list[int]]
    chained: bool
    """Text is reused as a prefix only; else wherever it stands."""
    footprint: int
    """Tokens of all different text of the whole trace, scaled down."""
    own_footprint: int
    """Of these requests alone."""


class MadeUpText:
    """Words of a tokenizer's vocabulary in random order, the same for the same name."""

    def __init__(self, tokenizer: Any) -> None:
        words = [number for raw, number in tokenizer.get_vocab().items() if _WORD.fullmatch(raw)]
        self._words = np.array(sorted(words))
        self._end: list[int] = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
        if len(self._words) < 16:
            raise BenchError("the model's tokenizer has no words of letters; give another model")

    def of(self, name: bytes, tokens: int) -> list[int]:
        """So many tokens, with the end of a paragraph behind them."""
        drawn = np.random.default_rng(list(name)).choice(self._words, max(1, tokens - len(self._end)))
        return [*drawn.tolist(), *self._end]


def scaled_requests(
    folder: Path, name: str, *, text: MadeUpText, count: int, scale: float, longest: int
) -> FleetRequests:
    """The first ``count`` requests of a trace with one token for ``scale`` of its own, ``longest`` tokens at most."""
    trace = read(folder, name)
    sizes: dict[bytes, int] = {}
    own = 0
    prompts: list[list[int]] = []
    for number, prompt in enumerate(trace.prompts):
        parts = list(_fitting(prompt, scale=scale, longest=longest, chained=trace.chained))
        sizes.update(parts)
        if number < count:
            prompts.append([token for key, size in parts for token in text.of(key, size)])
            own = sum(sizes.values())
    return FleetRequests(name, prompts, trace.chained, footprint=sum(sizes.values()), own_footprint=own)


def _fitting(prompt: Prompt, *, scale: float, longest: int, chained: bool) -> Iterator[tuple[bytes, int]]:
    """Of a conversation the beginning that fits; of documents those that do."""
    left = longest
    for key, tokens in zip(prompt.keys, prompt.tokens, strict=True):
        size = max(_LEAST, round(tokens / scale))
        if size <= left:
            left -= size
            yield key, size
        elif chained:
            return


def simulated_requests(
    requests: FleetRequests, tokenizer: Any, *, chunk_size: int, arrivals: Sequence[float]
) -> list[Request]:
    """The same requests for the simulator, cut as an engine cuts them, in the order in which they arrived."""
    chunker = make_chunker("natural", size=chunk_size, breaks=break_table(tokenizer))
    made = []
    for number, tokens in enumerate(requests.prompts):
        ids = token_array(tokens)
        made.append(Request(number, arrivals[number], RoutePrompt.of(_ROOT, ids, chunker.cut(ids))))
    return sorted(made, key=lambda request: request.arrival)
