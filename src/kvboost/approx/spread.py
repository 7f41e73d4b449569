"""Spreads the change of recomputed positions to neighbours that were not recomputed.

Made by the engine for a repair and applied by the cache layer by layer. A new context changes neighbouring positions
in part alike. The recomputed positions show that common part. It matters most, as attention averages the rest away
(docs/decisions/0006-repair.md). Invariant: recomputed positions are left alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvboost.approx.reposition import KeyRepositioner, Rotations
from kvboost.hf.cache_layers import SlabLayer

_WIDTH = 32.0  # positions; standard deviation of the Gaussian weights
_RADIUS = 96  # positions; three standard deviations
_NO_CHANGE_WEIGHT = 1.0  # the weight of "nothing changed": a position far from all recomputed ones stays as it is
_BLOCK = 256  # positions changed at once: bounds the weight matrix, [changed, recomputed]


class _Block(NamedTuple):
    """A few neighbouring positions of one span, and which of the recomputed ones are near them."""

    targets: torch.Tensor
    first: int
    last: int  # recomputed positions [first, last)


class _Mixture(NamedTuple):
    """What every target takes from the sources near it, for all blocks in one call. Tensors are on one device."""

    sources: torch.Tensor  # [blocks * width] indices into the sources, padded
    weights: torch.Tensor  # [blocks, height, width], zero where padded
    targets: torch.Tensor  # [targets] indices into the blocks' results, [blocks * height]

    def of(self, change: torch.Tensor) -> torch.Tensor:
        """The change of the sources [1, heads, sources, dim], mixed for every target."""
        _, heads, _, dim = change.shape
        rows = change[0].transpose(0, 1).flatten(1)  # [sources, heads * dim]
        near = rows.index_select(0, self.sources).view(len(self.weights), -1, heads * dim)
        mixed = torch.bmm(self.weights, near).flatten(0, 1).index_select(0, self.targets)
        return mixed.view(1, -1, heads, dim).transpose(1, 2)


class _OnDevice(NamedTuple):
    """What a layer on one device needs. Positions and indices."""

    sources: torch.Tensor  # indices into the positions of the pass
    recomputed: torch.Tensor
    targets: torch.Tensor
    mixture: _Mixture
    neighbours: _Mixture


class Spread:
    """The change of some positions, spread to others."""

    def __init__(
        self, repositioner: KeyRepositioner, positions: torch.Tensor, *, span_ids: torch.Tensor, begin: int, end: int
    ) -> None:
        """``positions`` are recomputed; the other repositioned ones in ``[begin, end)`` are adjusted.

        ``span_ids`` [length] holds each position's repositioned span, -1 where there is none. Both are on the CPU.
        """
        span_of = span_ids[positions]
        self._sources = (span_of >= 0).nonzero().flatten()  # indices into the positions
        recomputed = positions[self._sources]
        is_target = span_ids[begin:end] >= 0
        is_target[positions[(positions >= begin) & (positions < end)] - begin] = False
        candidates = is_target.nonzero().flatten() + begin
        self._recomputed = recomputed
        self._blocks = _blocks(candidates, recomputed, span_ids)
        self._targets = torch.cat([candidates[:0], *(block.targets for block in self._blocks)])
        # Each recomputed position as its recomputed neighbours predict it: the quality of that prediction scales what
        # is spread to the others.
        self._neighbour_blocks = _blocks(recomputed, recomputed, span_ids)
        origin = torch.zeros(1, dtype=torch.long)
        # Keys are compared as they would be at position 0: only there do neighbours change alike.
        self._to_origin: Rotations = repositioner.rotations(recomputed, origin.expand(len(recomputed)))
        self._from_origin: Rotations = repositioner.rotations(origin.expand(len(self._targets)), self._targets)
        self._devices: dict[torch.device, _OnDevice] = {}

    def apply(self, layer_index: int, layer: SlabLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before the new ``keys`` and ``values`` [1, heads, positions, dim] replace the old ones."""
        if not len(self._targets):
            return
        if layer.device not in self._devices:
            self._devices[layer.device] = self._on(layer.device)
        on = self._devices[layer.device]
        for slot, store, states in (
            (2 * layer_index, layer.key_store, keys),
            (2 * layer_index + 1, layer.value_store, values),
        ):
            old = store.index_select(2, on.recomputed).float()
            change = states.index_select(2, on.sources).float() - old  # [1, heads, sources, dim]
            change = _clipped_to_median(self._to_origin.apply(slot, change))
            spread = _confidence(on.neighbours.of(change), change) * on.mixture.of(change)
            spread = self._from_origin.apply(slot, spread)
            store.index_add_(2, on.targets, spread.to(store.dtype))

    def _on(self, device: torch.device) -> _OnDevice:
        """Everything that layers on ``device`` need, in one copy."""
        plain = [self._sources, self._recomputed, self._targets]
        padded = [*_padded(self._blocks, self._recomputed), *_padded(self._neighbour_blocks, self._recomputed)]
        joined = torch.cat([part.flatten() for part in (*plain, *padded)]).to(device)
        parts = torch.split(joined, [part.numel() for part in (*plain, *padded)])
        sources, recomputed, targets, *rest = (
            part.view(like.shape) for part, like in zip(parts, (*plain, *padded), strict=True)
        )
        return _OnDevice(sources, recomputed, targets, _mixture(*rest[:4]), _mixture(*rest[4:]))


