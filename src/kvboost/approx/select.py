"""Ways to choose the rows of moved chunks that are computed again: a strategy is a dataclass with one method.

Called by the engine while it repairs a prompt. A moved chunk's keys and values were computed behind other
text; recomputing every row makes them right, recomputing few makes them nearly right. Invariant: choices
depend only on the situation given, so the same request repairs the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost.errors import ConfigError
from kvboost.extend import RepairSituation, RepairStrategy

_NO_LAYERS = range(0)


def _highest(score: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` highest scores, ascending."""
    return score.topk(min(count, len(score))).indices.sort().values


def _marked(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().flatten()


@dataclass(frozen=True)
class Nothing:
    """Re-rotated, otherwise as they were."""

    name = "none"
    spreads = False

    def attention_layers(self, layer_count: int) -> range:
        """None wanted."""
        return _NO_LAYERS

    def decision_layers(self, layer_count: int) -> Sequence[int]:
        """Once, before anything is computed."""
        return (0,)

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """No rows."""
        return _marked(torch.zeros_like(situation.rows, dtype=torch.bool))


@dataclass(frozen=True)
class Selective(Nothing):
    """The last tokens before each seam: what the predecessor of this package does. For comparison."""

    name = "selective"
    overlap: int = 16

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The last ``overlap`` rows of each moved stretch."""
        return _marked(situation.ends - situation.rows <= self.overlap)


@dataclass(frozen=True)
class First(Nothing):
    """The first tokens of each moved stretch, as in EPIC: they took themselves for the start of the text."""

    name = "first"

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The leading rows of each stretch, as many of each as the budget allows."""
        share = situation.budget / max(1, len(situation.rows))
        within = situation.rows - situation.starts
        return _marked(within < (situation.ends - situation.starts) * share)


@dataclass(frozen=True)
class CacheBlend(Nothing):
    """The rows whose values changed most in an early layer, which all rows pass. One forward, then fewer rows."""

    name = "cacheblend"
    layer: int = 1

    def decision_layers(self, layer_count: int) -> Sequence[int]:
        """Right behind the layer that is watched."""
        return (min(self.layer + 1, layer_count - 1),)

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The rows that changed most."""
        if situation.value_change is None:  # a model of one layer, whose keys and values depend on no other row
            return _marked(torch.zeros_like(situation.rows, dtype=torch.bool))
        return _highest(situation.value_change, situation.budget)


@dataclass(frozen=True)
class Query(Nothing):
    """The rows that the live tokens look at most in the middle layers."""

    name = "query"

    def attention_layers(self, layer_count: int) -> range:
        """The middle third, at least one."""
        first = layer_count // 3
        return range(first, max(first + 1, layer_count * 2 // 3))

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The rows with most attention."""
        assert situation.attention is not None
        return _highest(situation.attention, situation.budget)


@dataclass(frozen=True)
class Auto(Query):
    """Rows the live tokens look at and a thin even sample, with their change carried over to their neighbours.

    The default. Measured against the others in docs/results/recompute.md.
    """

    name = "auto"
    spreads = True
    every: int = 20
    """Of the budget, one row in so many of the prompt goes to the even sample, which shows the common change."""
    neighbours: int = 3
    """Attention is averaged over so many rows: a row is of little use beside wrong ones."""

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The even sample first, then the rows with most attention."""
        assert situation.attention is not None
        attention = _smoothed(situation.attention, self.neighbours)
        # Never more than half the budget, however small that is.
        apart = max(self.every, -(-len(attention) // max(1, situation.budget // 2)))
        sample = torch.arange(len(attention)) % apart == 0
        return _highest(attention + sample * (attention.max() + 1.0), situation.budget)


def _smoothed(values: torch.Tensor, width: int) -> torch.Tensor:
    """Each value averaged with its neighbours, [rows]."""
    padded = torch.nn.functional.avg_pool1d(
        values.view(1, 1, -1), width, stride=1, padding=width // 2, count_include_pad=False
    )
    return padded.flatten()


STRATEGIES: dict[str, RepairStrategy] = {
    s.name: s for s in (Nothing(), Selective(), First(), CacheBlend(), Query(), Auto())
}


def make_strategy(strategy: str | RepairStrategy) -> RepairStrategy:
    """The strategy with this name, or ``strategy`` itself if it already is one."""
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise ConfigError(f"recompute_strategy={strategy!r} is not known; use one of {sorted(STRATEGIES)}")
        return STRATEGIES[strategy]
    if not isinstance(strategy, RepairStrategy):
        raise ConfigError(f"recompute_strategy must be a name or a RepairStrategy, got {type(strategy).__name__}")
    return strategy
