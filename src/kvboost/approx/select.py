"""Strategies that select which positions of repositioned chunks are recomputed, and a repair with one of them.

Called while a prompt is repaired. A strategy is a dataclass with one method. A repositioned chunk's KV was computed
behind other text: recomputing every position makes it exact, recomputing a few nearly so. Invariant: a choice depends
only on the given situation, so the same request recomputes the same positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.errors import ConfigError
from kvboost.extend import RepairSituation, RepairStrategy

_NO_LAYERS = range(0)
_MANY_LAYERS = 1000  # of a model that is not known where a repair is named


def _highest(score: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` highest scores, ascending."""
    return score.topk(min(count, len(score))).indices.sort().values


@dataclass(frozen=True)
class Nothing:
    """Recompute nothing: keys are only re-rotated."""

    name = "none"
    spreads = False

    def attention_layers(self, layer_count: int) -> range:
        """None needed."""
        return _NO_LAYERS

    def decision_layers(self, layer_count: int) -> Sequence[int]:
        """Once, before anything is computed."""
        return (0,)

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """No positions."""
        return situation.positions[:0]


@dataclass(frozen=True)
class Even(Nothing):
    """Positions at even distances, whatever the model: it trusts no attention over stale keys."""

    name = "even"

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The first of every few, as many as the budget has."""
        count = len(situation.positions)
        budget = min(situation.budget, count)
        return torch.arange(budget) * count // max(1, budget)


@dataclass(frozen=True)
class CacheBlend(Nothing):
    """The positions whose values changed most in an early layer, which all of them run through."""

    name = "cacheblend"
    layer: int = 1

    def decision_layers(self, layer_count: int) -> Sequence[int]:
        """Right behind the layer that is watched."""
        return (min(self.layer + 1, layer_count - 1),)

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The positions that changed most."""
        if situation.value_change is None:  # a model of one layer, whose KV depends on no other position
            return super().choose(situation)
        return _highest(situation.value_change, situation.budget)


@dataclass(frozen=True)
class Auto(Nothing):
    """Positions with the most suffix attention plus a sparse even sample; their change is spread to neighbours.

    The default for Llamas and Gemma 3. Measured against the others in docs/results/recompute.md and yardstick.md.
    """

    name = "auto"
    spreads = True
    every: int = 20
    """The even sample takes one position in this many, within the budget. It shows the common change."""
    neighbours: int = 3
    """Attention is averaged over this many positions: one recomputed among stale ones helps little."""

    def attention_layers(self, layer_count: int) -> range:
        """The middle third, at least one."""
        first = layer_count // 3
        return range(first, max(first + 1, layer_count * 2 // 3))

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The even sample first, then the positions with the most attention."""
        assert situation.attention is not None
        attention = _smoothed(situation.attention, self.neighbours)
        # At most half the budget.
        stride = max(self.every, -(-len(attention) // max(1, situation.budget // 2)))
        sample = torch.arange(len(attention)) % stride == 0
        return _highest(attention + sample * (attention.max() + 1.0), situation.budget)


def _smoothed(values: torch.Tensor, width: int) -> torch.Tensor:
    """Each value averaged with its neighbours, [positions]."""
    padded = torch.nn.functional.avg_pool1d(
        values.view(1, 1, -1), width, stride=1, padding=width // 2, count_include_pad=False
    )
    return padded.flatten()


_LEFT = "this one is in benchmarks/common/strategies.py of the repository now: copy its class, and give an object of it"
STRATEGIES: dict[str, RepairStrategy] = {s.name: s for s in (Nothing(), Even(), CacheBlend(), Auto())}


def make_strategy(strategy: Any) -> RepairStrategy:
    """The strategy with this name, or ``strategy`` itself if it already is one."""
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            left = f"; {_LEFT}" if strategy in ("first", "query", "selective") else ""
            raise ConfigError(f"recompute_strategy={strategy!r} is not known; use one of {sorted(STRATEGIES)}{left}")
        return STRATEGIES[strategy]
    if isinstance(strategy, type):
        raise ConfigError(f"recompute_strategy is a class; give an object of it: {strategy.__name__}()")
    if not isinstance(strategy, RepairStrategy):
        members = ("name", "spreads", "attention_layers", "decision_layers", "choose")
        missing = [name for name in members if not hasattr(strategy, name)]
        kind = type(strategy).__name__
        raise ConfigError(f"recompute_strategy must be a name or a RepairStrategy; {kind} lacks {', '.join(missing)}")
    return strategy


@contextmanager
def naming(strategy: RepairStrategy) -> Iterator[None]:
    """Give the strategy's name to whatever it raises: it may be a user's own."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"the repair strategy {strategy.name} failed: {error!r}") from error


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
