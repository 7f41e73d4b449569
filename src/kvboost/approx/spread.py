"""Spreads the change of recomputed positions to neighbours that were not recomputed.

Made by the engine for a repair and applied by the cache layer by layer. A new context changes neighbouring positions
in part alike. The recomputed positions show that common part. It matters most, as attention averages the rest away
(docs/decisions/0006-repair.md). Invariant: recomputed positions are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost.approx.reposition import KeyRepositioner, Rotations
from kvboost.hf.cache import SlabLayer

_WIDTH = 32.0  # positions; standard deviation of the Gaussian weights
_RADIUS = 96  # positions; three standard deviations
_NO_CHANGE_WEIGHT = 1.0  # the weight of "nothing changed": a position far from all recomputed ones stays as it is
_BLOCK = 256  # positions changed at once: bounds the weight matrix, [changed, recomputed]


@dataclass(frozen=True)
class _Block:
    """A few neighbouring positions, and the recomputed ones near them."""

    first: int
    last: int  # sources [first, last) of the spread
    weights: torch.Tensor  # [targets, last - first]


class Spread:
    """The change of some positions, spread to others."""

    def __init__(
        self, repositioner: KeyRepositioner, positions: torch.Tensor, *, span_ids: torch.Tensor, begin: int, end: int
    ) -> None:
        """``positions`` are recomputed; the other repositioned ones in ``[begin, end)`` are adjusted.

        ``span_ids`` [length] holds each position's repositioned span, -1 where there is none.
        """
        positions = positions.cpu()
        span_of = span_ids[positions]
        self._sources = (span_of >= 0).nonzero().flatten()  # indices into the positions
        recomputed = positions[self._sources]
        is_target = span_ids[begin:end] >= 0
        is_target[positions[(positions >= begin) & (positions < end)] - begin] = False
        candidates = is_target.nonzero().flatten() + begin
        self._recomputed = recomputed
        self._blocks, self._targets = _blocks(candidates, recomputed, span_ids)
        # Each recomputed position as its recomputed neighbours predict it: the quality of that prediction scales what
        # is spread to the others.
        self._neighbour_blocks, _ = _blocks(recomputed, recomputed, span_ids)
        origin = torch.zeros(1, dtype=torch.long)
        # Keys are compared as they would be at position 0: only there do neighbours change alike.
        self._to_origin: Rotations = repositioner.rotations(recomputed, origin.expand(len(recomputed)))
        self._from_origin: Rotations = repositioner.rotations(origin.expand(len(self._targets)), self._targets)

    def apply(self, layer_index: int, layer: SlabLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before the new ``keys`` and ``values`` [1, heads, positions, dim] replace the old ones."""
        if not len(self._targets):
            return
        for slot, store, states in (
            (2 * layer_index, layer.key_store, keys),
            (2 * layer_index + 1, layer.value_store, values),
        ):
            device = store.device
            old = store.index_select(2, self._recomputed.to(device)).float()
            change = states.index_select(2, self._sources.to(device)).float() - old  # [1, heads, sources, dim]
            change = _clipped_to_median(self._to_origin.apply(slot, change))
            spread = _confidence(_mixed(self._neighbour_blocks, change), change) * _mixed(self._blocks, change)
            spread = self._from_origin.apply(slot, spread)
            store.index_add_(2, self._targets.to(device), spread.to(store.dtype))


def _blocks(
    targets: torch.Tensor, recomputed: torch.Tensor, span_ids: torch.Tensor
) -> tuple[list[_Block], torch.Tensor]:
    """The targets that have recomputed positions near them, in blocks, and those targets."""
    blocks: list[_Block] = []
    reached: list[torch.Tensor] = [targets[:0]]
    for part in _span_pieces(targets, span_ids):
        low, high = int(part[0]) - _RADIUS, int(part[-1]) + _RADIUS
        inside = (recomputed >= low) & (recomputed <= high) & (span_ids[recomputed] == span_ids[part[0]])
        near = inside.nonzero().flatten()
        if len(near):
            first, last = int(near[0]), int(near[-1]) + 1  # ascending and of one span, so contiguous
            blocks.append(_Block(first, last, _weights(part, recomputed[first:last])))
            reached.append(part)
    return blocks, torch.cat(reached)


def _mixed(blocks: list[_Block], change: torch.Tensor) -> torch.Tensor:
    """The change of the sources [1, heads, sources, dim], mixed for every target."""
    parts = [block.weights.to(change.device) @ change[:, :, block.first : block.last] for block in blocks]
    return torch.cat(parts, dim=2)


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


def _weights(targets: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """How much each target follows each source, [targets, sources]. Each row sums to less than one."""
    distance = (targets.view(-1, 1) - sources).float() / _WIDTH
    weights = torch.exp(-0.5 * distance.square()) * (distance != 0.0)  # no position predicts itself
    return weights / (weights.sum(dim=1, keepdim=True) + _NO_CHANGE_WEIGHT)
