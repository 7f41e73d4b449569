"""Ways of rounding KV to 4 bits that the int4 codec was chosen from: what comes back, without the packing.

Used by the codec benchmark only. Invariant: what a scheme would have to store (scales, zeros, means) is rounded
here as it would be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.internals import KeyRepositioner, KVLayout

_TOKENS, _DIM = 2, 3
_LEVELS = 15


@dataclass(frozen=True)
class Rounding:
    """One scheme: the axis that shares a range for keys and values, and what is done to keys first."""

    key_axis: int
    value_axis: int
    hadamard: bool = False
    """Rotate the head of keys and values before rounding."""
    before_rope: bool = False
    """Keys as they are at position 0."""
    means: bool = False
    """Take the keys' mean per channel off first."""
    keeps_first: bool = False
    """The first token of the text stays as it is."""

    def trip(
        self, tensors: Sequence[torch.Tensor], layout: KVLayout, mover: KeyRepositioner | None, start: int
    ) -> list[torch.Tensor]:
        """A block as it would come back."""
        kept = 1 if self.keeps_first and start == 0 else 0
        tokens = tensors[0].shape[2]
        back = [tensor.clone() for tensor in tensors]
        if tokens == kept:
            return back
        here = torch.arange(start + kept, start + tokens)
        origin = torch.zeros_like(here)
        for target, slots in zip(back, layout.groups.values(), strict=True):
            for index, slot in enumerate(slots):
                states = target[index, :, kept:].float()  # [heads, tokens, dim]
                if slot % 2:
                    rounded = self._round(states.unsqueeze(0), self.value_axis)[0]
                else:
                    turned = mover.rotations(here, origin).apply(slot, states) if mover else states
                    mean = turned.mean(dim=1, keepdim=True).half().float() if self.means else 0.0
                    rounded = self._round((turned - mean).unsqueeze(0), self.key_axis)[0] + mean
                    rounded = mover.rotations(origin, here).apply(slot, rounded) if mover else rounded
                target[index, :, kept:] = rounded.to(target.dtype)
        return back

    def _round(self, states: torch.Tensor, axis: int) -> torch.Tensor:
        if not self.hadamard:
            return _rounded(states, axis)
        matrix = _hadamard(states.shape[-1]).to(states.device)
        return _rounded(states @ matrix, axis) @ matrix.T


def _rounded(states: torch.Tensor, axis: int) -> torch.Tensor:
    low, high = states.amin(axis, keepdim=True), states.amax(axis, keepdim=True)
    scale = ((high - low) / _LEVELS).clamp_min(1e-6).half().float()
    zero = low.half().float()
    return ((states - zero) / scale).round().clamp(0, _LEVELS) * scale + zero


def _hadamard(dim: int) -> torch.Tensor:
    size = dim & -dim  # the largest power of two that divides it
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.kron(torch.eye(dim // size), torch.div(matrix, size**0.5))


SCHEMES: dict[str, Rounding] = {
    "KIVI: keys per channel, values per token": Rounding(_TOKENS, _DIM),
    "KIVI with its axes swapped": Rounding(_DIM, _TOKENS),
    "all per token": Rounding(_DIM, _DIM),
    "Hadamard, per token": Rounding(_DIM, _DIM, hadamard=True),
    "Hadamard, per token, keys before RoPE": Rounding(_DIM, _DIM, hadamard=True, before_rope=True),
    "the same, keys less their means, first token kept": Rounding(
        _DIM, _DIM, hadamard=True, before_rope=True, means=True, keeps_first=True
    ),
}
