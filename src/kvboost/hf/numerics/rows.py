"""Linear layers whose rows do not depend on how many are computed together.

Used by :mod:`kvboost.hf.numerics.tiles` around every step. A matrix product rounds differently for different numbers
of rows, because its kernel splits the sum over the inner dimension by the shape of the whole call. But the kernels fall
into few classes: within a class every row has the same bits, whatever the call's size and the row's place in it. A
layer is tested once for the sizes of a class, and only those sizes are ever run. A step of another length is covered
by calls of such sizes that overlap, or is padded. Invariant: only sizes that were tested are run.

Where a layer's own kernel has no class that is large enough, oneDNN's prepacked one may have: it computes with a copy
of the weights in the layout it wants. In float32 the rows of a packed layer do not depend on their number at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvboost.hf.numerics.forwards import set_on
from kvboost.hf.packed_weights import is_packed

Rows = Callable[[torch.Tensor], torch.Tensor]
"""A layer applied to [rows, inputs]."""
RowsInto = Callable[[torch.Tensor, torch.Tensor], object]
"""The same, written into the second: [rows, outputs]."""

_CLASSES = (32, 48)
"""A class is named by one of its sizes. oneDNN splits no sum for up to 32 rows, and splits it in one way from about 48
on; MKL changes its kernel at 4 or 16 rows and at about 128."""
_LARGER = (64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 1024, 2048)
_TEST_ROWS = 192  # a multiple of each class' size; larger calls repeat them
_TESTED_SINGLY, _MULTIPLE = 1024, 256
"""Sizes that are tested when they are wanted: every one up to the first, so that a short step is one call; above it
multiples of the second, so that few are ever tested and a long step ends with a short call."""
_ALIGNED = 64  # bytes; torch aligns new tensors so
_USUAL = (20, 80, 160, 320, 640, 2048)
"""Lengths of steps that a class is judged by, from a question after a known text to a long prompt: a class may be good
at both ends and need many calls between them. All but the first are tested sizes."""
CALL_COST = 64  # what a call of a layer costs beside its rows, as a number of rows


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
    """Whether another size is in the class, by running it."""
    tested: dict[int, bool] = field(default_factory=dict, compare=False)
    """Results of that."""
    covers: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False)
    """Results of :meth:`cover`."""
    step: int = field(default=1, compare=False)
    """Of the sizes that are tested when they are wanted, only multiples of this are."""

    @property
    def overhead(self) -> float:
        """The work for steps of usual lengths, divided by that of the layer's own calls, one for each."""
        known = replace(self, test=None, tested={}, covers={})
        return sum(known._work(known.cover(rows)) / (rows + CALL_COST) for rows in _USUAL) / len(_USUAL)

    def allows(self, rows: int) -> bool:
        """Whether this many rows may be run as they are."""
        if self.smallest <= rows <= self.dense or rows in self.larger:
            return True
        if self.test is None or rows <= self.dense or rows % (self.step if rows <= _TESTED_SINGLY else _MULTIPLE):
            return False
        if rows not in self.tested:
            self.tested[rows] = self.test(rows)
        return self.tested[rows]

    def cover(self, rows: int) -> tuple[int, ...]:
        """Sizes of calls that cover this many rows with little work. Only the last may be for more than is left."""
        if rows not in self.covers:
            self.covers[rows] = self._cover(rows)
        return self.covers[rows]

    def _cover(self, rows: int) -> tuple[int, ...]:
        if self.allows(rows):
            return (rows,)
        if rows <= self.smallest:
            return (self.smallest,)
        if self.step > 1 and self.allows(multiple := -(-rows // self.step) * self.step):
            return (multiple,)
        alike = [(size,) * -(-rows // size) for size in (*self.larger, self.dense)]
        multiple = rows // _MULTIPLE * _MULTIPLE
        first = multiple if self.allows(multiple) else max(size for size in (self.dense, *self.larger) if size < rows)
        falling = (first,) * (rows // first) + (self.cover(rows % first) if rows % first else ())
        return min((*alike, falling), key=self._work)

    def _work(self, calls: tuple[int, ...]) -> int:
        return sum(calls) + len(calls) * self.call_cost


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
    larger = {size: _distinct(layer, rows, size) for size in _LARGER}  # once for all classes: they take time
    return [_class_of(size, layer, rows, larger, call_cost, test_later) for size in _CLASSES]


def _distinct(layer: Rows, rows: torch.Tensor, size: int) -> torch.Tensor | None:
    """What a call of ``size`` rows makes of these, repeated as needed; None if equal rows have other bits."""
    # Every row: kernels treat the rows where two threads, or two blocks, meet in ways of their own.
    times = -(-size // len(rows))
    if times == 1:
        return layer(rows[:size])
    found = layer(rows.repeat(times, 1)[:size])
    first = found[: len(rows)]
    return first.clone() if torch.equal(found, first.repeat(times, 1)[:size]) else None


def sizes_like(
    size: int, layer: Rows, rows: torch.Tensor, known: Mapping[int, torch.Tensor | None] | None = None
) -> Callable[[int], bool]:
    """Whether calls of another size give rows the bits of calls of ``size``; ``known`` are the results of some."""
    expected = torch.cat([layer(rows[start : start + size]) for start in range(0, len(rows), size)])

    def test(other: int) -> bool:
        found = known[other] if known and other in known else _distinct(layer, rows, other)
        return found is not None and torch.equal(found, expected[: len(found)])

    return test


def _class_of(
    size: int,
    layer: Rows,
    rows: torch.Tensor,
    larger: Mapping[int, torch.Tensor | None],
    call_cost: int,
    test_later: bool,
) -> RowSizes:
    """The sizes that give rows the same bits as calls of ``size``; ``larger`` are the results of some."""
    test = sizes_like(size, layer, rows, larger)
    smallest = size
    while smallest > 1 and test(smallest - 1):
        smallest -= 1
    tested = {other: test(other) for other in larger}
    members = tuple(other for other, same in tested.items() if same)
    return RowSizes(smallest, size, members, call_cost, test if test_later else None, tested)


_HEAD_ROWS, _MORE_HEAD_ROWS = 16, 64


@torch.no_grad()
def sizes_of_head(module: Any) -> RowSizes:
    """Sizes for a vocabulary projection: too large to be tested in many, and its bits are in no key."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_MORE_HEAD_ROWS, module.weight.shape[1], generator=generator).to(module.weight.dtype)
    parts = torch.split(rows, _HEAD_ROWS)
    expected = [module(part) for part in parts]
    turned = (module(part.roll(1, dims=0)).roll(-1, dims=0) for part in parts)
    if not all(map(torch.equal, turned, expected)):
        return RowSizes(1, 1, (), CALL_COST)  # where a row stands in a call shows: one at a time
    larger = (_MORE_HEAD_ROWS,) if torch.equal(module(rows), torch.cat(expected)) else ()
    return RowSizes(_HEAD_ROWS, _HEAD_ROWS, larger, CALL_COST)


def writer_of(module: torch.nn.Module) -> RowsInto | None:
    """Computes a plain linear layer's rows where they belong, by the kernel that its forward calls; None for others.

    For calls without gradients. Where that kernel may be another (autocast, weights or a forward of their own kind, a
    place that is not aligned as a new tensor is) the rows are computed by the forward and copied.
    """
    if type(module) is not torch.nn.Linear:
        return None

    def into(x: torch.Tensor, out: torch.Tensor) -> None:
        weight, bias = module.weight, getattr(module, "bias", None)
        plain = all(type(one) in (torch.nn.Parameter, torch.Tensor) for one in (weight, bias) if one is not None)
        same = x.device.type == "cpu" and x.dtype == weight.dtype == out.dtype and not torch.is_autocast_enabled("cpu")
        if not plain or not same or set_on(module) is not None or out.data_ptr() % _ALIGNED:
            out.copy_(module.forward(x))
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    return into


def run_rows(layer: Rows, x: torch.Tensor, sizes: RowSizes, *, into: RowsInto | None = None) -> torch.Tensor:
    """``layer`` applied to [rows, inputs], in calls of these sizes. ``into`` saves copying the rows of all but one."""
    count = x.shape[0]
    if sizes.allows(count):
        return layer(x)
    calls = sizes.cover(count)
    if len(calls) == 1:
        return layer(torch.cat((x, x.new_zeros(calls[0] - count, x.shape[1]))))[:count]
    result: torch.Tensor | None = None
    start = 0
    for size in sorted(calls):  # of the first, the rows are copied: let it be the smallest
        start = min(start, count - size)  # the last call overlaps the one before
        part = x[start : start + size]
        if result is not None and into is not None:
            into(part, result[start : start + size])
        else:
            rows = layer(part)
            if result is None:
                result = rows.new_empty(count, rows.shape[1])
            result[start : start + size] = rows
        start += size
    assert result is not None
    return result


_PACKED_ROWS = 128  # a hint for the layout; the same for all, so that the same weights are packed the same way


def can_pack(module: torch.nn.Module) -> bool:
    """Whether this layer is a plain linear layer on a CPU with oneDNN."""
    return (
        type(module) is torch.nn.Linear and set_on(module) is None and can_pack_weight(getattr(module, "weight", None))
    )


def can_pack_weight(weight: Any) -> bool:
    """Whether oneDNN can compute with a copy of these weights, or of each of a stack of them."""
    return (
        isinstance(weight, torch.Tensor)
        and not is_packed(weight)
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedWeight:
    """A packed copy of [outputs, inputs]. Takes as much memory."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.nbytes = weight.nbytes
        self._linear: Any = torch.ops.mkldnn._linear_pointwise
        self._source: tuple[int, int] | None = None
        self._refresh(weight)

    def _refresh(self, weight: torch.Tensor) -> None:
        """Pack again if these are other weights."""
        # Inference tensors count no versions: a write to one of those goes unnoticed.
        source = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        if source != self._source:
            ops: Any = torch.ops.mkldnn
            self._weight = ops._reorder_linear_weight(weight.detach(), _PACKED_ROWS)
            self._source = source

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self._refresh(weight)  # each time: PEFT unmerges within the forward in which adapters are disabled
        result: torch.Tensor = self._linear(x, self._weight, bias, "none", [], "")
        return result


class PackedLinear:
    """One linear layer, packed."""

    def __init__(self, module: torch.nn.Linear) -> None:
        self._module, self._packed = module, PackedWeight(module.weight)
        self.nbytes = self._packed.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._packed(x, self._module.weight, self._module.bias)
