"""Copies stored KV to other positions: keys are re-rotated (re-RoPE), everything else is copied.

:mod:`kvboost.approx.probe` finds out how a model's keys rotate, once; :meth:`KeyRepositioner.place` runs once per
request, for all blocks that were computed at other positions. Invariant: repositioned KV equals what the model itself
would have written for the same hidden state at the new position, up to the rounding of one rotation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from kvboost.hf.cache import KVLayout, SlabCache

# Placed at once. On an accelerator as much as keeps it busy, on the CPU about what stays in the cache of a core.
_BATCH_BYTES = 64 * 2**20
_CPU_BATCH_BYTES = 2 * 2**20


def turn_between(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the rotation from the first half of the given positions to the second half.

    ``cos`` and ``sin`` are a model's own, [2 * tokens, frequencies]; the results are [tokens, frequencies].
    """
    old_cos, new_cos = cos.chunk(2)
    old_sin, new_sin = sin.chunk(2)
    # Not the angle (new - old) * frequency: at position 100,000 the model's own float32 angle is off by
    # 4e-3, and fresh keys carry that error. Dividing new by old, as complex numbers, takes out the old
    # error, puts in the new one, and cancels the attention scaling that both carry.
    norm = old_cos.square().addcmul_(old_sin, old_sin)
    return (new_cos * old_cos + new_sin * old_sin) / norm, (new_sin * old_cos - new_cos * old_sin) / norm


@dataclass(frozen=True)
class Rotary:
    """One of the model's own tables of rotary angles."""

    module: torch.nn.Module
    layer_type: str | None
    columns: slice  # each frequency once: modules repeat them as (f, f), pairwise, or not at all
    device: torch.device

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine as the model uses them at ``positions`` [tokens]: [tokens, frequencies] each, float32."""
        like = torch.zeros(1, 1, 1, device=self.device)  # a float32 input gives float32 results
        kind = {} if self.layer_type is None else {"layer_type": self.layer_type}
        result = self.module(like, position_ids=positions.to(self.device).view(1, -1), **kind)
        if isinstance(result, torch.Tensor):  # some families multiply complex numbers
            result = torch.view_as_real(result).unbind(-1)
        cos, sin = (part.reshape(len(positions), part.shape[-1]).float() for part in result)
        return cos[:, self.columns], sin[:, self.columns]

    def rotation_between(self, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, [tokens, frequencies], of the rotation from the old positions [tokens] to the new ones."""
        return turn_between(*self.angles(torch.cat([old, new])))


