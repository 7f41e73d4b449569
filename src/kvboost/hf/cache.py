"""The cache a model writes its keys and values into: preallocated, growing, one slab per tensor shape.

Made by the engine for every request (or taken from its pool) and passed to the model's own forward and ``generate``.
Invariant: positions ``[0, length)`` of every layer hold that sequence's KV; attention never sees what lies after them.
Recurrent layers hold the states of the same tokens: who sets another length places the states that belong to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvboost.capacity import rounded_capacity
from kvboost.hf.cache_layers import (
    CountingLayer,
    SlabIndexedLayer,
    SlabLayer,
    SlabStateLayer,
    Spreading,
    StateLayer,
    StateSpec,
)

# What Transformers has for a layer that keeps nothing; its older versions have an empty recurrent one.
_Nothing: Any = getattr(cache_utils, "DummyLayer", partial(StateLayer, ()))


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
    """Which tensors a model's cache holds.

    ``slots[2 * i]`` are the keys of the i-th layer that has KV, ``slots[2 * i + 1]`` its values. Behind those, in the
    order of ``indexed``, are the keys by which layers of sparse attention choose what they attend to.
    """

    slots: tuple[TensorSpec, ...]
    without_kv: tuple[int, ...] = ()
    """Layers that keep no KV."""
    states: tuple[StateSpec, ...] = ()
    """What recurrent layers keep, in the order of the layers."""
    indexed: tuple[int, ...] = ()
    """Layers that keep index keys beside KV."""

    @property
    def num_layers(self) -> int:
        """Layers of the model, with KV and without."""
        return (len(self.slots) - len(self.indexed)) // 2 + len(self.without_kv)

    @cached_property
    def with_kv(self) -> tuple[int, ...]:
        """Layers that keep KV, in the order of the slots."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.without_kv)

    @cached_property
    def states_by_layer(self) -> dict[int, list[StateSpec]]:
        """The recurrent layers and what each keeps."""
        found: dict[int, list[StateSpec]] = {}
        for spec in self.states:
            found.setdefault(spec.layer, []).append(spec)
        return found

    @property
    def counts(self) -> bool:
        """Whether no layer attends: then zeros in the slots of a recurrent one tell how many tokens there are."""
        return bool(self.states) and self.slots[0].dim == 1

    def layers_of(self, with_kv: Sequence[Any]) -> list[Any]:
        """All layers of a cache, where ``with_kv`` are those that have KV."""
        found = dict(zip(self.with_kv, with_kv, strict=True))
        found |= {layer: StateLayer(specs) for layer, specs in self.states_by_layer.items() if layer not in found}
        return [found.get(layer) or _Nothing() for layer in range(self.num_layers)]

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states, however long it is."""
        return sum(spec.nbytes for spec in self.states)

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


class SlabCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """A ``transformers.Cache`` over preallocated slabs, with whole chunks copied in and out at once."""

    def __init__(self, layout: KVLayout, *, capacity: int, batch: int = 1) -> None:
        self.layout = layout
        self.capacity = rounded_capacity(capacity)
        self._slabs: list[tuple[torch.Tensor, list[int]]] = []  # ([slots, batch, heads, capacity, dim], slots)
        stores: list[torch.Tensor] = [torch.empty(0)] * len(layout.slots)
        for spec, slots in layout.groups.items():
            shape = (len(slots), batch, spec.heads, self.capacity, spec.dim)
            with torch.inference_mode(False):  # a pooled slab is written outside the caller's inference mode too
                slab = torch.empty(shape, dtype=spec.dtype, device=spec.device)
            if batch > 1:
                slab.zero_()  # padding is masked, but masked NaNs would still spread through 0 * NaN
            self._slabs.append((slab, slots))
            for index, slot in enumerate(slots):
                stores[slot] = slab[index]
        own, pairs = layout.states_by_layer, len(layout.slots) - len(layout.indexed)
        indexes = dict(zip(layout.indexed, stores[pairs:], strict=True))
        self._with_kv = [
            (CountingLayer if layout.counts else SlabStateLayer)(keys, values, own[layer])
            if layer in own
            else SlabIndexedLayer(keys, values, indexes[layer])
            if layer in indexes
            else SlabLayer(keys, values)
            for layer, keys, values in zip(layout.with_kv, stores[:pairs:2], stores[1:pairs:2], strict=True)
        ]
        super().__init__(layers=layout.layers_of(self._with_kv))
        self._with_states: list[StateLayer] = [self.layers[layer] for layer in own]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A recurrent layer asks for it once in a forward: the one place where a single token can be counted."""
        layer = self.layers[layer_idx]
        if isinstance(layer, CountingLayer) and state_idx == 0:
            layer.count(1)
        found: torch.Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return found

    @property
    def slabs(self) -> list[torch.Tensor]:
        """The storage, [slots, batch, heads, capacity, dim] for each of ``layout.groups`` in that order."""
        return [slab for slab, _ in self._slabs]

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs, and of a sequence's states."""
        return sum(slab.numel() * slab.element_size() for slab, _ in self._slabs) + self.layout.state_bytes

    @property
    def is_poolable(self) -> bool:
        """Whether every layer still lives in its slab (no growth, no batch operation since)."""
        return all(layer.in_slab for layer in self._with_kv)

    def set_length(self, length: int) -> None:
        """Declare positions ``[0, length)`` of every layer to be the sequence so far."""
        for layer in self._with_kv:
            layer.set_length(length)
        if length == 0:
            for recurrent in self._with_states:
                recurrent.forget()

    def reserve(self, positions: int) -> None:
        """Have storage for this many positions in every layer."""
        for layer in self._with_kv:
            layer.reserve(positions)

    def states(self) -> tuple[torch.Tensor, ...]:
        """The recurrent states of sequence 0, in the order of the layout: views, which the next token overwrites.

        There are none before the first token.
        """
        return tuple(tensor[0] for layer in self._with_states for tensor in layer.states())

    def place_states(self, tensors: Sequence[torch.Tensor]) -> None:
        """Go on after copies of these, as :meth:`states` gave them."""
        left = iter(zip(self.layout.states, tensors, strict=True))
        for layer in self._with_states:
            copies = [tensor.to(spec.device, copy=True)[None] for spec, tensor in islice(left, len(layer.specs))]
            layer.set_states(copies)

    def place(self, start: int, tensors: Sequence[torch.Tensor], *, row: int = 0) -> None:
        """Copy a block's tensors (one [slots, heads, tokens, dim] per slab) to positions from ``start`` on."""
        for (slab, _), block in zip(self._slabs, tensors, strict=True):
            slab[:, row, :, start : start + block.shape[2]].copy_(block, non_blocking=True)

    def wipe(self, start: int, end: int) -> None:
        """Set positions ``[start, end)`` of every sequence to zero."""
        stores = self.slabs if self.is_poolable else map(self._slot_store, range(len(self.layout.slots)))
        for store in stores:
            store[..., start:end, :].zero_()

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
        index = slot - 2 * len(self._with_kv)
        if index >= 0:
            index_store: torch.Tensor = self.layers[self.layout.indexed[index]].index_store
            return index_store
        layer = self._with_kv[slot // 2]
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


def stock_cache(config: Any = None) -> Cache:
    """A cache of Transformers' own that keeps everything: what ours is held against.

    Without the ``config`` of a model with recurrent layers it has none for those.
    """
    kinds: list[Any] = DynamicCache(config=config).layers if config is not None else []
    if all(
        isinstance(layer, DynamicLayer) and not (is_recurrent(layer) or hasattr(layer, "update_indexer"))
        for layer in kinds
    ):
        return DynamicCache()  # no layer of it has a window
    return Cache(layers=[_without_window(layer) for layer in kinds])


def is_recurrent(layer: Any) -> bool:
    """Whether this layer of a cache keeps more than one entry per token."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _without_window(layer: Any) -> Any:
    if is_recurrent(layer):
        whole = LinearAttentionAndFullAttentionLayer if isinstance(layer, CacheLayerMixin) else LinearAttentionLayer
        return whole(number_of_states=layer.number_of_states)
    if hasattr(layer, "update_indexer"):
        return type(layer)()
    return DynamicLayer() if isinstance(layer, CacheLayerMixin) else layer


def layout_of(cache: Cache) -> KVLayout:
    """The layout of a filled stock cache."""
    slots: list[TensorSpec] = []
    index_slots: dict[int, TensorSpec] = {}
    without_kv: list[int] = []
    states: list[StateSpec] = []
    for index, layer in enumerate(cache.layers):
        if is_recurrent(layer):
            for kind, tensors in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                states += [
                    StateSpec(index, kind, i, tuple(tensor.shape[1:]), tensor.dtype, tensor.device)
                    for i, tensor in tensors.items()
                    if tensor is not None
                ]
        if not isinstance(layer, CacheLayerMixin) or not layer.is_initialized:
            without_kv.append(index)
            continue
        slots += [
            TensorSpec(tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)
            for tensor in (layer.keys, layer.values)
        ]
        if (keys := getattr(layer, "indexer_keys", None)) is not None:  # [batch, tokens, dim]
            index_slots[index] = TensorSpec(1, keys.shape[2], keys.dtype, keys.device)
    if not slots and states:  # a chunk consists of something, and a cache knows its length
        slots = [TensorSpec(1, 1, states[0].dtype, states[0].device)] * 2
        without_kv.remove(states[0].layer)
    return KVLayout((*slots, *index_slots.values()), tuple(without_kv), tuple(states), tuple(index_slots))
