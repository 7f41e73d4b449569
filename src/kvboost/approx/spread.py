"""Carries what recomputed rows changed over to their neighbours that were not computed again.

Made by the engine for a repair and applied by the cache layer by layer. A new context changes neighbouring
rows in part alike; the rows that are computed again show that part, and it matters most, as attention
averages the rest away (docs/decisions/0006-repair.md). Invariant: rows computed again are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost.approx.reposition import KeyRepositioner, Rotations
from kvboost.hf.cache import SlabLayer

_WIDTH = 32.0  # rows; how far a change is taken to reach, as the deviation of a Gaussian
_REACH = 96  # rows; beyond three deviations nothing is left
_DOUBT = 1.0  # the weight of "nothing changed", so that a row far from all others stays as it is
_BLOCK = 256  # rows changed at once: bounds the weights, which have changed x computed entries


@dataclass(frozen=True)
class _Block:
    """A few neighbouring rows, and the computed ones near them."""

    first: int
    last: int  # sources [first, last) of the spread
    weights: torch.Tensor  # [targets, last - first]


class Spread:
    """The change of some rows, spread over others."""

    def __init__(
        self, mover: KeyRepositioner, rows: torch.Tensor, *, stretches: torch.Tensor, begin: int, end: int
    ) -> None:
        """``rows`` are computed again; those of ``[begin, end)`` that were moved and are not computed change along.

        ``stretches`` [length] numbers each row's moved stretch, -1 where a row was not moved.
        """
        rows = rows.cpu()
        stretch_of = stretches[rows]
        self._sources = (stretch_of >= 0).nonzero().flatten()  # indices into the rows
        computed = rows[self._sources]
        waiting = stretches[begin:end] >= 0
        waiting[rows[(rows >= begin) & (rows < end)] - begin] = False
        candidates = waiting.nonzero().flatten() + begin
        self._computed = computed
        self._blocks, self._targets = _blocks(candidates, computed, stretches)
        # Each computed row as its computed neighbours would have guessed it: how well that goes decides how far
        # the others are trusted with it.
        self._guesses, _ = _blocks(computed, computed, stretches)
        origin = torch.zeros(1, dtype=torch.long)
        # Keys are compared as they would be at position 0: only there do neighbours change alike.
        self._to_origin: Rotations = mover.turns(computed, origin.expand(len(computed)))
        self._from_origin: Rotations = mover.turns(origin.expand(len(self._targets)), self._targets)

    def apply(self, layer_index: int, layer: SlabLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before the new ``keys`` and ``values`` [1, heads, rows, dim] are written over the old ones."""
        if not len(self._targets):
            return
        for slot, store, states in (
            (2 * layer_index, layer.key_store, keys),
            (2 * layer_index + 1, layer.value_store, values),
        ):
            device = store.device
            old = store.index_select(2, self._computed.to(device)).float()
            change = states.index_select(2, self._sources.to(device)).float() - old  # [1, heads, sources, dim]
            change = _of_usual_size(self._to_origin.apply(slot, change))
            spread = _trust(_mixed(self._guesses, change), change) * _mixed(self._blocks, change)
            spread = self._from_origin.apply(slot, spread)
            store.index_add_(2, self._targets.to(device), spread.to(store.dtype))


def _blocks(
    targets: torch.Tensor, computed: torch.Tensor, stretches: torch.Tensor
) -> tuple[list[_Block], torch.Tensor]:
    """The targets that have computed rows near them, in blocks, and those targets."""
    blocks: list[_Block] = []
    reached: list[torch.Tensor] = [targets[:0]]
    for part in _neighbourhoods(targets, stretches):
        low, high = int(part[0]) - _REACH, int(part[-1]) + _REACH
        inside = (computed >= low) & (computed <= high) & (stretches[computed] == stretches[part[0]])
        near = inside.nonzero().flatten()
        if len(near):
            first, last = int(near[0]), int(near[-1]) + 1  # ascending and of one stretch, so side by side
            blocks.append(_Block(first, last, _weights(part, computed[first:last])))
            reached.append(part)
    return blocks, torch.cat(reached)


def _mixed(blocks: list[_Block], change: torch.Tensor) -> torch.Tensor:
    """The change of the sources [1, heads, sources, dim], mixed for every target."""
    parts = [block.weights.to(change.device) @ change[:, :, block.first : block.last] for block in blocks]
    return torch.cat(parts, dim=2)


def _of_usual_size(change: torch.Tensor) -> torch.Tensor:
    """Changes [1, heads, sources, dim], none larger than the head's median.

    A token that was an attention sink where it stood, and is none here, changes beyond all measure; that says
    nothing about its neighbours.
    """
    size = change.square().sum(dim=3, keepdim=True).sqrt()  # [1, heads, sources, 1]
    usual = size.median(dim=2, keepdim=True).values
    return change * (usual / size.clamp_min(1e-12)).clamp(max=1.0)


def _trust(guessed: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """From 0, neighbours say nothing about each other's change, to 1, they tell it."""
    size = guessed.square().sum()
    return ((guessed * change).sum() / size.clamp_min(1e-12)).clamp(0.0, 1.0)


def _neighbourhoods(rows: torch.Tensor, stretches: torch.Tensor) -> list[torch.Tensor]:
    """Ascending ``rows`` in pieces of one stretch each and of bounded reach."""
    stretch = stretches[rows]
    edges = (stretch[1:] != stretch[:-1]).nonzero().flatten() + 1
    return [
        piece
        for whole in torch.tensor_split(rows, edges.tolist())
        for piece in torch.split(whole, _BLOCK)
        if len(piece)
    ]


def _weights(targets: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """How much each target follows each source, [targets, sources]: rows sum to less than one."""
    distance = (targets.view(-1, 1) - sources).float() / _WIDTH
    weights = torch.exp(-0.5 * distance.square()) * (distance != 0.0)  # no row tells about itself
    return weights / (weights.sum(dim=1, keepdim=True) + _DOUBT)
