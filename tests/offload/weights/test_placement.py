from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.direct_io import PAGE
from kvboost.errors import ConfigError
from kvboost.offload.weights.skeleton import place_weights
from kvboost.offload.weights.slabs import REST, lay_out

_ROW = PAGE // 4


def _rest(pages: int) -> object:
    return lay_out(REST, [("embed.weight", torch.float32, (pages, _ROW))])


@given(
    layers=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=8),
    rest=st.integers(1, 5),
    budget=st.integers(1, 200),
)
@settings(max_examples=200, deadline=None)
def test_a_placement_keeps_within_the_budget_and_leaves_nothing_out(
    layers: list[list[int]], rest: int, budget: int
) -> None:
    slabs = [
        lay_out(f"layer-{i}", [(f"{i}.m{j}.weight", torch.float32, (pages, _ROW)) for j, pages in enumerate(of_layer)])
        for i, of_layer in enumerate(layers)
    ]
    try:
        placement = place_weights(_rest(rest), slabs, budget=budget * PAGE)  # type: ignore[arg-type]
    except ConfigError:
        assert budget < rest + 2 * max(max(of_layer) for of_layer in layers)
        return
    assert placement.memory.in_memory <= budget * PAGE
    buffers = min(2, len(placement.streamed)) * placement.buffer_bytes
    assert placement.memory.in_memory == placement.rest_bytes + buffers + sum(
        placement.units[i].extent.size for i in placement.resident
    )
    assert [w for unit in placement.units for w in unit.weights] == [w for slab in slabs for w in slab.weights]
    assert [unit.index for unit in placement.units] == list(range(len(placement.units)))
    for unit in placement.units:
        assert unit.extent.slab == slabs[unit.layer].name
        assert unit.extent.begin == unit.weights[0].offset
        assert unit.extent.begin + unit.extent.size == unit.weights[-1].end
    two_layers = 2 * max(sum(of_layer) for of_layer in layers)
    assert (placement.parts_per_layer == 1) == (rest + two_layers <= budget) or len(layers) == 1


def _equal_layers(count: int) -> list[object]:
    return [lay_out(f"layer-{i}", [(f"{i}.m.weight", torch.float32, (2, _ROW))]) for i in range(count)]


def test_what_stays_is_spread_over_the_pass() -> None:
    placement = place_weights(_rest(1), _equal_layers(12), budget=(1 + 4 + 8) * PAGE)  # type: ignore[arg-type]
    assert sorted(placement.resident) == [0, 3, 6, 9]
    assert placement.memory.streamed == 8 * 2 * PAGE
    assert placement.memory.resident == (1 + 8) * PAGE


def test_a_module_is_never_cut_in_two() -> None:
    experts = [("0.experts.up", torch.float32, (5, _ROW)), ("0.experts.down", torch.float32, (5, _ROW))]
    slabs = [lay_out("layer-0", [("0.q.weight", torch.float32, (1, _ROW)), *experts]), *_equal_layers(1)]
    placement = place_weights(_rest(1), slabs, budget=21 * PAGE)  # type: ignore[arg-type]
    assert [[w.name for w in unit.weights] for unit in placement.units[:2]] == [
        ["0.q.weight"],
        ["0.experts.up", "0.experts.down"],
    ]


def test_too_small_a_budget_names_one_that_works() -> None:
    with pytest.raises(ConfigError, match=r"give at least 0\.1 MB"):
        place_weights(_rest(1), _equal_layers(3), budget=4 * PAGE)  # type: ignore[arg-type]
    assert place_weights(_rest(1), _equal_layers(3), budget=100_000).memory.in_memory == 7 * PAGE  # type: ignore[arg-type]
