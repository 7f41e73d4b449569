from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost.hf.cache import KVLayout, SlabCache, TensorSpec

_CPU = torch.device("cpu")
_UNIFORM = KVLayout((TensorSpec(2, 4, torch.float32, _CPU),) * 4)
# Keys and values of different width, and layers that differ: three slabs.
_MIXED = KVLayout(
    (
        TensorSpec(2, 4, torch.float32, _CPU),
        TensorSpec(2, 6, torch.float32, _CPU),
        TensorSpec(2, 4, torch.float32, _CPU),
        TensorSpec(1, 4, torch.float32, _CPU),
    )
)


def _rows(layout: KVLayout, slot: int, count: int, *, batch: int = 1) -> torch.Tensor:
    spec = layout.slots[slot]
    return torch.randn(batch, spec.heads, count, spec.dim)


def _fill(cache: SlabCache, count: int, *, batch: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Append ``count`` random rows to every layer and return them."""
    written = []
    for layer in range(len(cache.layers)):
        keys = _rows(cache.layout, 2 * layer, count, batch=batch)
        values = _rows(cache.layout, 2 * layer + 1, count, batch=batch)
        cache.update(keys, values, layer)
        written.append((keys, values))
    return written


@pytest.mark.parametrize("layout", [_UNIFORM, _MIXED])
@given(steps=st.lists(st.integers(1, 400), min_size=1, max_size=5))
def test_appending_equals_concatenation(layout: KVLayout, steps: list[int]) -> None:
    cache = SlabCache(layout, capacity=300)  # some sequences of steps outgrow it
    written = [_fill(cache, count) for count in steps]
    for index, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys, torch.cat([step[index][0] for step in written], dim=2))
        assert torch.equal(layer.values, torch.cat([step[index][1] for step in written], dim=2))
    assert cache.get_seq_length() == sum(steps)


@pytest.mark.parametrize("layout", [_UNIFORM, _MIXED])
def test_extracted_rows_go_back_in_place_and_share_no_memory(layout: KVLayout) -> None:
    cache, other = SlabCache(layout, capacity=20), SlabCache(layout, capacity=600)
    _fill(cache, 12)
    block = cache.extract(4, 9)
    other.place(4, block)
    other.set_length(9)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(mine.keys[:, :, 4:9], theirs.keys[:, :, 4:9])
        assert torch.equal(mine.values[:, :, 4:9], theirs.values[:, :, 4:9])
    before = [tensor.clone() for tensor in block]
    cache.layers[0].keys.zero_()
    assert all(torch.equal(a, b) for a, b in zip(block, before, strict=True))


def test_rows_survive_growth_and_batch_operations() -> None:
    cache = SlabCache(_UNIFORM, capacity=8)
    _fill(cache, 5)
    before = cache.extract(0, 5)
    assert cache.is_poolable
    cache.batch_repeat_interleave(3)
    assert not cache.is_poolable
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    _fill(cache, 400, batch=3)
    assert all(torch.equal(a, b) for a, b in zip(cache.extract(0, 5), before, strict=True))
    assert cache.layers[0].keys.shape == (3, 2, 405, 4)
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.layers[1].values.shape == (1, 2, 405, 4)


def test_crop_takes_a_negative_count() -> None:
    cache = SlabCache(_UNIFORM, capacity=8)
    _fill(cache, 5)
    cache.crop(-2)
    assert cache.get_seq_length() == 3
    with pytest.raises(ValueError, match="negative"):
        cache.crop(2)


def test_rewriting_replaces_rows_and_keeps_the_length() -> None:
    cache = SlabCache(_UNIFORM, capacity=8)
    written = _fill(cache, 6)
    rows = torch.tensor([1, 4])
    new: Any = _rows(_UNIFORM, 0, 2), _rows(_UNIFORM, 1, 2)
    with cache.rewriting(rows):
        assert cache.get_mask_sizes(2, 0) == (6, 0)
        keys, values = cache.update(*new, 0)
    assert torch.equal(keys[:, :, rows], new[0])
    assert torch.equal(values[:, :, rows], new[1])
    assert torch.equal(keys[:, :, [0, 2, 3, 5]], written[0][0][:, :, [0, 2, 3, 5]])
    assert cache.get_seq_length() == 6
    assert cache.get_mask_sizes(2, 0) == (8, 0)
