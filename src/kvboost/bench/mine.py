"""``kvboost bench mine``: what a user's own prompts gain, at what quality, and which settings to use.

Called by :mod:`kvboost.cli.bench`. Plain Transformers and our engine get the prompts in turn, once for each setting.
Invariant: an approximate setting is recommended only if the bound on the answers it changes is within what is
tolerated, counted over the prompts in which it reused text that had moved: others cannot change by it.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.approx.calibration import CalibrationRow
from kvboost.bench.compare import EXACT, REUSE, Pairing, compare, quality_settings
from kvboost.bench.report import Machine, Spread, Table
from kvboost.bench.workloads import Request
from kvboost.config import DEFAULT_CHUNK
from kvboost.core.chunking import BreakTable, NaturalChunker
from kvboost.core.keys import chunk_keys, token_array
from kvboost.engine import KVBoost
from kvboost.types import Chunk

_ROOT = hashlib.sha256(b"kvboost.bench.mine").digest()
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Capacities that are tried, of all the different tokens there are."""


def hit_rates(
    prompts: Sequence[tuple[Sequence[int], Sequence[int]]], breaks: BreakTable | None, *, anywhere: bool = False
) -> list[tuple[int, float]]:
    """Capacities in tokens, and the share of all prompt tokens that each finds. Prompts come with their boundaries.

    ``anywhere`` also finds text that stood elsewhere, as approximate reuse does.
    """
    chunker = NaturalChunker(DEFAULT_CHUNK, breaks)
    cut: list[list[Chunk]] = []
    for tokens, boundaries in prompts:
        ids = token_array(list(tokens))
        # The last token is always computed, and what is behind the last cut is no chunk.
        ends = [end for end in chunker.cut(ids, boundaries) if end < len(tokens)]
        cut.append(chunk_keys(_ROOT, ids, ends))
    total = sum(len(tokens) for tokens, _ in prompts)
    different = {_key(chunk, anywhere): chunk.end - chunk.start for chunks in cut for chunk in chunks}
    capacities = sorted({max(1, round(share * sum(different.values()))) for share in SHARES})
    return [(capacity, _found(cut, capacity, anywhere) / total) for capacity in capacities]


def _key(chunk: Chunk, anywhere: bool) -> bytes:
    """What a chunk is kept under. One that was moved is not stored again at its new place."""
    return chunk.content_key if anywhere else chunk.prefix_key


def _found(prompts: Sequence[Sequence[Chunk]], capacity: int, anywhere: bool) -> int:
    held: OrderedDict[bytes, int] = OrderedDict()
    used = found = 0
    for chunks in prompts:
        keys = [_key(chunk, anywhere) for chunk in chunks]
        leading = next((n for n, key in enumerate(keys) if key not in held), len(chunks))
        hits = [chunk for chunk, key in zip(chunks, keys, strict=True) if key in held] if anywhere else chunks[:leading]
        found += sum(chunk.end - chunk.start for chunk in hits)
        # Without ``anywhere`` a chunk is no use without those before it, so these go last.
        for key, chunk in zip(reversed(keys), reversed(chunks), strict=True):
            if key not in held:
                used += chunk.end - chunk.start
            held[key] = chunk.end - chunk.start
            held.move_to_end(key)
        while used > capacity:
            used -= held.popitem(last=False)[1]
    return found


_CONFIDENCE = 0.95
_WORTH = 1.05  # a setting must be so much faster to be worth it
_NEARLY_ALL = 0.98  # of what an unlimited cache finds
_SLACK = 1.25  # of the cache's size: prompts to come are not quite these
_UNIT = 64 * 10**6  # bytes a size is rounded up to


@dataclass(frozen=True)
class Tried:
    """One setting on all prompts."""

    quality: str
    pairing: Pairing
    bytes_per_token: int
    """What a token's KV takes in the cache."""

    @property
    def gain(self) -> float:
        """Time to all first tokens without us, by that with us."""
        theirs, own = ([one["ttft_ms"] for one in side] for side in (self.pairing.theirs, self.pairing.ours))
        return math.fsum(theirs) / max(1e-3, math.fsum(own))

    def changed(self) -> tuple[int, int]:
        """Answers that plain Transformers gives otherwise, and all, of the prompts in which moved text was reused."""
        pairs = zip(self.pairing.ours, self.pairing.theirs, strict=True)
        other = [own["tokens"] != theirs["tokens"] for own, theirs in pairs if own["moved"]]
        return sum(other), len(other)

    def at_most(self, confidence: float) -> float:
        """Upper bound of the share of changed answers."""
        differing, count = self.changed()
        if not count:
            return 1.0  # nothing is shown
        return CalibrationRow(self.quality, 0.0, count, differing, 1.0 - differing / count, None).largest_share(
            confidence
        )

    def about(self) -> str:
        """What it changed, in words."""
        differing, count = self.changed()
        return f"changed {differing} of {count} answers with moved text"


