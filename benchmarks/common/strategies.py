"""Strategies that others published or that were tried, beside the engine's: measured, but none of them was best.

Used by the benchmarks of repairs. They are not in the wheel: copy a class, and give an object of it, as in
``recompute_strategy=First()``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.internals import ENGINE_STRATEGIES, Auto, Nothing
from kvboost.extend import RepairSituation, RepairStrategy


@dataclass(frozen=True)
class Selective(Nothing):
    """The last tokens before each boundary, as the predecessor of this package does."""

    name = "selective"
    overlap: int = 16

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The last ``overlap`` positions of each span."""
        return (situation.span_ends - situation.positions <= self.overlap).nonzero().flatten()


@dataclass(frozen=True)
class First(Nothing):
    """The first tokens of each span, as in EPIC: they were computed as the start of a text."""

    name = "first"

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The leading positions of each span, the same share of each, within the budget."""
        share = situation.budget / max(1, len(situation.positions))
        within = situation.positions - situation.span_starts
        return (within < (situation.span_ends - situation.span_starts) * share).nonzero().flatten()


@dataclass(frozen=True)
class Query(Nothing):
    """The positions with the most attention from the suffix tokens in the middle layers."""

    name = "query"

    def attention_layers(self, layer_count: int) -> range:
        """As ``auto``."""
        return Auto().attention_layers(layer_count)

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The positions with the most attention."""
        assert situation.attention is not None
        return situation.attention.topk(min(situation.budget, len(situation.attention))).indices.sort().values


_OTHERS: dict[str, RepairStrategy] = {one.name: one for one in (Selective(), First(), Query())}
_ORDER = ("none", "selective", "first", "even", "cacheblend", "query", "auto")
STRATEGIES: dict[str, RepairStrategy] = {name: {**ENGINE_STRATEGIES, **_OTHERS}[name] for name in _ORDER}
"""All of them, cheapest first."""
