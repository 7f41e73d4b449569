"""Linear layers whose rows do not depend on how many are computed together.

Used by :mod:`kvboost.hf.numerics.tiles` around every step. A matrix product rounds differently for different numbers
of rows, because its kernel splits the sum over the inner dimension by the shape of the whole call. But the kernels fall
into few classes: within a class every row has the same bits, whatever the call's size and the row's place in it. A
layer is tested once for the sizes of a class, and only those sizes are ever run. A step of another length is covered
by calls of such sizes that overlap, or is padded. Invariant: only sizes that were tested are run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Rows = Callable[[torch.Tensor], torch.Tensor]
"""A layer applied to [rows, inputs]."""

_CLASSES = (32, 48)
"""A class is named by one of its sizes. oneDNN splits no sum for up to 32 rows, and splits it in one way from about 48
on; MKL changes its kernel at 4 or 16 rows and at about 128."""
_LARGER = (64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 2048)
_TEST_ROWS = 192  # a multiple of each class' size; larger calls repeat them
_USUAL = (20, 280, 2000)
"""Lengths of steps that a class is judged by: a question, a short prompt, a long one."""


@dataclass(frozen=True)
class RowSizes:
    """Sizes of calls that give every row the same bits."""

    smallest: int
    """Fewer rows are padded to this."""
    dense: int
    """Every size from ``smallest`` to this one is in the class."""
    larger: tuple[int, ...]
    """The sizes above, ascending."""
    call_cost: int
    """What a call costs beside its rows, as a number of rows."""
    test: Callable[[int], bool] | None = field(default=None, compare=False)
    """Whether another size is in the class, by running it: a step in one call needs no copies."""
    tested: dict[int, bool] = field(default_factory=dict, compare=False)
    """Results of that."""

    @property
    def overhead(self) -> float:
        """The work for steps of usual lengths, divided by that of one call without padding each."""
        return sum(self._work(rows) / (rows + self.call_cost) for rows in _USUAL) / len(_USUAL)

    def allows(self, rows: int) -> bool:
        """Whether this many rows may be run as they are."""
        if self.smallest <= rows <= self.dense or rows in self.larger:
            return True
        if self.test is None or rows <= self.dense:
            return False
        if rows not in self.tested:
            self.tested[rows] = self.test(rows)
        return self.tested[rows]

    def size_for(self, rows: int) -> int:
        """The size of the calls that cover this many rows with the least work; it may be more than ``rows``."""
        if rows <= self.dense:
            return max(rows, self.smallest)
        return min((*self.larger, self.dense), key=lambda size: self._calls(rows, size))

    def _work(self, rows: int) -> int:
        return self._calls(rows, self.size_for(rows))

    def _calls(self, rows: int, size: int) -> int:
        return -(-rows // size) * (size + self.call_cost)


def cancelling(inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, inputs] and weights [outputs, inputs] whose products are zero but for rounding.

    What is left shows the order of the sums in every element, where other data would show it in one of thousands.
    """
    generator = torch.Generator().manual_seed(inputs)
    half, places = inputs // 2, torch.randperm(inputs, generator=generator)
    rows, weights = torch.zeros(_TEST_ROWS, inputs), torch.zeros(outputs, inputs)
    magnitudes = 2.0 ** torch.randint(-6, 7, (half,), generator=generator)
    values = torch.randn(_TEST_ROWS, half, generator=generator) * magnitudes
    factors = torch.randn(outputs, half, generator=generator)
    for places_of_half, sign in ((places[:half], 1.0), (places[half : 2 * half], -1.0)):
        rows[:, places_of_half], weights[:, places_of_half] = values * sign, factors
    return rows, weights


def find_classes(layer: Rows, rows: torch.Tensor, *, call_cost: int, test_later: bool) -> list[RowSizes]:
    """The classes of sizes that ``layer`` can be run with, tested on these rows.

    With ``test_later``, the layer and the rows are kept to test other sizes when they are wanted.
    """
    return [_class_of(size, layer, rows, call_cost, test_later) for size in _CLASSES]


def _class_of(size: int, layer: Rows, rows: torch.Tensor, call_cost: int, test_later: bool) -> RowSizes:
    """The sizes that give rows the same bits as calls of ``size``."""
    expected = torch.cat([layer(rows[start : start + size]) for start in range(0, len(rows), size)])

    def agrees(other: int) -> bool:
        # Every row: kernels treat the rows where two threads, or two blocks, meet in ways of their own.
        times = -(-other // len(rows))
        found = layer(rows.repeat(times, 1)[:other] if times > 1 else rows[:other])
        return torch.equal(found, expected.repeat(times, 1)[:other])

    smallest = size
    while smallest > 1 and agrees(smallest - 1):
        smallest -= 1
    larger = tuple(other for other in _LARGER if agrees(other))
    return RowSizes(smallest, size, larger, call_cost, agrees if test_later else None)


def run_rows(layer: Rows, x: torch.Tensor, sizes: RowSizes) -> torch.Tensor:
    """``layer`` applied to [rows, inputs], in calls of these sizes."""
    count = x.shape[0]
    if sizes.allows(count):
        return layer(x)
    size = sizes.size_for(count)
    if count < size:
        padded = x.new_zeros(size, x.shape[1])
        padded[:count] = x
        return layer(padded)[:count]
    first = layer(x[:size])
    result = first.new_empty(count, first.shape[1])
    result[:size] = first
    for start in range(size, count, size):
        start = min(start, count - size)  # the last call overlaps the one before
        result[start : start + size] = layer(x[start : start + size])
    return result
