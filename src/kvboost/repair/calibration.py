"""How to repair moved chunks with one model, measured on the user's own prompts: a small JSON file.

Made by :meth:`kvboost.KVBoost.calibrate`, taken by an engine as its ``calibration``. No torch: it is plain data
and one choice, the smallest ratio that keeps within the tolerated share of differing answers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvboost.errors import ConfigError

_FEWEST = 10  # comparisons below this say nothing
_FORMAT = 1


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
    differing: float
    """Share of answers whose first tokens differed."""
    agreement: float
    """Share of single tokens that agreed."""
    typical_estimate: float | None
    """The error estimate that 95 % of the prompts stayed below."""


@dataclass(frozen=True)
class Calibration:
    """How to repair moved chunks with one model."""

    weights: str
    """Digest of the model's weights; another model refuses this calibration."""
    strategy: str
    ratio: float | None
    """The smallest ratio that kept within the tolerated share; None if none did, and then nothing is moved."""
    tolerated_error: float
    tolerated_share: float
    compared: int
    measured: tuple[CalibrationRow, ...]

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
            rows = tuple(CalibrationRow(**row) for row in content.pop("measured"))
            return cls(**content, measured=rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file} holds no calibration ({error!r}); make one with `kvboost calibrate MODEL --prompts FILE`"
            ) from error


def conclude(outcomes: Mapping[float, Comparisons], *, weights: str, strategy: str, tolerated: float) -> Calibration:
    """The smallest ratio whose share of differing answers is tolerated."""
    compared = min(len(outcome.differing) for outcome in outcomes.values())
    if compared < _FEWEST:
        raise ConfigError(
            f"only {compared} of the prompts hold text that an earlier one had elsewhere; give at least {_FEWEST} such "
            "prompts, in the order and with the repetitions of your real traffic"
        )
    rows = tuple(
        CalibrationRow(
            ratio=ratio,
            differing=sum(outcome.differing) / len(outcome.differing),
            agreement=sum(outcome.agreement) / len(outcome.agreement),
            typical_estimate=_percentile(outcome.estimates, 0.95),
        )
        for ratio, outcome in sorted(outcomes.items())
    )
    # With few prompts one ratio may pass by luck: every larger one must pass as well.
    good = [row for i, row in enumerate(rows) if all(later.differing <= tolerated for later in rows[i:])]
    chosen = good[0] if good else None
    return Calibration(
        weights=weights,
        strategy=strategy,
        ratio=chosen.ratio if chosen else None,
        tolerated_error=chosen.typical_estimate if chosen and chosen.typical_estimate is not None else 1.0,
        tolerated_share=tolerated,
        compared=compared,
        measured=rows,
    )


def _percentile(values: Sequence[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None