class Rotation(NamedTuple):
    """How one slot rotates with the position: its rotary table, and which dimensions form a pair."""

    rotary: int
    frequencies: int  # the first 2 * frequencies dimensions are rotated
    interleaved: bool  # pairs (2i, 2i + 1); otherwise (i, i + frequencies)

    def pairs(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the two halves of every pair, [..., frequencies] each."""
        half, end = self.frequencies, 2 * self.frequencies
        if self.interleaved:
            return tensor[..., 0:end:2], tensor[..., 1:end:2]
        return tensor[..., :half], tensor[..., half:end]

    def factors(self, cos: torch.Tensor, sin: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What :meth:`apply` takes: [tokens, dim], one where a dimension is not rotated, and [tokens, frequencies]."""
        whole = cos.new_ones(cos.shape[0], dim)
        for half in self.pairs(whole):
            half.copy_(cos)
        return whole, sin

    def apply(self, source: torch.Tensor, whole: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rotated ``source`` [..., tokens, dim] to ``out``, without temporaries."""
        torch.mul(source, whole, out=out)
        left, right = self.pairs(source)
        out_left, out_right = self.pairs(out)
        out_left.addcmul_(right, sin, value=-1)
        out_right.addcmul_(left, sin)


class Rotations:
    """Rotations of some tokens from old to new positions, each token by its own angle."""

    def __init__(
        self, rotations: Sequence[Rotation | None], angles: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._rotations, self._angles = rotations, angles
        self._factors: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def apply(self, slot: int, states: torch.Tensor) -> torch.Tensor:
        """Float32 ``states`` [..., tokens, dim] of one slot as they would be at the new positions."""
        rotation = self._rotations[slot]
        if rotation is None:
            return states
        rotated = torch.empty_like(states)
        rotation.apply(states, *self.factors(rotation, states), out=rotated)
        return rotated

    def factors(self, rotation: Rotation, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``rotation`` takes for states like these: made once per device, whatever the number of layers."""
        key = (rotation, like.device, like.shape[-1], like.dtype)
        if key not in self._factors:
            cos, sin = (factor.to(like.device, like.dtype) for factor in self._angles[rotation.rotary])
            self._factors[key] = rotation.factors(cos, sin, like.shape[-1])
        return self._factors[key]


@dataclass(frozen=True)
class Move:
    """A block that was computed at ``old_start`` and goes to the positions from ``new_start`` on."""

    tensors: Sequence[torch.Tensor]
    """As :meth:`SlabCache.place` takes them: [slots, heads, tokens, dim] per slab."""
    old_start: int
    new_start: int

    @property
    def tokens(self) -> int:
        """Positions it takes."""
        return self.tensors[0].shape[2]

    @property
    def new_end(self) -> int:
        """The position behind it."""
        return self.new_start + self.tokens

    @property
    def stays(self) -> bool:
        """Whether it keeps its position."""
        return self.old_start == self.new_start


class KeyRepositioner:
    """Copies stored KV to other positions of a cache, re-rotating the keys on the way.

    Thread-safe for different caches: it uses copies of the model's rotary modules, so it depends on no request and
    affects none.
    """

    def __init__(
        self, layout: KVLayout, *, rotaries: Sequence[Rotary], rotations: Sequence[Rotation | None], limit: int | None
    ) -> None:
        self._layout = layout
        self._rotaries = rotaries
        self._rotations = rotations
        self._limit = limit
        # For every slab the slots with the same rotation, as slices: one call copies or rotates them all.
        self._parts: list[list[tuple[slice, Rotation | None]]] = []
        for slots in layout.groups.values():
            alike: dict[Rotation | None, list[int]] = {}
            for index, slot in enumerate(slots):
                alike.setdefault(rotations[slot], []).append(index)
            self._parts.append([(part, kind) for kind, indices in alike.items() for part in _slices(indices)])

    @torch.no_grad()
    def place(self, cache: SlabCache, moves: Iterable[Move], *, row: int = 0) -> None:
        """Copy blocks that were computed elsewhere to their new positions, given in ascending order.

        They are taken one after another and placed in batches: the number of calls does not grow with the number of
        blocks, nor the memory with all of them. Blocks must not be views of the target positions.
        """
        on_cpu = all(slab.device.type == "cpu" for slab in cache.slabs)
        limit = _CPU_BATCH_BYTES if on_cpu else _BATCH_BYTES
        batch: list[Move] = []
        held = 0
        for move in moves:
            self._check(cache, max(move.old_start, move.new_start) + move.tokens, move.new_start + move.tokens)
            size = sum(tensor.numel() * tensor.element_size() for tensor in move.tensors)
            gap = on_cpu and batch and batch[-1].new_end != move.new_start  # a slice is cheaper there than an index
            if batch and (gap or held + size > limit or batch[-1].stays != move.stays):
                self._place(cache, batch, row)
                batch, held = [], 0
            batch.append(move)
            held += size
        if batch:
            self._place(cache, batch, row)

    def _place(self, cache: SlabCache, batch: Sequence[Move], row: int) -> None:
        """One copy or one rotation per slab and kind of slot, for all positions at once."""
        new = torch.cat([torch.arange(move.new_start, move.new_end) for move in batch])
        rotations = None
        if not batch[0].stays:  # otherwise a plain copy: turning by zero would still round
            old = torch.cat([torch.arange(move.old_start, move.old_start + move.tokens) for move in batch])
            rotations = self.rotations(old, new)
        together = all(move.new_end == after.new_start for move, after in pairwise(batch))
        blocks = zip(*(move.tensors for move in batch), strict=True)
        for slab, tensors, parts in zip(cache.slabs, blocks, self._parts, strict=True):
            source = _joined(tensors, slab.device)  # [slots, heads, tokens, dim]
            work = torch.promote_types(slab.dtype, torch.float32)
            target, index = slab[:, row, :, batch[0].new_start : batch[-1].new_end], None
            if not together:
                target, index = slab[:, row], new.to(slab.device)
            for slots, rotation in parts:
                states, out = source[slots], target[slots]
                if rotation is not None and rotations is not None:
                    states = states.to(work)
                    direct = index is None and slab.dtype == work
                    turned = out if direct else torch.empty_like(states)
                    rotation.apply(states, *rotations.factors(rotation, states), out=turned)
                    if direct:
                        continue
                    states = turned.to(slab.dtype)
                if index is None:
                    out.copy_(states, non_blocking=True)
                else:
                    out.index_copy_(2, index, states)

    def can_reposition(self, end: int) -> bool:
        """Whether positions up to this one share the rotary frequencies of this table."""
        return self._limit is None or end <= self._limit

    @torch.no_grad()
    def rotations(self, old: torch.Tensor, new: torch.Tensor) -> Rotations:
        """The rotations from positions ``old`` [tokens] to ``new``, for every slot."""
        return Rotations(self._rotations, [rotary.rotation_between(old, new) for rotary in self._rotaries])

    def _check(self, cache: SlabCache, end: int, new_end: int) -> None:
        if cache.layout is not self._layout and cache.layout != self._layout:
            raise ValueError("this cache has another layout than the model that was probed")
        if new_end > cache.capacity:
            raise ValueError(f"positions up to {new_end} do not fit a cache of {cache.capacity}")
        if self._limit is not None and end > self._limit:
            raise ValueError(
                f"the rotary frequencies change beyond {self._limit} tokens; KV cannot be repositioned there"
            )


def _joined(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Blocks [slots, heads, tokens, dim] one behind the other, on ``device``: joined before they are copied there."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.to(device, non_blocking=True) for tensor in tensors]
    whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=2)
    return whole.to(device, non_blocking=True)


def _slices(indices: list[int]) -> list[slice]:
    """Ascending ``indices`` as few regular slices: the longest from the lowest index on, then the rest."""
    slices, left = [], list(indices)
    while left:
        runs = []
        for step in [index - left[0] for index in left[1:]] or [1]:
            end = left[0]
            while end in left:
                end += step
            runs.append(range(left[0], end, step))
        longest = max(runs, key=len)
        slices.append(slice(longest.start, longest[-1] + 1, longest.step))
        left = [index for index in left if index not in longest]
    return slices
