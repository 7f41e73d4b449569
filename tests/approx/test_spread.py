from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.approx.probe import probe_reposition
from kvboost.approx.recompute import RecomputeRunner
from kvboost.approx.spread import Spread
from kvboost.hf.cache import SlabCache
from kvboost.hf.runner import ModelRunner

_TEXT = torch.randint(3, 97, (120,), generator=torch.Generator().manual_seed(5)).tolist()


def _cache_and_repositioner(model: Any) -> tuple[SlabCache, Any]:
    cache = KVBoost(model, None, chunk_size=8, quality="exact").prefill(_TEXT).cache
    return cache, probe_reposition(model, cache.layout)


def _span_ids(*spans: tuple[int, int]) -> torch.Tensor:
    span_ids = torch.full((120,), -1)
    for start, end in spans:
        span_ids[start:end] = start
    return span_ids


@pytest.mark.parametrize("family", ["llama", "phi", "glm", "gemma3_text"])
def test_a_change_all_rows_share_is_carried_over_whole(family: str, tiny: Callable[..., Any]) -> None:
    """Every row shifted by one vector, as it is at position 0: the neighbours follow, almost all the way."""
    model = tiny(family)
    right, repositioner = _cache_and_repositioner(model)
    rows = torch.arange(20, 100, 4)
    spread = Spread(repositioner, rows, span_ids=_span_ids((20, 100)), begin=0, end=120)
    for index, layer in enumerate(right.layers):
        old = layer.keys.clone(), layer.values.clone()
        shift = torch.randn(1, *old[0].shape[1:2], 1, old[0].shape[3], generator=torch.Generator().manual_seed(index))
        every = torch.arange(120)
        rotated = repositioner.rotations(torch.zeros(120, dtype=torch.long), every).apply(
            2 * index, shift.expand(old[0].shape)
        )
        spread.apply(index, layer, (old[0] + rotated)[:, :, rows], (old[1] + shift)[:, :, rows])
        for changed, before, change in ((layer.keys, old[0], rotated), (layer.values, old[1], shift)):
            moved = changed - before
            left = [r for r in range(21, 99) if r not in rows]
            wanted = change.expand(before.shape)[:, :, left]
            assert (
                moved[:, :, left] - wanted
            ).abs().max() <= 0.12 * wanted.abs().max()  # the prior keeps a little back
            outside = [*range(20), *range(100, 120), *rows.tolist()]
            assert moved[:, :, outside].abs().max() == 0.0


def test_nothing_leaves_its_span_or_its_part(tiny: Callable[..., Any]) -> None:
    cache, repositioner = _cache_and_repositioner(tiny("llama"))
    layer = cache.layers[0]
    before = layer.values.clone()
    rows = torch.tensor([30, 34, 70])  # 70 was never repositioned: it shows nothing about others
    spread = Spread(repositioner, rows, span_ids=_span_ids((24, 40), (40, 60)), begin=28, end=120)
    spread.apply(0, layer, layer.keys[:, :, rows] + 1.0, layer.values[:, :, rows] + 1.0)
    changed = ((layer.values - before).abs().amax(dim=(0, 1, 3)) > 0).nonzero().flatten().tolist()
    assert changed == [r for r in range(28, 40) if r not in (30, 34)]


def test_nothing_to_spread_changes_nothing(tiny: Callable[..., Any]) -> None:
    cache, repositioner = _cache_and_repositioner(tiny("llama"))
    before = cache.extract(0, 120)
    rows = torch.tensor([5, 6])
    for span_ids in (_span_ids(), _span_ids((5, 7)), _span_ids((50, 60))):
        spread = Spread(repositioner, rows, span_ids=span_ids, begin=0, end=120)
        spread.apply(0, cache.layers[0], cache.layers[0].keys[:, :, rows] + 1, cache.layers[0].values[:, :, rows] + 1)
    assert all(torch.equal(one, other) for one, other in zip(before, cache.extract(0, 120), strict=True))


def test_many_rows_in_several_forwards_spread_each_once(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row near two parts must not be changed by both."""
    model = tiny("llama")
    cache, repositioner = _cache_and_repositioner(model)
    runner = RecomputeRunner(ModelRunner(model))
    made: list[tuple[int, int, list[int]]] = []

    def spread(rows: torch.Tensor, *, begin: int, end: int) -> Spread:
        made.append((begin, end, rows.tolist()))
        return Spread(repositioner, rows, span_ids=_span_ids((0, 120)), begin=begin, end=end)

    monkeypatch.setattr("kvboost.approx.recompute.MAX_POSITIONS", 3)
    runner.recompute_positions(_TEXT, cache, [10, 20, 30, 60, 70, 80, 119], spread=spread)
    assert made == [(0, 60, [10, 20, 30]), (60, 119, [60, 70, 80]), (119, 120, [119])]


def test_a_row_that_changed_beyond_all_measure_says_nothing_about_others(tiny: Callable[..., Any]) -> None:
    """An attention sink of the old place; without care it would spoil a hundred rows around it."""
    cache, repositioner = _cache_and_repositioner(tiny("llama"))
    layer = cache.layers[0]
    rows = torch.arange(20, 100, 4)
    changes = []
    for outlier in (0.0, 500.0):
        layer.values.copy_(torch.zeros_like(layer.values))
        new = torch.full_like(layer.values[:, :, rows], 0.1)
        new[:, :, 10] += outlier
        Spread(repositioner, rows, span_ids=_span_ids((20, 100)), begin=0, end=120).apply(
            0, layer, layer.keys[:, :, rows], new
        )
        changes.append(layer.values.clone())
    assert changes[1].abs().max() <= 0.11
    assert (changes[1] - changes[0]).abs().max() <= 0.02


def test_changes_that_neighbours_do_not_share_are_not_carried_over(tiny: Callable[..., Any]) -> None:
    cache, repositioner = _cache_and_repositioner(tiny("llama"))
    layer = cache.layers[0]
    rows = torch.arange(20, 100, 2)
    layer.values.copy_(torch.zeros_like(layer.values))
    new = torch.ones_like(layer.values[:, :, rows])
    new[:, :, ::2] *= -1.0  # every other row the other way
    Spread(repositioner, rows, span_ids=_span_ids((20, 100)), begin=0, end=120).apply(
        0, layer, layer.keys[:, :, rows], new
    )
    assert layer.values.abs().max() <= 0.05