@dataclass(frozen=True)
class Recommendation:
    """What to set, and why."""

    quality: str | None
    """None: these prompts gain nothing."""
    cache_bytes: int
    reason: str

    def text(self, serve: Sequence[str]) -> str:
        """The end of the command's output, with the command that serves as recommended."""
        if self.quality is None:
            return f"Recommendation: none. {self.reason}"
        flags = ["--quality", self.quality, "--cache-bytes", f"{self.cache_bytes // 10**6}MB"]
        source = "The times are with the default cache; the size comes from a replay of your prompts."
        return f"Recommendation: {self.reason}\n\n  {shlex.join([*serve, *flags])}\n\n{source}"


def measure(model: Any, tokenizer: Any, requests: Sequence[Request], *, new: int) -> list[Tried]:
    """Every setting in turn with plain Transformers."""
    tried: list[Tried] = []
    for quality in (EXACT, "high", "fast"):
        with KVBoost(model, tokenizer, **quality_settings(quality)) as engine:
            pairing = compare("your prompts", requests, engine, new=new, cold=0)
            tried.append(Tried(quality, pairing, int(engine.describe()["bytes per token"])))
    return tried


def cache_bytes(requests: Sequence[Request], breaks: BreakTable | None, quality: str, *, per_token: int) -> int:
    """The smallest cache that finds nearly all that this quality can find in these prompts, with some slack."""
    prompts = [(request.tokens, request.boundaries) for request in requests]
    rates = hit_rates(prompts, breaks, anywhere=quality != EXACT)
    enough = next(capacity for capacity, rate in rates if rate >= _NEARLY_ALL * rates[-1][1])
    return _UNIT * math.ceil(_SLACK * enough * per_token / _UNIT)


def recommend(tried: Sequence[Tried], *, tolerated: float, size: Callable[[str], int]) -> Recommendation:
    """The fastest setting whose answers may be trusted; ``size`` is the cache's for a quality."""
    exact, *others = sorted(tried, key=lambda one: one.quality != EXACT)
    # Without moved text an approximate setting is the exact one, and its gain is noise.
    moving = [one for one in others if one.changed()[1]]
    worth = sorted((one for one in moving if one.gain >= _WORTH * max(1.0, exact.gain)), key=lambda one: -one.gain)
    confidence = 1.0 - (1.0 - _CONFIDENCE) / max(1, len(others))  # each setting tried may pass by luck
    chosen = next((one for one in worth if one.at_most(confidence) <= tolerated), None)
    if chosen is not None:
        return Recommendation(
            chosen.quality,
            size(chosen.quality),
            f"quality {chosen.quality} is {chosen.gain:.1f}x as fast as plain Transformers, and {chosen.about()} "
            f"(at most {chosen.at_most(confidence):.0%}, 95 % sure).",
        )
    best = next((one for one in worth if one.changed()[0] <= tolerated * one.changed()[1]), None)
    if best is not None:
        return Recommendation(
            "auto",
            size("auto"),
            f"quality auto is exact ({exact.gain:.1f}x) until checks on your traffic allow more. {best.quality} was "
            f"{best.gain:.1f}x and {best.about()} here, too few to show that it changes at most {tolerated:.0%}.",
        )
    if exact.gain < _WORTH:
        return Recommendation(
            None,
            0,
            f"Exact reuse makes these prompts {exact.gain:.2f}x as fast: they share too little of their beginnings. "
            "kvboost explain shows where reuse breaks.",
        )
    rest = ""
    if worth:
        other = worth[0]
        rest = f" {other.quality} is {other.gain:.1f}x, but {other.about()}."
    return Recommendation(EXACT, size(EXACT), f"exact reuse is {exact.gain:.1f}x as fast, with the same bits.{rest}")


def table_of(tried: Sequence[Tried], machine: Machine) -> Table:
    """What was measured."""
    columns = ["quality", "plain ms", "ours ms", "plain / ours", "all prompts", *REUSE]
    table = Table(f"Time to the first token of {len(tried[0].pairing.ours)} prompts", machine, columns)
    for one in tried:
        pairing = one.pairing
        sides = [Spread.of([r["ttft_ms"] for r in side]).text(0) for side in (pairing.theirs, pairing.ours)]
        ratio = Spread.of(pairing.ratio()).text()
        table.add(one.quality, *sides, ratio, f"{one.gain:.2f}", *pairing.reuse_cells())
    table.notes.append(
        "Median [lowest highest]; ratios prompt by prompt. all prompts: the sum of plain's times by the sum of ours. "
        "An answer is the same if plain Transformers gives the same greedy tokens; rounding alone may change one. "
        "A recommendation counts only the answers to prompts in which moved text was reused."
    )
    return table
