"""KV in 4 bits: keys per channel and per token at once, values per token.

Made by :func:`kvboost.hf.codec.codec_for`. Keys are large in a few channels of a head, the same ones for
all tokens: what a channel has in common over 64 tokens is stored by itself, and what is left is spread evenly
over the head by a Hadamard rotation, so that one range per token fits it. Values have no such channels; each
token's are rounded within its own range. The first token of a text, which most attention rests on, is kept as
it is. See docs/decisions/0009-codecs.md for what else was measured.

Invariant: an element (of the keys: of the rotated rest) comes back within half its group's scale, which is a
fifteenth of the group's range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.codec.base import RoundingCodec, expect, finite, group_of, in_groups, tiles

WINDOW = 64
"""Tokens over which a channel of the keys has one mean."""
_KEPT = 1  # leading tokens of a text that are stored unpacked
_STEPS = 16  # positions of a range's centre per scale
_SHIFT = 16  # codes are unpacked times 16: the upper half of a byte without moving it
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class _Part:
    """The keys, or the values, of one slab."""

    group: int
    indices: range
    """Where their slots lie in the slab, as a regular run."""
    keys: bool
    spec: TensorSpec

    @property
    def pairs(self) -> int:
        """Two slots share their bytes: slot i of the first half with slot i of the second."""
        return -(-len(self.indices) // 2)

    @property
    def scale_group(self) -> int:
        """Elements that share a scale. Rotated keys are even over the whole head."""
        return self.spec.dim if self.keys else group_of(self.spec.dim)

    @property
    def tensors(self) -> int:
        """Codes, scales, centres; and means for keys."""
        return 4 if self.keys else 3

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """A view of these slots of a slab's tensor [slots, ...]."""
        return block[self.indices.start : self.indices[-1] + 1 : self.indices.step]


def _parts(layout: KVLayout) -> Iterator[_Part]:
    for group, (spec, slots) in enumerate(layout.groups.items()):
        for keys in (True, False):
            indices = [index for index, slot in enumerate(slots) if (slot % 2 == 0) == keys]
            while indices:  # one run, unless layers of different shapes alternate irregularly
                step = indices[1] - indices[0] if len(indices) > 1 else 1
                run = range(indices[0], indices[0] + 1, step)
                while run.stop - 1 + step in indices:
                    run = range(run.start, run.stop + step, step)
                yield _Part(group, run, keys, spec)
                indices = indices[len(run) :]


