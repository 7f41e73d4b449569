"""Recurrent layers of a cache: their states are copied in and out, repeated and forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.layers import cache_name
from kvboost.hf.probe import probe_model
from tests.helpers.models import HYBRIDS, NEWEST

Tiny = Callable[..., Any]
_IDS = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def _step(model: Any, cache: SlabCache, start: int, end: int) -> torch.Tensor:
    given = {cache_name(model): cache}
    logits: torch.Tensor = model(input_ids=_IDS[:, start:end], **given, use_cache=True).logits[:, -1]
    return logits


def _filled(model: Any, layout: KVLayout, end: int = 30) -> SlabCache:
    cache = SlabCache(layout, capacity=64)
    _step(model, cache, 0, end)
    return cache


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_cache_goes_on_from_copied_states(family: str, tiny: Tiny) -> None:
    model = tiny(family)
    layout = probe_model(model).layout
    cache, other = _filled(model, layout), SlabCache(layout, capacity=64)
    assert sum(tensor.nbytes for tensor in cache.states()) == layout.state_bytes > 0
    other.place(0, cache.span(0, 30))
    other.set_length(30)
    other.place_states(cache.states())
    found = _step(model, cache, 30, 40)
    assert torch.equal(_step(model, other, 30, 40), found)
    for one, another in zip(cache.states(), other.states(), strict=True):
        assert torch.equal(one, another)
        assert one.data_ptr() != another.data_ptr()


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_cache_that_begins_a_text_has_forgotten_the_one_before(family: str, tiny: Tiny) -> None:
    model = tiny(family)
    cache = _filled(model, layout := probe_model(model).layout)
    cache.set_length(0)
    assert torch.equal(_step(model, cache, 0, 30), _step(model, SlabCache(layout, capacity=64), 0, 30))


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "nemotron_h", *(["mamba2"] if NEWEST else [])])
def test_every_sequence_has_its_states_when_they_are_repeated_or_selected(family: str, tiny: Tiny) -> None:
    model = tiny(family)
    cache = _filled(model, probe_model(model).layout)
    before = [tensor.clone() for tensor in cache.states()]
    cache.batch_repeat_interleave(3)
    for layer in cache.layout.states_by_layer:
        for tensor in cache.layers[layer].states():
            assert tensor.shape[0] == 3
            assert torch.equal(tensor[0], tensor[2])
            tensor[1].zero_()
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    assert not any(tensor.any() for tensor in cache.states())
    cache.batch_select_indices(torch.tensor([1]))
    assert all(torch.equal(one, other) for one, other in zip(cache.states(), before, strict=True))


def test_a_state_takes_no_tokens_back(tiny: Tiny) -> None:
    model = tiny("falcon_h1")
    cache = _filled(model, probe_model(model).layout)
    with pytest.raises(NotImplementedError, match="takes no tokens back"):
        cache.layers[0].crop(-1)


def test_what_a_layer_without_states_keeps_is_nothing(tiny: Tiny) -> None:
    layout = probe_model(tiny("nemotron_h")).layout
    assert layout.without_kv == (0, 2)
    assert layout.with_kv == (1,)
    assert list(layout.states_by_layer) == [0]
    assert layout.num_layers == 3