def _blocks(targets: torch.Tensor, recomputed: torch.Tensor, span_ids: torch.Tensor) -> list[_Block]:
    """The targets that have recomputed positions near them, in blocks."""
    blocks: list[_Block] = []
    for part in _span_pieces(targets, span_ids):
        low, high = int(part[0]) - _RADIUS, int(part[-1]) + _RADIUS
        inside = (recomputed >= low) & (recomputed <= high) & (span_ids[recomputed] == span_ids[part[0]])
        near = inside.nonzero().flatten()
        if len(near):
            # Ascending and of one span, so contiguous.
            blocks.append(_Block(part, int(near[0]), int(near[-1]) + 1))
    return blocks


def _padded(blocks: list[_Block], recomputed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For all blocks, padded to the largest: positions of the targets [blocks, height], sources [blocks, width] (-1
    where padded), positions of the sources, and where each target is found: [targets].
    """
    height = max(len(block.targets) for block in blocks)
    width = max(block.last - block.first for block in blocks)
    targets = torch.zeros(len(blocks), height, dtype=torch.long)
    sources = torch.full((len(blocks), width), -1)
    for index, (block, first, last) in enumerate(blocks):
        targets[index, : len(block)] = block
        sources[index, : last - first] = torch.arange(first, last)
    found = [torch.arange(len(block.targets)) + index * height for index, block in enumerate(blocks)]
    return targets, sources, recomputed[sources], torch.cat(found)


def _mixture(
    targets: torch.Tensor, sources: torch.Tensor, source_positions: torch.Tensor, found: torch.Tensor
) -> _Mixture:
    """The mixture of blocks as :func:`_padded` gives them, on their device."""
    distance = (targets.unsqueeze(2) - source_positions.unsqueeze(1)).float() / _WIDTH
    counts = (distance != 0.0) & (sources >= 0).unsqueeze(1)  # no position predicts itself
    weights = torch.exp(-0.5 * distance.square()) * counts
    # Each row sums to less than one.
    weights = weights / (weights.sum(dim=2, keepdim=True) + _NO_CHANGE_WEIGHT)
    return _Mixture(sources.clamp_min(0).flatten(), weights, found)


def _clipped_to_median(change: torch.Tensor) -> torch.Tensor:
    """Changes [1, heads, sources, dim], none larger than the head's median.

    A token that was an attention sink at its old position, and is none here, changes far more than others. That says
    nothing about its neighbours.
    """
    size = change.square().sum(dim=3, keepdim=True).sqrt()  # [1, heads, sources, 1]
    median = size.median(dim=2, keepdim=True).values
    return change * (median / size.clamp_min(1e-12)).clamp(max=1.0)


def _confidence(predicted: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """How well neighbours predict each other's change: 0 not at all, 1 fully."""
    size = predicted.square().sum()
    return ((predicted * change).sum() / size.clamp_min(1e-12)).clamp(0.0, 1.0)


def _span_pieces(positions: torch.Tensor, span_ids: torch.Tensor) -> list[torch.Tensor]:
    """Ascending ``positions`` in pieces of one span each and of bounded length."""
    span = span_ids[positions]
    edges = (span[1:] != span[:-1]).nonzero().flatten() + 1
    return [
        piece
        for whole in torch.tensor_split(positions, edges.tolist())
        for piece in torch.split(whole, _BLOCK)
        if len(piece)
    ]