class Int4Codec(RoundingCodec):
    """Rounding to 4 bits around a stored centre."""

    name = "int4-hadamard"

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self._parts = list(_parts(layout))
        self._rotations = {part.spec: _Rotation(part.spec) for part in self._parts if part.keys}
        self._packed = sum(part.tensors for part in self._parts)

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor], *, start: int) -> tuple[torch.Tensor, ...]:
        """Codes, scales, centres and means of every part; then the unpacked tokens, if the text begins here."""
        kept = _KEPT if start == 0 else 0
        packed: list[torch.Tensor] = []
        if tensors[0].shape[2] > kept:
            for part in self._parts:
                states = finite(part.of(tensors[part.group])[:, :, kept:])
                if part.keys:
                    means = _means(states)
                    packed += _quantise(self._rotations[part.spec].apply(states), part.scale_group)
                    packed.append(means)
                else:
                    packed += _quantise(states, part.scale_group)
        if kept:
            packed += [tensor[:, :, :kept].clone(memory_format=torch.contiguous_format) for tensor in tensors]
        return tuple(packed)

    def _kept_in(self, packed: Sequence[torch.Tensor]) -> int:
        """How many of the tokens these tensors hold are not packed."""
        return _KEPT if len(packed) != self._packed else 0

    def _tokens(self, packed: Sequence[torch.Tensor]) -> int:
        groups = self._layout.groups
        if len(packed) not in (self._packed, self._packed + len(groups), len(groups)) or packed[0].dim() != 4:
            raise ValueError(f"{len(packed)} tensors are no block of this layout in 4 bits")
        kept = self._kept_in(packed)
        rest = 0 if len(packed) == len(groups) else packed[0].shape[2]
        if kept:
            for tensor, (spec, slots) in zip(packed[-len(groups) :], groups.items(), strict=True):
                expect(tensor, spec.dtype, len(slots), spec.heads, kept, spec.dim)
        if rest:
            for part, tensors in self._by_part(packed):
                spec, count = part.spec, len(part.indices)
                expect(tensors[0], torch.int8, part.pairs, spec.heads, rest, spec.dim)
                for tensor, dtype in ((tensors[1], torch.bfloat16), (tensors[2], torch.int8)):
                    expect(tensor, dtype, count, spec.heads, rest, spec.dim // part.scale_group)
                if part.keys:
                    expect(tensors[3], torch.bfloat16, count, spec.heads, -(-rest // WINDOW), spec.dim)
        return rest + kept

    def _by_part(self, packed: Sequence[torch.Tensor]) -> Iterator[tuple[_Part, Sequence[torch.Tensor]]]:
        first = 0
        for part in self._parts:
            yield part, packed[first : first + part.tensors]
            first += part.tensors

    def _write(self, packed: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        kept = self._kept_in(packed)
        if kept:
            for target, tensor in zip(targets, packed[-len(targets) :], strict=True):
                target[:, :, :kept].copy_(tensor, non_blocking=True)
        if targets[0].shape[2] == kept:
            return
        for part, tensors in self._by_part(packed):
            target = part.of(targets[part.group])[:, :, kept:]
            codes, *others = (tensor.to(target.device, non_blocking=True) for tensor in tensors)
            scales, offsets = _scales_and_offsets(*others[:2])
            for half, first in ((torch.mul, 0), (torch.bitwise_and, part.pairs)):
                factor = _SHIFT if first == 0 else -_SHIFT  # times 16 drops the upper half, the mask the lower
                count = min(part.pairs, len(part.indices) - first)
                for tile in tiles(count, target[0].numel(), target.device):
                    slots = slice(first + tile.start, first + tile.stop)
                    states = half(codes[tile], factor)  # [slots, heads, tokens, dim], 16 times the signed code
                    if part.keys:
                        rotation = self._rotations[part.spec]
                        rotation.undo(states, scales[slots], offsets[slots], others[2][slots], target[slots])
                    else:
                        _dequantise(states, scales[slots], offsets[slots], target[slots])


class _Rotation:
    """A Hadamard rotation of a head. Where its size is no power of two, of its parts: 80 is 64 and 16."""

    def __init__(self, spec: TensorSpec) -> None:
        blocks: list[int] = []
        left = spec.dim
        while left:
            blocks.append(1 << (left.bit_length() - 1))
            left -= blocks[-1]
        matrix = torch.zeros(spec.dim, spec.dim, device=spec.device, dtype=_matrix_dtype(spec.device))
        starts = [sum(blocks[:index]) for index in range(len(blocks))]
        for first, size in zip(starts, blocks, strict=True):
            matrix[first : first + size, first : first + size] = _hadamard(size)
        self._matrix = matrix  # [dim, dim]
        # Of the matrix as it was rounded, so that the two cancel. On the host: MPS has no float64.
        self._inverse: torch.Tensor = torch.linalg.inv(matrix.cpu().double()).float().to(spec.device)
        # What is added to all elements of a rotated part is one element of the part itself.
        self._firsts = [(first, size**0.5) for first, size in zip(starts, blocks, strict=True)]

    def apply(self, states: torch.Tensor) -> torch.Tensor:
        """Rotated. The states may be on another device than the model's: tiers ask for a block's shapes on the CPU."""
        return states @ self._inverse.to(states.device)

    def undo(
        self,
        states: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        means: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """Write ``means + rotated back (states * scales + offsets)`` to ``target`` [slots, heads, tokens, dim]."""
        rotated = torch.mm(states.to(self._matrix.dtype).flatten(0, 2), self._matrix).view(states.shape)
        rest = rotated.float()
        whole = target.dtype == torch.float32
        for window, first in enumerate(range(0, target.shape[2], WINDOW)):
            tokens = slice(first, first + WINDOW)
            mean = means[:, :, window : window + 1].float()
            out = target if whole else rest
            torch.addcmul(mean, rest[:, :, tokens], scales[:, :, tokens], out=out[:, :, tokens])
        for first, root in self._firsts:
            (target if whole else rest)[..., first].add_(offsets[..., 0], alpha=root)
        if not whole:
            target.copy_(rest)


def _matrix_dtype(device: torch.device) -> torch.dtype:
    """Codes are whole numbers, so bfloat16 loses little, and it is faster where the processor has it."""
    slow = device.type == "cpu" and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    return torch.float32 if slow else torch.bfloat16


def _hadamard(size: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix of a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.div(matrix, size**0.5)


def _means(states: torch.Tensor) -> torch.Tensor:
    """Take each window's mean off ``states`` [slots, heads, tokens, dim]; returns [slots, heads, windows, dim]."""
    means = []
    for window in torch.split(states, WINDOW, dim=2):
        means.append(window.mean(dim=2, keepdim=True).bfloat16())
        window.sub_(means[-1].float())
    return torch.cat(means, dim=2)


def _quantise(states: torch.Tensor, group: int) -> list[torch.Tensor]:
    """Codes of both halves of the slots in one byte, scales and centres, for ``states`` [slots, ..., dim]."""
    grouped = in_groups(states, group)  # [..., groups, group]
    low, high = grouped.aminmax(dim=-1)
    low, high = low.clamp_max_(0.0), high.clamp_min_(0.0)  # with zero inside, a centre is at most 7.5 scales away
    scales = ((high - low) / 15).bfloat16()
    divisor = scales.float().clamp_min_(_TINY)
    centres = ((low + high) * (_STEPS / 2) / divisor).round_().clamp_(-128, 127)
    codes = grouped.div_(divisor.unsqueeze(-1)).sub_((centres / _STEPS + 0.5).unsqueeze(-1))
    signed = codes.round_().clamp_(-8, 7).to(torch.int8).flatten(-2)  # value = scale * (code + 1/2 + centre / 16)
    half = -(-len(signed) // 2)
    both = signed[:half] & 15
    both[: len(signed) - half].bitwise_or_(signed[half:] * _SHIFT)
    return [both, scales, centres.to(torch.int8)]


def _scales_and_offsets(scales: torch.Tensor, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What sixteenfold codes are multiplied by, and what is then added: [..., groups], float32."""
    wide = scales.float()
    return wide / _SHIFT, (centres.float() / _STEPS).add_(0.5).mul_(wide)


def _dequantise(states: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, target: torch.Tensor) -> None:
    """Write ``states * scales + offsets`` to ``target`` [slots, heads, tokens, dim]."""
    group = states.shape[-1] // scales.shape[-1]
    whole = target.dtype == torch.float32
    wide = target if whole else torch.empty(target.shape, device=target.device)
    wide.copy_(states)
    # Two calls: addcmul is not vectorised where two of its arguments are constant along a row.
    in_groups(wide, group).mul_(scales.unsqueeze(-1)).add_(offsets.unsqueeze(-1))
    if not whole:
        target.copy_(wide)
