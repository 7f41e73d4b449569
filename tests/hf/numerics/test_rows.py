"""Only sizes that were tested are ever run, and the classes that are found hold no size that rounds otherwise."""

from __future__ import annotations

from bisect import bisect_right
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvboost.core.verify import same_bits
from kvboost.hf.numerics import rows as rows_module
from kvboost.hf.numerics.forwards import replaced
from kvboost.hf.numerics.rows import RowSizes, cancelling, find_classes, run_rows, writer_of

_INPUTS = 3
_LARGER = (64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 1024, 2048)
_ROWS = torch.randn(2048, _INPUTS, generator=torch.Generator().manual_seed(1)).abs() + 1
_TEST_ROWS = _ROWS[:192]


class Layer:
    """Works on each row alone, and records what it was given."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.given.append(x)
        return torch.cat((x.square(), x.sum(1, keepdim=True)), dim=1)

    @property
    def sizes(self) -> list[int]:
        return [len(x) for x in self.given]


@st.composite
def row_sizes(draw: Any) -> RowSizes:
    smallest = draw(st.integers(1, 40))
    dense = draw(st.integers(smallest, 48))
    larger = tuple(sorted(draw(st.sets(st.integers(dense + 1, 400), max_size=5))))
    others = draw(st.none() | st.frozensets(st.integers(dense + 1, 700), max_size=30))
    test = None if others is None else others.__contains__
    return RowSizes(smallest, dense, larger, draw(st.integers(0, 100)), test)


@given(sizes=row_sizes(), count=st.integers(0, 2000))
@example(sizes=RowSizes(20, 32, (64,), 24), count=0)
@example(sizes=RowSizes(20, 32, (64,), 24), count=5)  # padded
@example(sizes=RowSizes(20, 32, (64,), 24), count=60)  # padded to a larger size
@example(sizes=RowSizes(20, 32, (64,), 24), count=70)  # two calls, the second mostly over the first
@example(sizes=RowSizes(20, 32, (64,), 24, test=lambda rows: rows == 70), count=70)  # one call
@example(sizes=RowSizes(20, 32, (64,), 24, test=lambda rows: True), count=1546)  # a multiple and what is left
@settings(deadline=None)
def test_any_number_of_rows_is_covered_by_allowed_sizes(sizes: RowSizes, count: int) -> None:
    layer, x = Layer(), _ROWS[:count]
    result = run_rows(layer, x, sizes)
    assert same_bits(result, Layer()(x))
    for size in layer.sizes:
        assert sizes.smallest <= size <= sizes.dense or size in sizes.larger or (sizes.test and sizes.test(size))
    if len(layer.given) > 1:
        assert all(given.all() for given in layer.given), "rows are padded in a single call only"
        assert sum(layer.sizes[:-1]) < count, "only the last call overlaps the one before"
        assert same_bits(layer.given[-1], x[-layer.sizes[-1] :])
    if count < sizes.smallest:
        assert layer.sizes == [sizes.smallest]
    if sizes.test and sizes.test(count) and count <= 1024:
        assert layer.sizes == [count]


@given(sizes=row_sizes(), count=st.integers(1, 2048))
@settings(deadline=None)
def test_no_single_size_covers_the_rows_with_less_work(sizes: RowSizes, count: int) -> None:
    sizes = RowSizes(sizes.smallest, sizes.dense, sizes.larger, sizes.call_cost)

    def work(choices: RowSizes) -> int:
        layer = Layer()
        run_rows(layer, _ROWS[:count], choices)
        return sum(size + sizes.call_cost for size in layer.sizes)

    least = min(work(RowSizes(size, size, (), sizes.call_cost)) for size in (sizes.dense, *sizes.larger))
    if count <= sizes.dense:
        assert work(sizes) == max(count, sizes.smallest) + sizes.call_cost
    else:
        assert work(sizes) <= least


def test_a_long_step_is_one_long_call_and_a_short_one() -> None:
    asked: list[int] = []

    def test(rows: int) -> bool:
        asked.append(rows)
        return True

    sizes = RowSizes(20, 32, (64, 2048), 24, test)
    assert sizes.cover(280) == (280,)
    assert sizes.cover(6001) == (5888, 113)
    assert sizes.cover(6002) == (5888, 114)
    assert set(asked) == {280, 5888, 113, 114}
    assert len(asked) == 4, "each size is tested once"


def test_a_size_is_tested_once_and_only_above_the_others() -> None:
    asked: list[int] = []

    def test(rows: int) -> bool:
        asked.append(rows)
        return rows == 70

    sizes = RowSizes(20, 32, (64,), 24, test)
    assert [sizes.allows(rows) for rows in (70, 71, 70, 71)] == [True, False, True, False]
    assert [sizes.allows(rows) for rows in (5, 19, 20, 32, 64)] == [False, False, True, True, True]
    assert asked == [70, 71]


class Kernels:
    """A layer that rounds in another way from each of these numbers of rows on."""

    def __init__(self, changes: dict[int, int]) -> None:
        self.starts, self.kernels = zip(*sorted({0: 0, **changes}.items()), strict=True)
        self.calls = 0

    def kernel(self, rows: int) -> int:
        return self.kernels[bisect_right(self.starts, rows) - 1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + 2**-20 * self.kernel(len(x)))


@given(changes=st.dictionaries(st.integers(2, 2100), st.integers(0, 2), max_size=6))
@example(changes={33: 1})  # oneDNN: one class up to 32, another from there on
@example(changes={4: 1, 16: 2, 128: 3})  # MKL
@example(changes={31: 1, 32: 0})  # a gap below: what is under it is not in the class
@example(changes={100: 1, 200: 0})  # and one above, between two larger sizes
@example(changes={2060: 1})  # above the rows there are to test with
@settings(max_examples=40, deadline=None)
def test_classes_are_found_where_rounding_changes(changes: dict[int, int]) -> None:
    layer = Kernels(changes)
    for name, sizes in zip((32, 48), find_classes(layer, _TEST_ROWS, call_cost=24, test_later=True), strict=True):
        alike = {rows for rows in range(1, 2400) if layer.kernel(rows) == layer.kernel(name)}
        assert sizes.dense == name
        assert sizes.smallest == max([rows for rows in range(name) if rows not in alike], default=0) + 1
        assert sizes.larger == tuple(rows for rows in _LARGER if rows in alike)
        for rows in {*range(1, 70), *(start + near for start in layer.starts for near in (-1, 0, 1)), 2100, 2304}:
            tested = rows <= 1024 or rows % 256 == 0
            assert sizes.allows(rows) == (rows in alike and rows >= sizes.smallest and tested), rows


def test_a_large_size_is_run_once_for_all_classes() -> None:
    layer = Layer()
    find_classes(layer, _TEST_ROWS, call_cost=24, test_later=True)
    assert [size for size in layer.sizes if size in _LARGER] == list(_LARGER)


def test_a_class_that_is_good_at_both_ends_alone_is_worse_than_one_for_the_lengths_between() -> None:
    """oneDNN's classes of a 576 by 576 layer in bfloat16: with the first, 80 rows took 2.5 times as long."""
    ends = RowSizes(1, 32, (320, 384, 512, 640, 768, 1024, 2048), 64)
    between = RowSizes(33, 48, (64, 80, 96, 128, 160, 192, 224, 256), 64)
    assert between.overhead < 1.15 < ends.overhead


