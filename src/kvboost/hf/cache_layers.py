"""The layers of a cache: what attention wrote for every token, and what a recurrent layer keeps of all it has read.

Made by :mod:`kvboost.hf.cache`. Invariants: positions ``[0, length)`` of a layer with KV hold that sequence's KV, and
attention never sees what lies after them; a layer without a previous state reads as at the beginning of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from kvboost.capacity import rounded_capacity


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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new states, for attention that writes them where each sequence lies."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Zero: every sequence has its own."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The sizes of what ``update`` returns: the new states."""
        return query_length, 0


class SlabIndexedLayer(SlabLayer):
    """A layer of sparse attention: keeps the keys by which it chooses positions, too."""

    def __init__(self, key_store: torch.Tensor, value_store: torch.Tensor, index_store: torch.Tensor) -> None:
        self.index_store = index_store  # [batch, 1, capacity, dim]
        super().__init__(key_store, value_store)

    def set_length(self, length: int) -> None:
        """Declare positions ``[0, length)`` to be the sequence so far."""
        self.length = self._indexed = length

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Where these positions are in text, [time, height and width, batch, length], for models that keep it here."""
        batch, held = len(self.key_store), torch.arange(self.length, device=self.device)
        return held.expand(3, batch, -1) if self.length else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        """Those of text are no news."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As above; index keys are written by a call of their own, before or after it."""
        indexed = self._indexed
        found = super().update(*args, **kwargs)
        self._indexed = indexed
        return found

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Write new index keys, [batch, new, dim]; return those of all positions."""
        start, end = self._indexed, self._indexed + states.shape[1]
        self.reserve(end)
        self.index_store[:, 0, start:end].copy_(states)
        self._indexed = end
        return self.index_store[:, 0, :end]

    def reserve(self, positions: int) -> None:
        """Have storage for this many positions."""
        super().reserve(positions)
        if positions > self.index_store.shape[-2]:
            self.index_store = _grown(self.index_store, self._indexed, positions)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        self.index_store = self.index_store.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences named by ``indices``."""
        super().batch_select_indices(indices)
        self.index_store = self.index_store[indices.to(self.index_store.device)]


@dataclass(frozen=True)
class StateSpec:
    """One tensor that a recurrent layer keeps, without the batch: as large after one token as after a thousand."""

    layer: int
    kind: str
    """``"conv"`` or ``"recurrent"``, as Transformers calls them."""
    index: int
    """Among the layer's tensors of this kind."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped
    """One recurrent layer's cache: its states of each sequence in the batch."""

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        super().__init__(number_of_states=max((spec.index for spec in specs), default=0) + 1)
        self._specs = list(specs)

    @property
    def specs(self) -> list[StateSpec]:
        """What it keeps, in the order of the layout."""
        return self._specs

    def states(self) -> list[torch.Tensor]:
        """Its tensors, each [batch, ...], in that order; they change with the next token."""
        return [self._of_kind(spec.kind)[spec.index] for spec in self._specs]

    def set_states(self, tensors: Sequence[torch.Tensor]) -> None:
        """Go on after these, each [batch, ...]; they are kept, and overwritten by the next token."""
        for spec, tensor in zip(self._specs, tensors, strict=True):
            self._of_kind(spec.kind)[spec.index] = tensor
            if spec.kind == "conv":
                self.conv_kernel_size[spec.index] = tensor.shape[-1]
                self.is_conv_states_initialized[spec.index] = True
            else:
                self.is_recurrent_states_initialized[spec.index] = True
            self.has_previous_state[spec.index] = True
            self.dtype, self.device = tensor.dtype, tensor.device

    def forget(self) -> None:
        """Begin a text, with as many sequences as that has."""
        for tensors in (self.conv_states, self.recurrent_states):
            tensors.update(dict.fromkeys(tensors))
        for flags in (self.is_conv_states_initialized, self.is_recurrent_states_initialized, self.has_previous_state):
            flags.update(dict.fromkeys(flags, False))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times."""
        if any(self.has_previous_state.values()):
            self.set_states([tensor.repeat_interleave(repeats, dim=0) for tensor in self.states()])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences named by ``indices``."""
        if any(self.has_previous_state.values()):
            self.set_states([tensor[indices.to(tensor.device)] for tensor in self.states()])

    def _of_kind(self, kind: str) -> dict[int, Any]:
        found: dict[int, Any] = self.conv_states if kind == "conv" else self.recurrent_states
        return found


class SlabStateLayer(StateLayer, SlabLayer):
    """A layer that attends and has recurrent states beside."""

    is_compileable = False

    def __init__(self, key_store: torch.Tensor, value_store: torch.Tensor, specs: Sequence[StateSpec]) -> None:
        SlabLayer.__init__(self, key_store, value_store)
        StateLayer.__init__(self, specs)
        self.dtype, self.device = key_store.dtype, key_store.device

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Transformers names what it gives to make states, and does not name keys and values."""
        if not args:
            StateLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Forget the sequence, keep the storage."""
        SlabLayer.reset(self)
        self.forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Recurrent states do not go back."""
        raise NotImplementedError("a recurrent state takes no tokens back")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence b becomes what sequence ``beam_idx[b]`` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times."""
        StateLayer.batch_repeat_interleave(self, repeats)
        SlabLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences named by ``indices``."""
        StateLayer.batch_select_indices(self, indices)
        SlabLayer.batch_select_indices(self, indices)


class CountingLayer(SlabStateLayer):
    """The first layer of a model without attention: has a zero per token for KV, and so knows how many it has read."""

    def count(self, tokens: int) -> None:
        """So many more were read."""
        zeros = self.key_store.new_zeros(self.key_store.shape[0], 1, tokens, 1)
        SlabLayer.update(self, zeros, zeros)

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Only a forward of several tokens comes here; the cache has counted its first one."""
        self.count(conv_states.shape[-1] - 1)
        found: torch.Tensor = super().update_conv_state(conv_states, *args, **kwargs)
        return found
