"""KV in 8 bits: every token's head in groups of at most 64 elements, each with one scale.

Made by :func:`kvboost.hf.codec.codec_for`. Invariant: an element comes back within half its group's scale,
which is the largest magnitude in the group divided by 127.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost.hf.codec.base import RoundingCodec, expect, finite, group_of, in_groups, tiles

_LEVELS = 127


class Int8Codec(RoundingCodec):
    """Symmetric rounding to 8 bits. Per slab: codes [slots, heads, tokens, dim], scales [..., dim / group]."""

    name = "int8"

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor], *, start: int) -> tuple[torch.Tensor, ...]:
        """Codes and scales of every slab."""
        packed: list[torch.Tensor] = []
        for tensor in tensors:
            grouped = in_groups(finite(tensor), group_of(tensor.shape[-1]))  # [..., groups, group]
            # bfloat16 has float32's range, and the codes are made for the scale as it was rounded.
            scales = (grouped.abs().amax(-1) / _LEVELS).bfloat16()
            divisor = scales.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
            codes = grouped.div_(divisor).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
            packed += [codes.flatten(-2), scales]
        return tuple(packed)

    def _tokens(self, packed: Sequence[torch.Tensor]) -> int:
        if len(packed) != 2 * len(self._layout.groups) or packed[0].dim() != 4:
            raise ValueError(f"{len(packed)} tensors are no block of this layout in 8 bits")
        tokens = packed[0].shape[2]
        for index, (spec, slots) in enumerate(self._layout.groups.items()):
            shape = (len(slots), spec.heads, tokens)
            expect(packed[2 * index], torch.int8, *shape, spec.dim)
            expect(packed[2 * index + 1], torch.bfloat16, *shape, spec.dim // group_of(spec.dim))
        return tokens

    def _write(self, packed: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        for index, target in enumerate(targets):
            codes = packed[2 * index].to(target.device, non_blocking=True)
            scales = packed[2 * index + 1].to(target.device, non_blocking=True).float().unsqueeze(-1)
            group = group_of(target.shape[-1])
            whole = target.dtype == torch.float32
            for part in tiles(len(target), target[0].numel(), target.device):
                # Straight into the slab where it is float32; otherwise by way of a tile that stays in the cache.
                tile = target[part] if whole else torch.empty(target[part].shape, device=target.device)
                tile.copy_(codes[part])
                in_groups(tile, group).mul_(scales[part])
                if not whole:
                    target[part].copy_(tile)
