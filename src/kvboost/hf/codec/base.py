"""The protocol of codecs for stored KV, the raw codec, and helpers for the others.

The engine packs a block's tensors when it stores a chunk and unpacks them into a cache when it places one.
Invariants: packed tensors share no memory with their input; equal input gives equal bytes; tensors that do not fit the
layout are refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from kvboost.hf.cache import KVLayout, SlabCache

TILE = 2**17
"""Elements unpacked at a time: in float32 they stay in the second-level cache of a core."""
_LARGEST = 1e30  # beyond any KV; sums over a head and over a block stay finite in float32
_GROUP = 64


class KVCodec(Protocol):
    """Packs the tensors of blocks of one layout, and unpacks them into caches."""

    @property
    def name(self) -> str:
        """Part of the fingerprint: blocks of different codecs never mix."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether unpacking gives back the same bits. If not, blocks are not bitwise, nor is what follows them."""
        ...

    def pack(self, tensors: Sequence[torch.Tensor], *, start: int) -> tuple[torch.Tensor, ...]:
        """The tensors to store, from tensors as :meth:`SlabCache.span` returns them for positions from ``start`` on."""
        ...

    def place(self, cache: SlabCache, start: int, packed: Sequence[torch.Tensor], *, row: int = 0) -> None:
        """Unpack into the positions of ``cache`` from ``start`` on; keys keep their rotation."""
        ...

    def unpack(self, packed: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The block's tensors again, as :meth:`SlabCache.place` and :meth:`KeyRepositioner.place` take them."""
        ...


class RawCodec:
    """Keeps KV as the model has it."""

    name = "raw"
    lossless = True

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def pack(self, tensors: Sequence[torch.Tensor], *, start: int) -> tuple[torch.Tensor, ...]:
        """Copies."""
        return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)

    def place(self, cache: SlabCache, start: int, packed: Sequence[torch.Tensor], *, row: int = 0) -> None:
        """One copy per slab."""
        cache.place(start, packed, row=row)

    def unpack(self, packed: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The same tensors."""
        return tuple(packed)


def nbytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def group_of(dim: int) -> int:
    """How many neighbouring elements of a head share a scale."""
    return _GROUP if dim % _GROUP == 0 else dim


def in_groups(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """A view [..., dim / group, group] of ``tensor`` [..., dim]."""
    return tensor.view(*tensor.shape[:-1], tensor.shape[-1] // group, group)


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, with zero for what is not finite: it must not spoil the elements it shares a scale with."""
    return torch.nan_to_num(tensor.float().contiguous(), nan=0.0, posinf=0.0, neginf=0.0).clamp_(-_LARGEST, _LARGEST)


def positions_of(cache: SlabCache, layout: KVLayout, start: int, tokens: int, *, row: int) -> list[torch.Tensor]:
    """Views of the positions to write, [slots, heads, tokens, dim] per slab; ValueError if they do not exist."""
    if cache.layout is not layout and cache.layout != layout:
        raise ValueError("this cache has another layout than the codec was made for")
    if not 0 <= start <= start + tokens <= cache.capacity:
        raise ValueError(f"positions {start} to {start + tokens} do not fit a cache of {cache.capacity}")
    return [slab[:, row, :, start : start + tokens] for slab in cache.slabs]


def empty_block(layout: KVLayout, tokens: int) -> list[torch.Tensor]:
    """Memory for a block's tensors, [slots, heads, tokens, dim] per slab."""
    return [
        torch.empty(len(slots), spec.heads, tokens, spec.dim, dtype=spec.dtype, device=spec.device)
        for spec, slots in layout.groups.items()
    ]


def expect(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """This tensor, if it is what the layout says; ValueError if it was packed for another one."""
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(
            f"a packed tensor is {tensor.dtype} {list(tensor.shape)}, this layout has {dtype} {list(shape)}; "
            "it was packed by another codec or for another model"
        )
    return tensor


def tiles(slots: int, elements_per_slot: int, device: torch.device) -> Iterator[slice]:
    """Runs of slots that hold about :data:`TILE` elements each; all of them at once on an accelerator."""
    step = max(1, TILE // max(1, elements_per_slot)) if device.type == "cpu" else slots
    return (slice(first, min(first + step, slots)) for first in range(0, slots, step))
