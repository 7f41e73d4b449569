"""What the yardstick measures, by name: strategies, the engine's levels, and candidates that are not in the engine.

Invariant: a label names the same computation in every run, as files of samples are continued by it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.common.measure import share
from benchmarks.common.strategies import STRATEGIES
from benchmarks.internals import Even, Nothing, Repair, level_repair, repair_with
from kvboost.extend import RepairSituation, RepairStrategy

LEVELS = ("high", "fast")
NONE = "none"
_SPREAD = {"+spread": True, "-spread": False}
_WITHOUT_RATIO = {NONE: 0.0, "selective": 0.15}  # they choose their tokens without looking at it

# Of up to four variants of each passage. Those with a sample take a ratio.
PLAIN_VARIANTS = ("variants-nearest", "variants-mean")
SAMPLED_VARIANTS = ("variants-nearest", "variants-mean", "variants-fit", "variants-fit-kept", "variants-fit-passage")


@dataclass(frozen=True)
class Respread:
    """Another strategy, with the change of its positions spread to their neighbours or not."""

    inner: RepairStrategy
    spreads: bool

    @property
    def name(self) -> str:
        """The other's name and what was changed."""
        return f"{self.inner.name}{'+' if self.spreads else '-'}spread"

    def attention_layers(self, layer_count: int) -> range:
        """As the other."""
        return self.inner.attention_layers(layer_count)

    def decision_layers(self, layer_count: int) -> Sequence[int]:
        """As the other."""
        return self.inner.decision_layers(layer_count)

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """As the other."""
        return self.inner.choose(situation)


@dataclass(frozen=True)
class Noting(Even):
    """The even sample, and which positions it was."""

    seen: list[torch.Tensor] = field(default_factory=list, compare=False)

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """As the even sample."""
        chosen = super().choose(situation)
        self.seen.append(situation.positions[chosen])
        return chosen


# Every strategy at every ratio, and beside them what costs as much or less.
DEFAULT = (
    *STRATEGIES,
    "even+spread=0.15",
    "query+spread=0.15",
    "auto-spread=0.15",
    *PLAIN_VARIANTS,
    *(f"{name}=0.15" for name in SAMPLED_VARIANTS),
)


@dataclass(frozen=True)
class Setting:
    """One strategy at one share of recomputed tokens."""

    label: str
    name: str
    ratio: float

    @property
    def needs_variants(self) -> bool:
        """Whether it is about several variants of a passage."""
        return self.name in SAMPLED_VARIANTS

    def repair(self, *, family: str) -> Repair:
        """What the engine does for it; for a candidate over variants what stands below it."""
        if self.name in LEVELS:
            return level_repair(self.name, family=family)
        if self.needs_variants:
            return repair_with(Even() if self.ratio else Nothing(), self.ratio)
        return repair_with(_strategy(self.name), self.ratio)


def _strategy(name: str) -> RepairStrategy:
    for ending, spreads in _SPREAD.items():
        if name.endswith(ending):
            return Respread(STRATEGIES[name.removesuffix(ending)], spreads)
    return STRATEGIES[name]


@dataclass(frozen=True)
class Asked:
    """A name as ``--strategies`` has it: with a ratio of its own, or with every ratio of ``--ratios``."""

    name: str
    ratio: float | None


def parse_strategy(text: str) -> Asked:
    """An argparse type: ``NAME``, ``NAME=RATIO``, with ``+spread`` or ``-spread`` behind an engine strategy's name."""
    name, given, ratio = text.partition("=")
    bare = next((name.removesuffix(ending) for ending in _SPREAD if name.endswith(ending)), name)
    known = bare in STRATEGIES or (bare == name and name in (*LEVELS, *SAMPLED_VARIANTS))
    if not known:
        names = [*sorted(STRATEGIES), *LEVELS, *SAMPLED_VARIANTS]
        raise argparse.ArgumentTypeError(f"{name} is not known; use one of {', '.join(names)}")
    wanted = share(ratio) if given else None
    if name in SAMPLED_VARIANTS and wanted == 1.0:
        raise argparse.ArgumentTypeError(f"{text} leaves nothing to the variants; give a smaller share")
    return Asked(name, wanted)


def settings_of(asked: Sequence[Asked], ratios: Sequence[float]) -> list[Setting]:
    """Every strategy at its ratios, each label once, no repair first: others are compared with it."""
    found = {NONE: Setting(NONE, NONE, 0.0)}
    for one in asked:
        for ratio in [one.ratio] if one.ratio is not None else ratios:
            setting = _setting(one.name, ratio, given=one.ratio is not None)
            found.setdefault(setting.label, setting)
    return list(found.values())


def _setting(name: str, ratio: float, *, given: bool) -> Setting:
    if name in LEVELS:
        return Setting(name, name, level_repair(name).ratio)
    if name in _WITHOUT_RATIO:
        return Setting(name, name, _WITHOUT_RATIO[name])
    if name in PLAIN_VARIANTS and not given:
        return Setting(name, name, 0.0)
    if ratio == 0.0:
        return Setting(name, name, 0.0) if name in PLAIN_VARIANTS else Setting(NONE, NONE, 0.0)
    return Setting(f"{name}={ratio:g}", name, ratio)
