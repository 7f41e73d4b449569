"""Repair settings for each ``quality`` a user can choose.

Called once by the engine. The figures behind the levels are in docs/results/recompute.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvboost.approx.calibration import Calibration
from kvboost.approx.select import Selective, make_strategy
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.extend import RepairStrategy


@dataclass(frozen=True)
class Repair:
    """A strategy and the share of repositioned tokens it may recompute."""

    strategy: RepairStrategy
    ratio: float
    tolerated_error: float
    """Largest error estimate; above it more positions are recomputed."""
    tolerated_share: float
    """Largest share of answers that may differ from a full prefill's; shadow checks enforce it."""


_RATIO = {"high": 0.5, "fast": 0.15}
# Of the error estimate: slightly above what 95 % of ordinary prompts had with 15 % recomputed, so that unusual
# requests get more.
_TOLERATED = {"high": 0.03, "fast": 0.05}
# Of answers whose first tokens may differ before shadow checks stop non-prefix reuse.
_SHARE = {"high": 0.2, "fast": 0.5}


def choose_repair(config: EngineConfig, calibration: Calibration | None = None) -> Repair | None:
    """The repair for these settings and this model's calibration; None if non-prefix reuse is off."""
    if config.quality == "exact" or config.quality == 0.0:
        return None
    if calibration is not None:
        row = calibration.choose(tolerated_share(config))
        if row is None:
            return None
        # No estimate to compare with: only the ratio was measured.
        tolerated = math.inf if row.typical_estimate is None else row.typical_estimate
        return Repair(make_strategy(calibration.strategy), row.ratio, tolerated, tolerated_share(config))
    strategy = make_strategy(config.recompute_strategy if config.recompute_strategy is not None else "auto")
    if config.recompute_overlap is not None:
        if not isinstance(strategy, Selective):
            raise ConfigError(
                f'recompute_overlap belongs to recompute_strategy="selective", not to {strategy.name!r}; leave it out'
            )
        strategy = replace(strategy, overlap=config.recompute_overlap)
    level = config.quality if isinstance(config.quality, str) else "high"
    ratio = config.recompute_ratio if config.recompute_ratio is not None else _RATIO[level]
    if strategy.name == "none":
        ratio = 0.0
    # An explicit ratio is never exceeded.
    tolerated = _TOLERATED[level] if config.recompute_ratio is None else math.inf
    return Repair(strategy, ratio, tolerated, tolerated_share(config))


def tolerated_share(config: EngineConfig) -> float:
    """The share of answers that may differ from a full prefill's, for this ``quality``."""
    return _SHARE.get(config.quality, 0.0) if isinstance(config.quality, str) else float(config.quality)
