"""How non-prefix reuse changes the answers of one model, measured on the user's own prompts: a small JSON file.

Made by :meth:`kvboost.KVBoost.calibrate`, passed to an engine as ``calibration``. No torch: this is plain data and
one decision, the repair that recomputes least of those shown to stay within a tolerated share of differing answers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvboost.errors import ConfigError

MIN_COMPARISONS = 10  # fewer prove nothing
_FORMAT = 4
_CONFIDENCE = 0.9  # that a repair's true share is at most its bound


@dataclass(frozen=True)
class Comparisons:
    """Full prefill against non-prefix reuse with one repair, one entry per prompt."""

    differing: list[bool] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class CalibrationRow:
    """The result of one strategy at one ratio."""

    strategy: str
    ratio: float
    compared: int
    """Prompts compared."""
    differing: int
    """Prompts whose first tokens differed."""
    agreement: float
    """Share of single tokens that agreed."""
    typical_estimate: float | None
    """The error estimate that 95 % of the prompts stayed below."""

    def largest_share(self, confidence: float) -> float:
        """Upper confidence bound (Clopper-Pearson) of the share of differing answers."""
        low, high = self.differing / self.compared, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            if _binomial_cdf(self.differing, self.compared, share=middle) > 1.0 - confidence:
                low = middle
            else:
                high = middle
        return high


@dataclass(frozen=True)
class Calibration:
    """How non-prefix reuse changes one model's answers, by strategy and share of recomputed positions."""

    weights: str
    """Digest of the model's weights; another model refuses this calibration."""
    conditions: str
    """Codec and chunking it was measured with. Engines with others refuse it."""
    rows: tuple[CalibrationRow, ...]
    """Strategy by strategy, cheapest first; of each the smallest ratio first."""

    def choose(self, tolerated: float) -> CalibrationRow | None:
        """The repair that recomputes least of those shown to change at most this share of answers; None if none is.

        The bound decides, not the count: with few prompts a repair may pass by luck. For the same reason every larger
        ratio of its strategy must pass as well, and the more strategies were tried, the surer each bound must be.
        """
        found = []
        for strategy in self._strategies:
            chosen = None
            for row in reversed([row for row in self.rows if row.strategy == strategy]):
                if row.largest_share(self.confidence) > tolerated:
                    break
                chosen = row
            if chosen is not None:
                found.append(chosen)
        return min(found, key=lambda row: row.ratio, default=None)

    @property
    def _strategies(self) -> list[str]:
        return list(dict.fromkeys(row.strategy for row in self.rows))

    @property
    def confidence(self) -> float:
        """How sure each bound must be, so that with :data:`_CONFIDENCE` none of the strategies passes by luck."""
        return 1.0 - (1.0 - _CONFIDENCE) / len(self._strategies)

    @property
    def best_share(self) -> float:
        """The smallest share that any repair is shown to stay within."""
        return min(row.largest_share(self.confidence) for row in self.rows)

    def prompts_needed(self, tolerated: float) -> int:
        """How many prompts without a difference show that a repair changes at most this share of answers."""
        return math.ceil(math.log(1.0 - self.confidence) / math.log1p(-tolerated))

    def save(self, file: str | Path) -> None:
        """Write it as JSON."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        Path(file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: str | Path) -> Calibration:
        """Read what :meth:`save` wrote."""
        try:
            content: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
            if content.pop("format") != _FORMAT:
                raise ConfigError(f"{file} was written by another version; run `kvboost calibrate` again")
            rows = tuple(CalibrationRow(**row) for row in content.pop("rows"))
            if not rows or not all(0 <= row.differing <= row.compared and row.compared for row in rows):
                raise ValueError("nothing was measured")
            return cls(**content, rows=rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file} holds no calibration ({error!r}); make one with `kvboost calibrate MODEL --prompts FILE`"
            ) from error


def conclude(outcomes: Mapping[tuple[str, float], Comparisons], *, weights: str, conditions: str) -> Calibration:
    """Summarize the comparisons, by strategy and ratio in the order of their cost, as a calibration."""
    compared = min(len(outcome.differing) for outcome in outcomes.values())
    if compared < MIN_COMPARISONS:
        raise ConfigError(
            f"{compared or 'none'} of the prompts repeat text of an earlier prompt at another position; give at least "
            f"{MIN_COMPARISONS} such prompts, in the order and with the repetitions of your real traffic"
        )
    rows = tuple(
        CalibrationRow(
            strategy=strategy,
            ratio=ratio,
            compared=len(outcome.differing),
            differing=sum(outcome.differing),
            agreement=sum(outcome.agreement) / len(outcome.agreement),
            typical_estimate=_percentile(outcome.estimates, 0.95),
        )
        for (strategy, ratio), outcome in outcomes.items()
    )
    return Calibration(weights=weights, conditions=conditions, rows=rows)


def _binomial_cdf(count: int, tries: int, *, share: float) -> float:
    """The probability of at most ``count`` successes in ``tries``, each with probability ``share``."""
    if share >= 1.0:
        return float(count >= tries)
    return sum(
        math.exp(
            math.lgamma(tries + 1)
            - math.lgamma(hit + 1)
            - math.lgamma(tries - hit + 1)
            + (hit * math.log(share) if hit else 0.0)
            + (tries - hit) * math.log1p(-share)
        )
        for hit in range(count + 1)
    )


def _percentile(values: Sequence[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None
