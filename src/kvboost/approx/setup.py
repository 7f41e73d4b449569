"""The repairs for each ``quality`` a user can choose, and an engine's non-prefix reuse with them.

Called by :mod:`kvboost.engine.optional`, after testing what the model supports. Without this package an engine has
exact reuse only. The figures of the levels are in docs/results/recompute.md and yardstick.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from kvboost.approx.calibration import Calibration
from kvboost.approx.find import ApproxReuse, probe_approx
from kvboost.approx.guard import ReuseGuard
from kvboost.approx.select import Repair, make_strategy
from kvboost.approx.shadow import FIRST_TOKENS
from kvboost.approx.trust import TrustFile
from kvboost.config import EngineConfig
from kvboost.core.keys import PromptKeys
from kvboost.core.non_prefix import NonPrefixReuse
from kvboost.core.prefill import Prefiller
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.extend import RepairStrategy
from kvboost.hf.cache import KVLayout
from kvboost.hf.runner import ModelRunner

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


def check_approx_settings(config: EngineConfig) -> None:
    """Raise ConfigError for settings that cannot work with any model."""
    choose_repairs(config, Calibration.load(config.calibration) if config.calibration is not None else None)


@dataclass(frozen=True)
class ApproxSettings:
    """How repositioned chunks are repaired."""

    repairs: tuple[Repair, ...]
    """In the order they are tried; at least one."""
    earned: bool = True
    """Whether it may be used at once."""
    trust_dir: Path | None = None
    """Where what it has earned is kept for the next process."""

    @property
    def recomputed_share(self) -> float:
        """The share of repositioned tokens that is recomputed."""
        return self.repairs[0].ratio

    def reuse(self, prefiller: Prefiller, runner: ModelRunner, layout: KVLayout, *, force: bool) -> NonPrefixReuse:
        """Non-prefix reuse over the store of ``prefiller``; one that finds nothing, and says why, if there is none."""
        try:
            model = probe_approx(runner, layout, prefiller.codec, self.repairs)
        except UnsupportedModelError as error:
            return NonPrefixReuse(str(error))
        except Exception as error:  # noqa: BLE001 - exact reuse works and continues, whatever fails here
            return NonPrefixReuse(f"testing whether this model's keys can be repositioned failed: {error!r}")
        guard = ReuseGuard(self.repairs[0].tolerated_share) if self.earned else self._trust(prefiller.keys)
        return ApproxReuse(
            prefiller.store, model=model, repairs=self.repairs, guard=guard, costs=prefiller.costs, force=force
        )

    def _trust(self, keys: PromptKeys) -> ReuseGuard:
        share, names = self.repairs[0].tolerated_share, [str(one) for one in self.repairs]
        exactly = [f"{one.strategy!r}:{one.ratio!r}:{one.tolerated_error!r}" for one in self.repairs]

        def identity() -> str:
            fields = keys.snapshot().model.fields
            model = [fields[name] for name in ("weights", "config", "rope", "dtype", "attention")]
            return "|".join([*model, keys.conditions, str(share), str(FIRST_TOKENS), *exactly])

        keeper = TrustFile(self.trust_dir, identity=identity) if self.trust_dir is not None else None
        return ReuseGuard(share, repairs=names, earn=True, keeper=keeper)


def approx_settings(
    config: EngineConfig, *, weights: str, family: str, conditions: str
) -> ApproxSettings | NonPrefixReuse:
    """The settings for a model with these weights, ``model_type``, codec and chunking; off is what finds none."""
    if config.calibration is None:
        directory = Path(config.disk_cache_dir).expanduser() / "trust" if config.disk_cache_dir is not None else None
        repairs = choose_repairs(config, family=family)
        if not repairs:
            return NonPrefixReuse()
        return ApproxSettings(repairs, earned=not must_be_earned(config), trust_dir=directory)
    calibration = Calibration.load(config.calibration)
    if calibration.weights != weights:
        raise ConfigError(
            f"calibration={str(config.calibration)!r} was made with another model's weights; "
            "run `kvboost calibrate` for this one, or leave calibration out"
        )
    if calibration.conditions != conditions:
        raise ConfigError(
            f"calibration={str(config.calibration)!r} was made for {calibration.conditions!r}, and these settings are "
            f"{conditions!r}; calibrate again with them, or leave calibration out"
        )
    repairs = choose_repairs(config, calibration, family=family)
    if repairs:
        return ApproxSettings(repairs)
    if config.quality == "exact":
        return NonPrefixReuse()
    return NonPrefixReuse(
        f"the calibration shows no repair that changes at most {tolerated_share(config):.3g} of the answers "
        f"(the best is {calibration.best_share:.3g})",
    )
