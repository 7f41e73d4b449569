"""What moved chunks do to answers of one model, measured on the user's own prompts: a small JSON file.

Made by :meth:`kvboost.KVBoost.calibrate`, taken by an engine as its ``calibration``. No torch: it is plain data
and one choice, the smallest ratio that is shown to keep within a tolerated share of differing answers.
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

_FEWEST = 10  # comparisons below this say nothing
_FORMAT = 3
_CONFIDENCE = 0.9  # that a ratio's true share is at most what it is judged by


@dataclass(frozen=True)
class Comparisons:
    """Full reading and moved reuse at one ratio, prompt by prompt."""

    differing: list[bool] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class CalibrationRow:
    """What one ratio gave."""

    ratio: float
    compared: int
    """Prompts."""
    differing: int
    """Of them, those whose first tokens differed."""
    agreement: float
    """Share of single tokens that agreed."""
    typical_estimate: float | None
    """The error estimate that 95 % of the prompts stayed below."""

    @property
    def largest_share(self) -> float:
        """Answers differ at most this often: the upper end of the exact (Clopper-Pearson) 90 % bound."""
        low, high = self.differing / self.compared, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            if _at_most(self.differing, self.compared, share=middle) > 1.0 - _CONFIDENCE:
                low = middle
            else:
                high = middle
        return high


@dataclass(frozen=True)
class Calibration:
    """How moved chunks fare with one model, by the share of rows computed again."""

    weights: str
    """Digest of the model's weights; another model refuses this calibration."""
    conditions: str
    """Under which it was measured: codec and chunks. Engines with others refuse it."""
    strategy: str
    rows: tuple[CalibrationRow, ...]
    """Smallest ratio first."""

    def choose(self, tolerated: float) -> CalibrationRow | None:
        """The smallest ratio shown to change at most this share of answers; None if none is.

        Judged by the bound and not by what was counted: with few prompts a ratio passes by luck. For the same reason
        every larger ratio must pass as well.
        """
        chosen = None
        for row in reversed(self.rows):
            if row.largest_share > tolerated:
                break
            chosen = row
        return chosen

    @property
    def best_share(self) -> float:
        """The smallest share that any ratio is shown to keep within."""
        return min(row.largest_share for row in self.rows)

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
                raise ValueError("no ratio was measured")
            return cls(**content, rows=rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file} holds no calibration ({error!r}); make one with `kvboost calibrate MODEL --prompts FILE`"
            ) from error


def conclude(outcomes: Mapping[float, Comparisons], *, weights: str, conditions: str, strategy: str) -> Calibration:
    """What was counted, as a calibration."""
    compared = min(len(outcome.differing) for outcome in outcomes.values())
    if compared < _FEWEST:
        raise ConfigError(
            f"only {compared} of the prompts hold text that an earlier one had elsewhere; give at least {_FEWEST} such "
            "prompts, in the order and with the repetitions of your real traffic"
        )
    rows = tuple(
        CalibrationRow(
            ratio=ratio,
            compared=len(outcome.differing),
            differing=sum(outcome.differing),
            agreement=sum(outcome.agreement) / len(outcome.agreement),
            typical_estimate=_percentile(outcome.estimates, 0.95),
        )
        for ratio, outcome in sorted(outcomes.items())
    )
    return Calibration(weights=weights, conditions=conditions, strategy=strategy, rows=rows)


def _at_most(count: int, tries: int, *, share: float) -> float:
    """The probability of ``count`` or fewer in ``tries``, each with this share."""
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
