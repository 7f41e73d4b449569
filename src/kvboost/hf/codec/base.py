"""Codecs for stored KV: the one that changes nothing, and what the others have in common.

The engine packs a block's tensors when it stores a chunk and unpacks them into a cache when it places one.
Invariants: packed tensors share no memory with their input; equal input gives equal bytes; tensors that do not fit the
layout are refused before anything is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from kvboost.hf.cache import KVLayout, SlabCache

TILE = 2**17
"""Elements unpacked at a time: in float32 they stay in the second-level cache of a core."""
_LARGEST = 1e30  # beyond any KV; sums over a head and over a block stay finite in float32
_GROUP = 64
_AT_ONCE = 64 * 2**20  # bytes that an accelerator copies in one go, and that there is memory for


class KVCodec:
    """Packs the tensors of blocks of one layout, and unpacks them into caches: as they are, but for subclasses."""

    name = "raw"
    """Part of the fingerprint: blocks of different codecs never mix."""
    lossless = True
    """Whether unpacking gives back the same bits. If not, blocks are not bitwise, nor is what follows them."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def pack(self, tensors: Sequence[torch.Tensor], *, start: int) -> tuple[torch.Tensor, ...]:
        """The tensors to store, from tensors as :meth:`SlabCache.span` returns them for positions from ``start`` on."""
        return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)

    def pack_each(self, cache: SlabCache, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, ...]]:
        """:meth:`pack` of each of these spans of ``cache``, which follow one another. Each is copied when asked for.

        An accelerator copies several at once: the launch of one copy takes longer than the copy.
        """
        for run in self._runs(spans):
            if len(run) == 1:
                yield self.pack(cache.span(*run[0]), start=run[0][0])
                continue
            sizes = [end - start for start, end in run]
            yield from zip(*(_split(whole, sizes) for whole in cache.span(run[0][0], run[-1][1])), strict=True)

    def place(self, cache: SlabCache, start: int, packed: Sequence[torch.Tensor], *, row: int = 0) -> None:
        """Unpack into the positions of ``cache`` from ``start`` on; keys keep their rotation."""
        cache.place(start, packed, row=row)

    def place_each(self, cache: SlabCache, blocks: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        """:meth:`place` of each of these blocks, in order. An accelerator copies several at once."""
        spans = [(start, start + packed[0].shape[2]) if self._joins else (start, start) for start, packed in blocks]
        following = iter(blocks)
        for run in self._runs(spans):
            these = list(islice(following, len(run)))
            if len(these) == 1:
                self.place(cache, *these[0])
                continue
            for index, target in enumerate(cache.span(run[0][0], run[-1][1])):
                torch.cat([packed[index] for _, packed in these], dim=2, out=target)

    @property
    def _joins(self) -> bool:
        """Whether what is packed of several spans is their KV side by side, on an accelerator."""
        return self.lossless and all(spec.device.type != "cpu" for spec in self._layout.slots)

    def _runs(self, spans: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """The spans in order, those together that are copied at once."""
        run: list[tuple[int, int]] = []
        for span in spans:
            fits = run and (span[1] - run[0][0]) * self._layout.bytes_per_token <= _AT_ONCE
            if run and not (self._joins and fits and span[0] == run[-1][1]):
                yield run
                run = []
            run.append(span)
        if run:
            yield run

    def unpack(self, packed: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The block's tensors again, as :meth:`SlabCache.place` and :meth:`KeyRepositioner.place` take them."""
        return tuple(packed)


class RoundingCodec(KVCodec, ABC):
    """Unpacks what it has rounded straight into the memory where it is wanted."""

    lossless = False

    @abstractmethod  # the raw one would store unrounded KV under the name of another codec
    def pack(self, tensors: Sequence[torch.Tensor], *, start: int) -> tuple[torch.Tensor, ...]:
        """As of every codec."""

    @torch.no_grad()
    def place(self, cache: SlabCache, start: int, packed: Sequence[torch.Tensor], *, row: int = 0) -> None:
        """Unpack tile by tile into the slabs; ValueError if the positions do not exist."""
        tokens = self._tokens(packed)
        if cache.layout is not self._layout and cache.layout != self._layout:
            raise ValueError("this cache has another layout than the codec was made for")
        if not 0 <= start <= start + tokens <= cache.capacity:
            raise ValueError(f"positions {start} to {start + tokens} do not fit a cache of {cache.capacity}")
        self._write(packed, [slab[:, row, :, start : start + tokens] for slab in cache.slabs])

    @torch.no_grad()
    def unpack(self, packed: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Unpack into new memory."""
        tokens = self._tokens(packed)
        tensors = [
            torch.empty(len(slots), spec.heads, tokens, spec.dim, dtype=spec.dtype, device=spec.device)
            for spec, slots in self._layout.groups.items()
        ]
        self._write(packed, tensors)
        return tuple(tensors)

    @abstractmethod
    def _tokens(self, packed: Sequence[torch.Tensor]) -> int:
        """How many tokens these tensors hold; ValueError if they do not fit the layout."""

    @abstractmethod
    def _write(self, packed: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Unpack into ``targets``, [slots, heads, tokens, dim] per slab."""


def _split(whole: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Copies of the parts of ``whole`` [slots, heads, tokens, dim], each in memory of its own, in one kernel."""
    slots, heads, _, dim = whole.shape
    parts = [whole.new_empty(slots, heads, size, dim) for size in sizes]
    torch.split_with_sizes_copy(whole.contiguous(), list(sizes), dim=2, out=parts)
    return parts


def group_of(dim: int) -> int:
    """How many neighbouring elements of a head share a scale."""
    return _GROUP if dim % _GROUP == 0 else dim


def in_groups(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """A view [..., dim / group, group] of ``tensor`` [..., dim]."""
    return tensor.view(*tensor.shape[:-1], tensor.shape[-1] // group, group)


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, with zero for what is not finite: it must not spoil the elements it shares a scale with."""
    return torch.nan_to_num(tensor.float().contiguous(), nan=0.0, posinf=0.0, neginf=0.0).clamp_(-_LARGEST, _LARGEST)


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
