"""Decides which weights stay in memory and which are streamed through it, for one budget.

Called when a model is loaded, and by memory estimates. Invariant: what stays, and two buffers as large as the largest
unit that is streamed, take no more than the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from kvboost.capacity import WeightMemory
from kvboost.errors import ConfigError
from kvboost.offload.weights.link import Extent
from kvboost.offload.weights.slabs import Slab, Weight


@dataclass(frozen=True)
class Unit:
    """What is loaded at once: a decoder layer's matrices, or where two layers do not fit, a part of them."""

    index: int
    layer: int
    extent: Extent
    weights: tuple[Weight, ...]


@dataclass(frozen=True)
class WeightPlacement:
    """Which units stay and which are streamed."""

    units: tuple[Unit, ...]
    """In the order they are computed."""
    resident: frozenset[int]
    """Units that stay, by index."""
    rest_bytes: int
    """Everything outside the layers' matrices, which always stays."""
    parts_per_layer: int

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one of the two buffers."""
        return max((unit.extent.size for unit in self.streamed), default=0)

    @property
    def streamed(self) -> list[Unit]:
        """Units that are streamed through the buffers."""
        return [unit for unit in self.units if unit.index not in self.resident]

    @property
    def memory(self) -> WeightMemory:
        """Where the weights are, in bytes."""
        return WeightMemory(
            resident=self.rest_bytes + sum(self.units[index].extent.size for index in self.resident),
            buffers=min(2, len(self.streamed)) * self.buffer_bytes,
            streamed=sum(unit.extent.size for unit in self.streamed),
        )


def place_weights(rest: Slab, layers: Sequence[Slab], *, budget: int) -> WeightPlacement:
    """As few parts per layer as two buffers allow, then as many of them resident as fit."""
    groups = [_by_module(slab) for slab in layers]
    for parts in range(1, max(map(len, groups)) + 1):
        cut = [_cut(of_layer, parts) for of_layer in groups]
        units = tuple(
            Unit(index, layer, Extent(layers[layer].name, part[0].offset, part[-1].end - part[0].offset), part)
            for index, (layer, part) in enumerate((layer, part) for layer, of in enumerate(cut) for part in of)
        )
        placement = WeightPlacement(units, frozenset(), rest.size, parts)
        if placement.memory.in_memory <= budget:
            return _with_residents(placement, budget)
    raise ConfigError(
        f"weight_budget={budget / 1e6:.1f} MB is too small for this model: what is used in every step takes "
        f"{rest.size / 1e6:.1f} MB, and two of its matrices {2 * placement.buffer_bytes / 1e6:.1f} MB; "
        f"give at least {ceil(placement.memory.in_memory / 1e5) / 10:.1f} MB"
    )


def _with_residents(placement: WeightPlacement, budget: int) -> WeightPlacement:
    """As many units as fit stay, spread evenly: between two that stay, the link has time to bring the next."""
    count = len(placement.units)
    best = placement
    for wanted in range(1, count + 1):
        resident = frozenset(i * count // wanted for i in range(wanted))
        candidate = replace(placement, resident=resident)
        if candidate.memory.in_memory > budget:
            break
        best = candidate
    return best


def _by_module(slab: Slab) -> list[list[Weight]]:
    """A slab's weights, those of one module together: a module needs all of its own at once."""
    groups: list[list[Weight]] = []
    for weight in slab.weights:
        module = weight.name.rpartition(".")[0]
        if groups and groups[-1][0].name.rpartition(".")[0] == module:
            groups[-1].append(weight)
        else:
            groups.append([weight])
    return groups


def _cut(groups: Sequence[list[Weight]], parts: int) -> list[tuple[Weight, ...]]:
    """Neighbouring groups in at most ``parts`` parts, the largest as small as possible."""
    sizes = [group[-1].end - group[0].offset for group in groups]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    cut: list[tuple[Weight, ...]] = []
    begin = 0
    for length in _filled(sizes, low):
        cut.append(tuple(weight for group in groups[begin : begin + length] for weight in group))
        begin += length
    return cut


def _filled(sizes: Sequence[int], capacity: int) -> list[int]:
    """How many neighbours go into each part if none may be larger than ``capacity``."""
    lengths: list[int] = []
    free = -1
    for size in sizes:
        if size > free or not lengths:
            lengths.append(0)
            free = capacity
        lengths[-1] += 1
        free -= size
    return lengths
