"""Where the KV of sequences lies that are decoded together: rows of tensors with one capacity each.

Filled by the batch runner, read by :mod:`kvboost.hf.ragged`. Sequences of similar length share a group, so that
attention over all of them is one padded call. Invariants: the rows in use are the first ones of their group; every
position that a padded call reads is a number (a masked NaN would still spread). Memory: a row is never larger than
what admission reserves for its sequence; rows that nobody uses take no more than what the caller leaves for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost.capacity import row_capacity
from kvboost.hf.cache import KVLayout

_MIN_SPARE = 3  # unused rows of a group that grows, if there is memory: the others are not copied for each that comes
_CLEARED_AT_ONCE = 256  # positions; then rarely in a step, and little memory is written to before it is needed


class RowGroup:
    """Rows of one capacity: a tensor [rows, heads, capacity, dim] for each slot of the layout, one for each state."""

    def __init__(self, layout: KVLayout, capacity: int) -> None:
        self.layout, self.capacity = layout, capacity
        self.rows: list[Row] = []
        self.stores = [self._empty(slot, 0) for slot in range(len(layout.slots))]
        self.states = [self._no_states(index, 0) for index in range(len(layout.states))]  # [rows, ...]
        self._cleared = 0  # rows in use are numbers up to here, whatever their lengths

    @property
    def allocated(self) -> int:
        """Rows there is memory for."""
        return self.stores[0].shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.capacity * self.layout.bytes_per_token + self.layout.state_bytes

    @property
    def spare(self) -> int:
        """Rows that nobody uses."""
        return self.allocated - len(self.rows)

    def used_states(self, index: int) -> torch.Tensor:
        """One kind of state of every row in use, [rows, ...]: a view."""
        return self.states[index][: len(self.rows)]

    def add(self, *, spare_bytes: int, filled: int) -> Row:
        """One more row, of which the caller fills the first ``filled`` positions before anything reads them.

        If memory must be allocated, spare rows may take ``spare_bytes`` of it.
        """
        used = len(self.rows)
        if not self.spare:
            self.allocate(used + 1 + min(max(_MIN_SPARE, used), spare_bytes // self.row_bytes))
        for store in self.stores:
            store[used, :, filled : self._cleared].zero_()
        row = Row(self, used)
        self.rows.append(row)
        return row

    def remove(self, row: Row) -> None:
        """The last row takes the place of the removed one."""
        last = self.rows.pop()
        if last is not row:
            for store in self.stores:
                store[row.index, :, : self._cleared].copy_(store[last.index, :, : self._cleared])
            for states in self.states:
                states[row.index].copy_(states[last.index])
            last.index = row.index
            self.rows[row.index] = last

    def clear_up_to(self, positions: int) -> None:
        """Let a padded call read this many positions of every row."""
        if positions <= self._cleared:
            return
        end = min(-(-positions // _CLEARED_AT_ONCE) * _CLEARED_AT_ONCE, self.capacity)
        for store in self.stores:
            store[: len(self.rows), :, self._cleared : end].zero_()
        self._cleared = end

    def allocate(self, rows: int) -> None:
        """Move to storage for this many rows, slot by slot: only one of them is there twice at any moment."""
        used = len(self.rows)
        for slot, old in enumerate(self.stores):
            new = self._empty(slot, rows)
            new[:used, :, : self._cleared].copy_(old[:used, :, : self._cleared])
            self.stores[slot] = new
        for index, old in enumerate(self.states):
            self.states[index] = self._no_states(index, rows)
            self.states[index][:used].copy_(old[:used])

    def _empty(self, slot: int, rows: int) -> torch.Tensor:
        spec = self.layout.slots[slot]
        return torch.empty(rows, spec.heads, self.capacity, spec.dim, dtype=spec.dtype, device=spec.device)

    def _no_states(self, index: int, rows: int) -> torch.Tensor:
        spec = self.layout.states[index]
        return torch.zeros(rows, *spec.shape, dtype=spec.dtype, device=spec.device)


class Row:
    """One sequence in a group. A :class:`kvboost.core.backend.KVCache`."""

    is_poolable = False  # its group goes on without it

    def __init__(self, group: RowGroup, index: int) -> None:
        self.group, self.index = group, index
        self._length = 0

    @property
    def order(self) -> tuple[int, int]:
        """Sorts rows into the order of the batch."""
        return self.capacity, self.index

    @property
    def capacity(self) -> int:
        """Positions it can hold."""
        return self.group.capacity

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.group.row_bytes

    def get_seq_length(self) -> int:
        """Positions it holds."""
        return self._length

    def set_length(self, length: int) -> None:
        """Declare positions ``[0, length)`` to be the sequence so far."""
        if length > self.capacity:
            raise ValueError(f"{length} positions do not fit a row of {self.capacity}")
        self._length = length

    def place(self, start: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a block's tensors (one [slots, heads, tokens, dim] per spec) to positions from ``start`` on."""
        self.group.clear_up_to(start + tensors[0].shape[2])
        for slots, block in zip(self.group.layout.groups.values(), tensors, strict=True):
            targets = self._views(slots, start, start + block.shape[2])
            torch._foreach_copy_(targets, list(block.unbind(0)), non_blocking=True)

    def span(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Copies of positions ``[start, end)``, as :meth:`place` takes them."""
        return tuple(torch.stack(self._views(slots, start, end)) for slots in self.group.layout.groups.values())

    extract = span

    def states(self) -> tuple[torch.Tensor, ...]:
        """The states of its recurrent layers: views."""
        return tuple(states[self.index] for states in self.group.states)

    def place_states(self, tensors: Sequence[torch.Tensor]) -> None:
        """Go on after copies of these states."""
        for mine, tensor in zip(self.states(), tensors, strict=True):
            mine.copy_(tensor)

    def wipe(self, start: int, end: int) -> None:
        """Set positions ``[start, end)`` to zero."""
        torch._foreach_zero_(self._views(range(len(self.group.stores)), start, end))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not for rows: beams are not batched with other requests."""
        raise NotImplementedError("a row of a batch is one sequence; copy it into a cache of its own")

    def _views(self, slots: Sequence[int], start: int, end: int) -> list[torch.Tensor]:
        return [self.group.stores[slot][self.index, :, start:end] for slot in slots]


class RowBatch:
    """All sequences that are decoded together."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._groups: dict[int, RowGroup] = {}  # by capacity
        self._spare_limit = 0

    @property
    def groups(self) -> list[RowGroup]:
        """Those with rows in use, the shortest first: the order of the batch."""
        return [self._groups[capacity] for capacity in sorted(self._groups)]

    @property
    def spare_bytes(self) -> int:
        """Bytes of rows that nobody uses."""
        return sum(group.spare * group.row_bytes for group in self._groups.values())

    def limit_spare(self, nbytes: int) -> None:
        """Let spare rows take this much from now on; free what is more."""
        self._spare_limit = max(0, nbytes)
        for group in self.groups:
            if self.spare_bytes > self._spare_limit and group.spare:
                group.allocate(len(group.rows))

    def add(self, *, tokens: int, filled: int = 0) -> Row:
        """A row with capacity for ``tokens``, of which the caller fills the first ``filled`` positions at once."""
        capacity = row_capacity(tokens)
        if capacity not in self._groups:
            self._groups[capacity] = RowGroup(self.layout, capacity)
        return self._groups[capacity].add(spare_bytes=max(0, self._spare_limit - self.spare_bytes), filled=filled)

    def remove(self, row: Row) -> None:
        """The row's sequence is over, or continues in another cache."""
        row.group.remove(row)
        if not row.group.rows:
            del self._groups[row.capacity]
        self.limit_spare(self._spare_limit)