def test_the_lengths_that_a_class_is_judged_by_are_tested() -> None:
    assert set(rows_module._USUAL[1:]) <= set(_LARGER)


def test_a_size_that_is_in_no_class_is_not_run_again() -> None:
    layer = Kernels({100: 1, 200: 0})
    classes = find_classes(layer, _TEST_ROWS, call_cost=24, test_later=True)
    calls = layer.calls
    assert not any(sizes.allows(128) for sizes in classes)
    assert layer.calls == calls


def test_fewer_rows_for_a_call_are_less_work_than_the_layers_own_calls() -> None:
    assert RowSizes(1, 32, _LARGER, 64).overhead == 1.0
    assert RowSizes(1, 32, _LARGER, 24).overhead < 0.9


def test_without_testing_later_only_what_was_found_is_allowed() -> None:
    layer = Kernels({})
    sizes, _ = find_classes(layer, _TEST_ROWS, call_cost=24, test_later=False)
    calls = layer.calls
    assert (sizes.smallest, sizes.larger) == (1, _LARGER)
    assert [sizes.allows(rows) for rows in (32, 33, 64, 65)] == [True, False, True, False]
    assert layer.calls == calls


@given(place=st.integers(0, 255))
@example(place=0)
@example(place=127)
@example(place=255)
@settings(max_examples=10, deadline=None)
def test_a_row_that_rounds_otherwise_by_its_place_is_seen(place: int) -> None:
    """As of a thread whose share ends there."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        if len(x) in (256, 300):
            result[place] *= 1 + 2**-20
        return result

    for sizes in find_classes(layer, _TEST_ROWS, call_cost=24, test_later=True):
        assert sizes.larger == tuple(rows for rows in _LARGER if rows != 256)
        assert [sizes.allows(rows) for rows in (256, 299, 300, 301)] == [False, True, False, True]


def test_cancelling_rows_show_the_order_of_a_sum_in_every_element() -> None:
    """Rounded to bfloat16, other rows show it in few."""

    def shown(rows: torch.Tensor, weights: torch.Tensor) -> float:
        products = (rows[:, None] * weights).unbind(-1)
        forward, backward = (reduce(torch.add, terms).bfloat16() for terms in (products, products[::-1]))
        return float((forward != backward).float().mean())

    rows, weights = cancelling(512, 8)
    assert (rows.double() @ weights.double().t()).abs().max() < 1e-10
    assert rows.count_nonzero() == rows.numel()
    generator = torch.Generator().manual_seed(1)
    others = torch.randn(rows.shape, generator=generator), torch.randn(weights.shape, generator=generator)
    assert shown(*others) < 0.1
    assert shown(rows, weights) > 0.9


@given(sizes=row_sizes(), count=st.integers(0, 2000))
@example(sizes=RowSizes(20, 32, (64,), 24, test=lambda rows: True), count=1546)
@settings(deadline=None)
def test_rows_written_where_they_belong_are_the_same(sizes: RowSizes, count: int) -> None:
    """And in the same sizes: each part is given to the one or to the other."""
    layer, written, x = Layer(), Layer(), _ROWS[:count]
    result = run_rows(layer, x, sizes, into=lambda part, out: out.copy_(written(part)))
    assert same_bits(result, Layer()(x))
    assert len(written.sizes) == max(0, len(sizes.cover(count)) - 1) or sizes.allows(count)
    for size in layer.sizes + written.sizes:
        assert sizes.smallest <= size <= sizes.dense or size in sizes.larger or (sizes.test and sizes.test(size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [192, 5])
@torch.no_grad()
def test_a_writer_has_the_bits_of_the_layers_own_forward(bias: bool, dtype: torch.dtype, outputs: int) -> None:
    """Five outputs: most places are not aligned."""
    torch.manual_seed(2)
    layer = torch.nn.Linear(576, outputs, bias=bias).to(dtype)
    into = writer_of(layer)
    assert into is not None
    for count in (1, 20, 112, 300, 1792):
        x, out = torch.randn(count, 576).to(dtype), torch.full((count + 64, outputs), torch.nan, dtype=dtype)
        into(x, out[40 : 40 + count])
        assert same_bits(out[40 : 40 + count], layer(x))
        assert out[:40].isnan().all()
        assert out[40 + count :].isnan().all()


@torch.no_grad()
def test_a_writer_heeds_a_forward_that_somebody_sets_but_not_that_of_a_step() -> None:
    layer, calls = torch.nn.Linear(64, 64), []
    into, own = writer_of(layer), layer.forward
    assert into is not None

    def patched(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return 2 * own(x)

    x, out = torch.randn(3, 64), torch.empty(3, 64)
    with replaced([(layer, lambda x: into(x, out))]):
        layer(x)
        assert same_bits(out, own(x))
    assert not calls
    layer.forward = patched
    with replaced([(layer, lambda x: into(x, out))]):
        layer(x)
    assert same_bits(out, 2 * own(x))
    assert calls == [3]


@torch.no_grad()
def test_a_writer_rounds_as_autocast_does() -> None:
    torch.manual_seed(3)
    layer, x, out = torch.nn.Linear(64, 32), torch.randn(40, 64), torch.empty(40, 32, dtype=torch.bfloat16)
    into = writer_of(layer)
    assert into is not None
    with torch.autocast("cpu", torch.bfloat16):
        into(x, out)
        assert same_bits(out, layer(x))


def test_another_kind_of_linear_layer_has_no_writer() -> None:
    class Other(torch.nn.Linear):
        pass

    assert writer_of(Other(4, 4)) is None
