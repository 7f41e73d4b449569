"""``kvboost bench mine``: what a user's own prompts gain, at what quality, and which settings to use.

Called by :mod:`kvboost.cli.bench`. Plain Transformers and our engine get the prompts in turn, once for each setting.
Invariant: an approximate setting is recommended only if the bound on the answers it changes is within what is
tolerated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvboost.approx.calibration import CalibrationRow
from kvboost.bench.capacity import hit_rates
from kvboost.bench.contestants import OURS, Contestant, Missing
from kvboost.bench.report import BenchError, Report, Spread
from kvboost.bench.run import EXACT, Options, Unit, ours, warm_up
from kvboost.bench.summary import Pairing, pairings
from kvboost.bench.workloads import Request
from kvboost.core.chunking import BreakTable

QUALITIES = (EXACT, "high", "fast")
_PLAIN = "plain"
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
    dtype: str | None
    """What both ran in."""

    @property
    def gain(self) -> float:
        """Time to all first tokens without us, by that with us."""
        theirs, own = ([one["ttft_ms"] for one in side] for side in (self.pairing.theirs, self.pairing.ours))
        return math.fsum(theirs) / max(1e-3, math.fsum(own))

    @property
    def differing(self) -> int:
        """Answers that plain Transformers gives otherwise."""
        same, count = self.pairing.same_answers()
        return count - same

    def at_most(self) -> float:
        """Upper bound of the share of differing answers, 95 % sure."""
        count = len(self.pairing.ours)
        agreement = 1.0 - self.differing / count
        bound = CalibrationRow(self.quality, 0.0, count, self.differing, agreement, None)
        return bound.largest_share(_CONFIDENCE)


@dataclass(frozen=True)
class Recommendation:
    """What to set, and why."""

    quality: str | None
    """None: these prompts gain nothing."""
    cache_bytes: int
    reason: str

    @property
    def flags(self) -> str:
        """The two flags."""
        return f"--quality {self.quality} --cache-bytes {self.cache_bytes // 10**6}MB"

    def text(self, model: str) -> str:
        """The end of the command's output."""
        if self.quality is None:
            return f"Recommendation: none. {self.reason}"
        return f"Recommendation: {self.reason}\n\n  kvboost serve {model} {self.flags}"


def measure(options: Options, requests: Sequence[Request], qualities: Sequence[str] = QUALITIES) -> list[Tried]:
    """Every setting in turn with plain Transformers, which stays for all of them."""
    try:
        return _measured(options, requests, qualities)
    except Missing as error:  # here nothing is left without plain Transformers
        raise BenchError(str(error)) from error


def _measured(options: Options, requests: Sequence[Request], qualities: Sequence[str]) -> list[Tried]:
    longest = max(len(request.tokens) for request in requests)
    first = min(requests, key=lambda request: len(request.tokens))
    tried: list[Tried] = []
    plain: Contestant | None = None
    with ExitStack() as stack:
        for quality in qualities:
            with Contestant(OURS, options.engine(quality)) as engine:
                warm_up(engine, first)
                if plain is None:  # behind ours, whose dtype it is given
                    settings = {**options.rival(longest), "dtype": engine.dtype}
                    plain = stack.enter_context(Contestant(_PLAIN, settings))
                    warm_up(plain, first)
                unit = Unit({_PLAIN: plain, ours(quality): engine}, options, compared=False)
                sample = unit.run(requests, True, f"your prompts with quality {quality}")
                per_token = int(engine.ask("facts")["bytes_per_token"])
            (pairing,) = pairings([{"workload": "mine", "rival": _PLAIN, "repeat": 0, **sample}])
            tried.append(Tried(quality, pairing, per_token, engine.dtype))
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
    shown = [one for one in others if one.at_most() <= tolerated and one.gain >= _WORTH * exact.gain]
    if shown:
        chosen = max(shown, key=lambda one: one.gain)
        count = len(chosen.pairing.ours)
        return Recommendation(
            chosen.quality,
            size(chosen.quality),
            f"quality {chosen.quality} is {chosen.gain:.1f}x as fast as plain Transformers, and changed "
            f"{chosen.differing} of {count} answers (at most {chosen.at_most():.0%}, 95 % sure).",
        )
    worth = sorted((one for one in others if one.gain >= _WORTH * max(1.0, exact.gain)), key=lambda one: -one.gain)
    best = next((one for one in worth if one.differing <= tolerated * len(one.pairing.ours)), None)
    if best is not None:
        return Recommendation(
            "auto",
            size("auto"),
            f"quality auto is exact ({exact.gain:.1f}x) until checks on your traffic allow more. {best.quality} was "
            f"{best.gain:.1f}x and changed {best.differing} of {len(best.pairing.ours)} answers here, too few "
            f"prompts to show that it changes at most {tolerated:.0%}.",
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
        changed = f"changed {other.differing} of {len(other.pairing.ours)} answers"
        rest = f" {other.quality} is {other.gain:.1f}x, but {changed}."
    return Recommendation(EXACT, size(EXACT), f"exact reuse is {exact.gain:.1f}x as fast, with the same bits.{rest}")


def report_of(tried: Sequence[Tried], options: Options) -> Report:
    """The table."""
    report = Report("bench mine")
    columns = ["quality", "plain ms", "ours ms", "plain / ours", "all prompts", "exact %", "approx %", "same answer"]
    count = len(tried[0].pairing.ours)
    table = report.table(
        f"Time to the first token of {count} prompts",
        columns,
        dtype=tried[0].dtype or options.dtype,
        model=options.model,
    )
    for one in tried:
        pairing = one.pairing
        same, asked = pairing.same_answers()
        sides: list[Any] = [Spread.of([r["ttft_ms"] for r in side]).text(0) for side in (pairing.theirs, pairing.ours)]
        shares = [f"{100 * pairing.share(name):.0f}" for name in ("exact", "approximate")]
        ratio = Spread.of(pairing.ratio()).text()
        table.add(one.quality, *sides, ratio, f"{one.gain:.2f}", *shares, f"{same} of {asked}")
    table.notes.append(
        "Median [lowest highest]; ratios prompt by prompt. all prompts: the sum of plain's times by the sum of ours. "
        "An answer is the same if plain Transformers gives the same greedy tokens; rounding alone may change one."
    )
    return report
