"""The cache a model writes its keys and values into: preallocated, growing, one slab per tensor shape.

Made by the engine for every request (or taken from its pool) and passed to the model's own forward and ``generate``.
Invariant: positions ``[0, length)`` of every layer hold that sequence's KV; attention never sees what lies after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvboost.capacity import rounded_capacity


@dataclass(frozen=True)
class TensorSpec:
    """Shape of one layer's keys or values, without batch and sequence."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token."""
        return self.heads * self.dim * self.dtype.itemsize


@dataclass(frozen=True)
class KVLayout:
    """Which tensors a model's cache holds. ``slots[2 * layer]`` are keys, ``slots[2 * layer + 1]`` values."""

    slots: tuple[TensorSpec, ...]

    @property
    def groups(self) -> dict[TensorSpec, list[int]]:
        """Slots by equal spec. Each group is one slab, so a chunk is copied with one call per group."""
        grouped: dict[TensorSpec, list[int]] = {}
        for slot, spec in enumerate(self.slots):
            grouped.setdefault(spec, []).append(slot)
        return grouped

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV one token takes over all layers."""
        return sum(spec.bytes_per_row for spec in self.slots)


@dataclass(frozen=True)
class KVChanges:
    """Squared change of recomputed positions in one layer, relative to their mean square: [positions]."""

    keys: torch.Tensor
    values: torch.Tensor


class Spreading(Protocol):
    """Adjusts other positions along with the recomputed ones."""

    def apply(self, layer_index: int, layer: SlabLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Called with each layer's new states before they replace the old ones."""
        ...


class SlabLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """One layer's cache: writes new positions in place into preallocated storage."""

    def __init__(self, key_store: torch.Tensor, value_store: torch.Tensor) -> None:
        super().__init__()
        self.key_store, self.value_store = key_store, value_store  # [batch, heads, capacity, dim]
        self.in_slab = True
        """False once it has storage of its own."""
        self.rewritten: torch.Tensor | None = None  # positions that the next update replaces
        self.watched = False
        self.changes: KVChanges | None = None
        self.spread: Callable[[SlabLayer, torch.Tensor, torch.Tensor], None] | None = None
        self.dtype, self.device = key_store.dtype, key_store.device
        self.is_initialized = True
        self.set_length(0)

    def set_length(self, length: int) -> None:
        """Declare positions ``[0, length)`` to be the sequence so far."""
        self.length = length

    # Views made when asked for: a request sets the length of every layer before the model does.

    @property
    def keys(self) -> torch.Tensor:
        """The keys of positions ``[0, length)``."""
        return self.key_store[:, :, : self.length]

    @keys.setter
    def keys(self, keys: None) -> None:
        """Only Transformers' constructor does it, before there are any."""

    @property
    def values(self) -> torch.Tensor:
        """The values of positions ``[0, length)``."""
        return self.value_store[:, :, : self.length]

    @values.setter
    def values(self, values: None) -> None:
        """Only Transformers' constructor does it, before there are any."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the storage was made with the layer."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new positions, [batch, heads, new, dim]; return all positions up to and including them."""
        if self.rewritten is not None:
            if self.watched:
                self.changes = KVChanges(
                    _squared_change(self.key_store, self.rewritten, key_states),
                    _squared_change(self.value_store, self.rewritten, value_states),
                )
            if self.spread is not None:
                self.spread(self, key_states, value_states)
            # Recomputed positions are replaced; the sequence keeps its length.
            self.key_store.index_copy_(2, self.rewritten, key_states)
            self.value_store.index_copy_(2, self.rewritten, value_states)
            return self.keys, self.values
        start, end = self.length, self.length + key_states.shape[-2]
        self.reserve(end)
        self.key_store[:, :, start:end].copy_(key_states)
        self.value_store[:, :, start:end].copy_(value_states)
        self.set_length(end)
        return self.keys, self.values

    def reserve(self, positions: int) -> None:
        """Have storage for this many positions."""
        if positions > self.key_store.shape[-2]:
            self._replace(
                _grown(self.key_store, self.length, positions), _grown(self.value_store, self.length, positions)
            )

    def get_seq_length(self) -> int:
        """Positions held."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what :meth:`update` will return."""
        return (self.length if self.rewritten is not None else self.length + query_length), 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` positions (Transformers passes a negative count)."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes a negative number: how many tokens to remove")
        self.set_length(max(0, self.length + tokens_to_remove))

    def reset(self) -> None:
        """Forget the sequence, keep the storage."""
        self.set_length(0)

    # The batch operations below leave the slab for storage of their own: beams and copies diverge at once.

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence b becomes what sequence ``beam_idx[b]`` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times."""
        self._replace(
            self.key_store.repeat_interleave(repeats, dim=0),
            self.value_store.repeat_interleave(repeats, dim=0),
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences named by ``indices``."""
        self._replace(
            self.key_store[indices.to(self.key_store.device)],
            self.value_store[indices.to(self.value_store.device)],
        )

    def _replace(self, key_store: torch.Tensor, value_store: torch.Tensor) -> None:
        self.key_store, self.value_store, self.in_slab = key_store, value_store, False


def _squared_change(store: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Squared distance of new states [batch, heads, positions, dim] from the stored ones, [positions]."""
    new = states.float()
    change = (store.index_select(2, positions).float() - new).square_().sum(dim=(0, 1, 3))
    return change / new.square().sum(dim=(0, 1, 3)).mean().clamp_min(1e-12)


def _grown(store: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    """A copy of ``store`` with capacity for ``needed`` positions and half as many again."""
    batch, heads, _, dim = store.shape
    bigger = torch.empty(batch, heads, rounded_capacity(needed * 3 // 2), dim, dtype=store.dtype, device=store.device)
    bigger[:, :, :used] = store[:, :, :used]
    return bigger


class StepLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """One layer of several sequences in one forward: a subclass writes new KV, attention reads it where it was written.

    It has no length, so that no mask is made of it: the caller passes position ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Zero: every sequence has its own."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The sizes of what ``update`` returns: the new states."""
        return query_length, 0


class SlabCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """A ``transformers.Cache`` over preallocated slabs, with whole chunks copied in and out at once."""

    def __init__(self, layout: KVLayout, *, capacity: int, batch: int = 1) -> None:
        self.layout = layout
        self.capacity = rounded_capacity(capacity)
        self._slabs: list[tuple[torch.Tensor, list[int]]] = []  # ([slots, batch, heads, capacity, dim], slots)
        stores: list[torch.Tensor] = [torch.empty(0)] * len(layout.slots)
        for spec, slots in layout.groups.items():
            shape = (len(slots), batch, spec.heads, self.capacity, spec.dim)
            slab = torch.empty(shape, dtype=spec.dtype, device=spec.device)
            if batch > 1:
                slab.zero_()  # padding is masked, but masked NaNs would still spread through 0 * NaN
            self._slabs.append((slab, slots))
            for index, slot in enumerate(slots):
                stores[slot] = slab[index]
        super().__init__(layers=[SlabLayer(k, v) for k, v in zip(stores[::2], stores[1::2], strict=True)])

    @property
    def slabs(self) -> list[torch.Tensor]:
        """The storage, [slots, batch, heads, capacity, dim] for each of ``layout.groups`` in that order."""
        return [slab for slab, _ in self._slabs]

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs."""
        return sum(slab.numel() * slab.element_size() for slab, _ in self._slabs)

    @property
    def is_poolable(self) -> bool:
        """Whether every layer still lives in its slab (no growth, no batch operation since)."""
        return all(layer.in_slab for layer in self.layers)

    def set_length(self, length: int) -> None:
        """Declare positions ``[0, length)`` of every layer to be the sequence so far."""
        for layer in self.layers:
            layer.set_length(length)

    def reserve(self, positions: int) -> None:
        """Have storage for this many positions in every layer."""
        for layer in self.layers:
            layer.reserve(positions)

    def place(self, start: int, tensors: Sequence[torch.Tensor], *, row: int = 0) -> None:
        """Copy a block's tensors (one [slots, heads, tokens, dim] per slab) to positions from ``start`` on."""
        for (slab, _), block in zip(self._slabs, tensors, strict=True):
            slab[:, row, :, start : start + block.shape[2]].copy_(block, non_blocking=True)

    def wipe(self, start: int, end: int) -> None:
        """Set positions ``[start, end)`` of every sequence to zero."""
        if self.is_poolable:
            for slab, _ in self._slabs:
                slab[:, :, :, start:end].zero_()
            return
        for layer in self.layers:
            layer.key_store[:, :, start:end].zero_()
            layer.value_store[:, :, start:end].zero_()

    def span(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Positions ``[start, end)`` of sequence 0 as :meth:`place` takes them: views where they can be."""
        if self.is_poolable:
            return tuple(slab[:, 0, :, start:end] for slab, _ in self._slabs)
        return tuple(
            torch.stack([self._slot_store(slot)[0, :, start:end] for slot in slots]) for _, slots in self._slabs
        )

    def extract(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Copies of positions ``[start, end)`` of sequence 0, which share no memory with this cache."""
        return tuple(view.clone(memory_format=torch.contiguous_format) for view in self.span(start, end))

    def _slot_store(self, slot: int) -> torch.Tensor:
        layer = self.layers[slot // 2]
        store: torch.Tensor = layer.value_store if slot % 2 else layer.key_store
        return store

    @contextmanager
    def rewriting(
        self, positions: torch.Tensor, *, watch: Sequence[int] = (), spread: Spreading | None = None
    ) -> Iterator[None]:
        """Within this block the model's new keys and values replace ``positions`` instead of being appended.

        The layers in ``watch`` record in ``changes`` how far the new ones are from the old; ``spread`` spreads that
        change to other positions.
        """
        try:
            self.narrow(positions, from_layer=0, spread=spread)
            for index in watch:
                self.layers[index].watched = True
            yield
        finally:
            for layer in self.layers:
                layer.rewritten, layer.watched, layer.changes, layer.spread = None, False, None, None

    def narrow(self, positions: torch.Tensor, *, from_layer: int, spread: Spreading | None = None) -> None:
        """Replace only these positions from this layer on."""
        layers = self.layers[from_layer:]
        on = {device: positions.to(device) for device in {layer.device for layer in layers}}  # one copy per device
        for index, layer in enumerate(layers, from_layer):
            layer.rewritten = on[layer.device]
            layer.spread = partial(spread.apply, index) if spread is not None else None


def stock_cache() -> Cache:
    """A cache of Transformers' own that keeps everything: what ours is held against."""
    return DynamicCache()


def layout_of(cache: Cache) -> KVLayout:
    """The layout of a filled stock cache."""
    return KVLayout(
        tuple(
            TensorSpec(tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)
            for layer in cache.layers
            for tensor in (layer.keys, layer.values)
        )
    )
