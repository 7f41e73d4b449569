"""Repair settings for each ``quality`` a user can choose.

Called once by the engine. The figures behind the levels are in docs/results/recompute.md and yardstick.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvboost.approx.calibration import Calibration
from kvboost.approx.select import Selective, make_strategy
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.extend import RepairStrategy

_MANY_LAYERS = 1000  # of a model that is not known where a repair is named


@dataclass(frozen=True)
class Repair:
    """A strategy and the share of repositioned tokens it may recompute."""

    strategy: RepairStrategy
    ratio: float
    tolerated_error: float
    """Largest error estimate; above it more positions are recomputed."""
    tolerated_share: float
    """Largest share of answers that may differ from a full prefill's. Shadow checks enforce it, if there are any."""

    def __str__(self) -> str:
        whole = min(self.strategy.decision_layers(_MANY_LAYERS), default=0)
        more = f", and all of them in the first {whole} layers" if whole and self.ratio < 1.0 else ""
        return f"{self.strategy.name}, {self.ratio:.0%} of the positions recomputed{more}"


_STRATEGY = {"llama": "auto", "gemma3_text": "auto"}
_OTHERS = "cacheblend"
"""What helps one family helps another less: `auto` was best on SmolLM2 and Gemma 3, CacheBlend on Qwen2.5. On all three
CacheBlend was better than no repair, so families that were not measured get it. It also takes two whole layers of all
positions, and gives no error estimate: ``tolerated_error`` has no effect there."""
_RATIO = {"high": 0.5, "fast": 0.15}
# Of the error estimate: slightly above what 95 % of ordinary prompts had with 15 % recomputed, so that unusual
# requests get more.
_TOLERATED = {"high": 0.03, "fast": 0.05}
# Of answers whose first tokens may differ before shadow checks stop non-prefix reuse.
_SHARE = {"auto": 0.05, "high": 0.2, "fast": 0.5}


def choose_repairs(
    config: EngineConfig, calibration: Calibration | None = None, *, family: str | None = None
) -> tuple[Repair, ...]:
    """The repairs for these settings, this model's calibration and its family; none if non-prefix reuse is off.

    ``family`` is the ``model_type`` of its config. Only a quality that must be earned has several repairs: they are
    tried in this order, cheapest first.
    """
    if config.quality == "exact" or config.quality == 0.0:
        return ()
    if not must_be_earned(config) or config.recompute_strategy is not None or config.recompute_ratio is not None:
        repair = _choose_repair(config, calibration, family)
        return (repair,) if repair is not None else ()
    share = tolerated_share(config)
    nothing = Repair(make_strategy("none"), 0.0, math.inf, share)
    strategy = _strategy_for(family)
    return nothing, *(Repair(strategy, _RATIO[level], _TOLERATED[level], share) for level in ("fast", "high"))


def must_be_earned(config: EngineConfig) -> bool:
    """Whether non-prefix reuse stays off until checks on this engine's own requests have proven it."""
    return config.quality == "auto" and config.calibration is None


def _strategy_for(family: str | None) -> RepairStrategy:
    return make_strategy(_STRATEGY.get(family or "", _OTHERS))


def _choose_repair(config: EngineConfig, calibration: Calibration | None, family: str | None) -> Repair | None:
    if calibration is not None:
        row = calibration.choose(tolerated_share(config))
        if row is None:
            return None
        # Without an estimate to compare with, only the ratio was measured.
        tolerated = math.inf if row.typical_estimate is None else row.typical_estimate
        return Repair(make_strategy(row.strategy), row.ratio, tolerated, tolerated_share(config))
    given = config.recompute_strategy
    strategy = make_strategy(given) if given is not None else _strategy_for(family)
    if config.recompute_overlap is not None:
        if not isinstance(strategy, Selective):
            raise ConfigError(
                f'recompute_overlap belongs to recompute_strategy="selective", not to {strategy.name!r}; leave it out'
            )
        strategy = replace(strategy, overlap=config.recompute_overlap)
    level = config.quality if config.quality in _RATIO else "high"
    assert isinstance(level, str)
    ratio = config.recompute_ratio if config.recompute_ratio is not None else _RATIO[level]
    if strategy.name == "none":
        ratio = 0.0
    # An explicit ratio is never exceeded.
    tolerated = _TOLERATED[level] if config.recompute_ratio is None else math.inf
    return Repair(strategy, ratio, tolerated, tolerated_share(config))


def tolerated_share(config: EngineConfig) -> float:
    """The share of answers that may differ from a full prefill's, for this ``quality``."""
    return _SHARE.get(config.quality, 0.0) if isinstance(config.quality, str) else float(config.quality)
