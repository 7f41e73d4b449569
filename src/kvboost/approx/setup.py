"""Builds an engine's non-prefix reuse from its settings, after testing what the model supports.

Called only by the engine's assembly. Without this package an engine has exact reuse only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvboost.approx.calibration import Calibration
from kvboost.approx.find import ApproxReuse, probe_approx
from kvboost.approx.guard import ReuseGuard
from kvboost.approx.levels import Repair, choose_repairs, must_be_earned, tolerated_share
from kvboost.approx.shadow import FIRST_TOKENS
from kvboost.approx.trust import EarnedTrust, TrustFile
from kvboost.config import EngineConfig
from kvboost.core.identity import PromptKeys
from kvboost.core.non_prefix import NoApprox, NonPrefixReuse
from kvboost.core.prefiller import Prefiller
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.hf.cache import KVLayout
from kvboost.hf.runner import ModelRunner


def check_approx_settings(config: EngineConfig) -> None:
    """Raise ConfigError for settings that cannot work with any model."""
    choose_repairs(config, Calibration.load(config.calibration) if config.calibration is not None else None)


@dataclass(frozen=True)
class ApproxSettings:
    """How repositioned chunks are repaired."""

    repairs: tuple[Repair, ...]
    """In the order they are tried; none if non-prefix reuse is off."""
    refusal: str | None = None
    """Why it is off although the settings allow it."""
    earned: bool = True
    """Whether it may be used at once."""
    trust_dir: Path | None = None
    """Where what it has earned is kept for the next process."""

    @property
    def recomputed_share(self) -> float:
        """The share of repositioned tokens that is recomputed."""
        return self.repairs[0].ratio if self.repairs else 0.0

    def reuse(self, prefiller: Prefiller, runner: ModelRunner, layout: KVLayout, *, force: bool) -> NonPrefixReuse:
        """Non-prefix reuse over the store of ``prefiller``; a NoApprox with the reason if there is none."""
        if not self.repairs:
            return NoApprox(self.refusal)
        try:
            model = probe_approx(runner, layout, prefiller.codec, self.repairs)
        except UnsupportedModelError as error:
            return NoApprox(str(error))
        except Exception as error:  # noqa: BLE001 - exact reuse works and continues, whatever fails here
            return NoApprox(f"testing whether this model's keys can be repositioned failed: {error!r}")
        guard = ReuseGuard(self.repairs[0].tolerated_share) if self.earned else self._trust(prefiller.keys)
        return ApproxReuse(
            prefiller.store, model=model, repairs=self.repairs, guard=guard, costs=prefiller.costs, force=force
        )

    def _trust(self, keys: PromptKeys) -> EarnedTrust:
        share, names = self.repairs[0].tolerated_share, [str(one) for one in self.repairs]
        exactly = [f"{one.strategy!r}:{one.ratio!r}:{one.tolerated_error!r}" for one in self.repairs]

        def identity() -> str:
            fields = keys.snapshot().model.fields
            model = [fields[name] for name in ("weights", "config", "rope", "dtype", "attention")]
            return "|".join([*model, keys.conditions, str(share), str(FIRST_TOKENS), *exactly])

        keeper = TrustFile(self.trust_dir, identity=identity) if self.trust_dir is not None else None
        return EarnedTrust(share, repairs=names, keeper=keeper)


def approx_settings(config: EngineConfig, *, weights: str, family: str, conditions: str) -> ApproxSettings:
    """The settings for a model with these weights, ``model_type``, codec and chunking."""
    if config.calibration is None:
        directory = Path(config.disk_cache_dir).expanduser() / "trust" if config.disk_cache_dir is not None else None
        repairs = choose_repairs(config, family=family)
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
    if repairs or config.quality == "exact":
        return ApproxSettings(repairs)
    return ApproxSettings(
        (),
        f"the calibration shows no repair that changes at most {tolerated_share(config):.3g} of the answers "
        f"(the best is {calibration.best_share:.3g})",
    )
