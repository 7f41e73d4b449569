"""Requests for a simulated fleet: a trace's prompts by their keys, repeated for larger fleets, with arrival times.

Used by :mod:`benchmarks.fleet.fleet_simulation`. Invariants: equal text has equal keys; copies of a trace share
nothing, as different services do; the same seed gives the same requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.common.traces import Trace
from kvboost.fleet.index import ShortKeys
from kvboost.fleet.route import RoutePrompt
from kvboost.types import Chunk

_PADDING = bytes(24)  # stores and summaries take keys of 32 bytes

_ANY = bytes(4)  # not none: a block without tokens is a state


@dataclass(frozen=True)
class Hot:
    """From ``start`` to ``end`` of the requests, this share of them is about one document."""

    share: float
    start: float = 1 / 3
    end: float = 2 / 3


@dataclass(frozen=True)
class Request:
    """A prompt that arrives."""

    number: int
    arrival: float
    prompt: RoutePrompt

    @cached_property
    def chunks(self) -> list[Chunk]:
        """As a store sees them, all with the same token: keys are enough."""
        prefixes, contents = (_long(keys) for keys in (self.prompt.prefix_keys, self.prompt.content_keys))
        ends = np.cumsum(self.prompt.chunk_tokens).astype(int).tolist()
        return [
            Chunk(start, end, _ANY, prefix, parent, content)
            for start, end, prefix, parent, content in zip(
                [0, *ends], ends, prefixes, [None, *prefixes], contents, strict=False
            )
        ]


def _long(keys: ShortKeys) -> list[bytes]:
    raw = keys.tobytes()
    return [raw[at : at + 8] + _PADDING for at in range(0, len(raw), 8)]


class Load:
    """``copies`` of a trace, at a rate at which computing everything would take ``work`` of the time there is."""

    def __init__(
        self,
        trace: Trace,
        *,
        replicas: int,
        copies: int,
        limit: int,
        work: float,
        compute: float,
        hot: Hot | None = None,
        seed: int = 0,
    ) -> None:
        self.chained = trace.chained
        self.count = min(limit, copies * len(trace.prompts))
        self._copies, self._hot, self._seed = copies, hot, seed
        self._prompts = [_prompt(p.keys, p.tokens, chained=trace.chained) for p in trace.prompts]
        mean = sum(p.prompt_tokens for p in self._prompts) / len(self._prompts)
        self._gap = mean * compute / (work * replicas)  # seconds

    @property
    def seconds(self) -> float:
        """How long the requests arrive."""
        return self.count * self._gap

    def __iter__(self) -> Iterator[Request]:
        rng = np.random.default_rng(self._seed)
        salts = rng.integers(0, 2**64, self._copies, dtype=np.uint64)
        gaps = rng.exponential(self._gap, self.count)
        draws = rng.random(self.count)
        longest = max(self._prompts, key=lambda prompt: prompt.prompt_tokens)
        arrival = 0.0
        for number in range(self.count):
            arrival += float(gaps[number])
            prompt, salt = self._prompts[number // self._copies], salts[number % self._copies]
            hot = self._hot
            if hot and hot.start <= number / self.count < hot.end and draws[number] < hot.share:
                prompt, salt = _about(longest, prompt), np.uint64(0)
            keys = (np.maximum(own ^ salt, np.uint64(1)) for own in (prompt.prefix_keys, prompt.content_keys))
            yield Request(number, arrival, RoutePrompt(*keys, prompt.chunk_tokens, prompt.prompt_tokens))


def _prompt(keys: tuple[bytes, ...], tokens: tuple[int, ...], *, chained: bool) -> RoutePrompt:
    contents = [hashlib.sha256(key).digest() for key in keys]
    prefixes, prefix = [], b""
    for content in contents:
        # A block of a chained trace has its place in its name.
        prefix = content if chained else hashlib.sha256(prefix + content).digest()
        prefixes.append(prefix)
    return RoutePrompt(_short(prefixes), _short(contents), np.array(tokens, dtype=np.float64), sum(tokens))


def _about(hot: RoutePrompt, own: RoutePrompt) -> RoutePrompt:
    """The hot document, and the end of a prompt of its own behind it."""
    last = slice(-1, None)
    parts: list[Any] = [
        np.concatenate((getattr(hot, name)[:-1], getattr(own, name)[last]))
        for name in ("prefix_keys", "content_keys", "chunk_tokens")
    ]
    return RoutePrompt(*parts, int(parts[2].sum()))


def _short(keys: list[bytes]) -> ShortKeys:
    return np.frombuffer(b"".join(key[:8] for key in keys), dtype="<u8").astype(np.uint64)
