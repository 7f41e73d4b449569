from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.approx.recompute import RecomputeRunner
from kvboost.hf.cache import SlabCache
from kvboost.hf.layers import decoder_layers
from kvboost.hf.runner import ModelRunner
from tests.helpers.models import FAMILIES, tiny_model

_TEXT = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def _engine(model: Any) -> KVBoost:
    return KVBoost(model, None, chunk_size=8)


def _close(found: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((found - right).abs().max() <= 3e-5 * right.abs().max())


def _same_rows(found: SlabCache, right: SlabCache) -> bool:
    return all(_close(f, r) for f, r in zip(found.extract(0, 40), right.extract(0, 40), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_all_rows_computed_again_equal_a_full_prefill(family: str, attention: str, tiny: Callable[..., Any]) -> None:
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("its softcap is not known to sdpa")
    model = tiny(family, attn_implementation=attention)
    engine = _engine(model)
    whole = engine.prefill(_TEXT)
    broken = engine.prefill(_TEXT[::-1])  # right shape, wrong content in every row
    logits, layer_positions = RecomputeRunner(ModelRunner(model)).recompute_positions(_TEXT, broken.cache, range(40))
    assert logits is not None
    assert _close(logits, whole.logits)
    assert _same_rows(broken.cache, whole.cache)
    assert layer_positions == 40 * len(decoder_layers(model))


def test_only_the_chosen_rows_change(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    result = _engine(model).prefill(_TEXT)
    before = result.cache.extract(0, 40)
    for layer in result.cache.layers:
        layer.key_store[:, :, 10:12].zero_()
    RecomputeRunner(ModelRunner(model)).recompute_positions(_TEXT, result.cache, [10, 11, 39])
    for right, repaired in zip(before, result.cache.extract(0, 40), strict=True):
        assert torch.equal(right[:, :, :10], repaired[:, :, :10])
        assert torch.equal(right[:, :, 12:39], repaired[:, :, 12:39])
        assert _close(repaired, right)


def test_many_rows_run_in_several_forwards(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.approx.recompute.MAX_POSITIONS", 16)
    model = tiny("llama")
    engine = _engine(model)
    whole, broken = engine.prefill(_TEXT), engine.prefill(_TEXT[::-1])
    logits, _ = RecomputeRunner(ModelRunner(model)).recompute_positions(_TEXT, broken.cache, range(40))
    assert logits is not None
    assert _close(logits, whole.logits)
    assert _same_rows(broken.cache, whole.cache)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
def test_dropped_rows_keep_the_layers_they_missed(family: str, tiny: Callable[..., Any]) -> None:
    """Narrowing over a right cache changes nothing; over a wrong one it leaves the later layers wrong."""
    model = tiny(family, num_hidden_layers=4, **_four_layers(family))
    engine = _engine(model)
    whole, broken = engine.prefill(_TEXT), engine.prefill(_TEXT)
    for layer in broken.cache.layers:
        layer.key_store[:, :, 10].fill_(7.0)
        layer.value_store[:, :, 10].fill_(7.0)
    seen: list[tuple[int, list[int]]] = []

    def choose(layer: int, rows: torch.Tensor, changes: Any) -> torch.Tensor | None:
        seen.append((layer, rows.tolist()))
        return {1: torch.tensor([0, 1, 3]), 3: torch.tensor([1, 2])}.get(layer)

    runner = RecomputeRunner(ModelRunner(model))
    _, layer_positions = runner.recompute_positions(_TEXT, broken.cache, [8, 10, 11, 39], choose=choose)
    assert seen == [(0, [8, 10, 11, 39]), (1, [8, 10, 11, 39]), (2, [8, 10, 39]), (3, [8, 10, 39])]
    assert layer_positions == 4 + 3 + 3 + 2
    for index, (found, right) in enumerate(zip(broken.cache.layers, whole.cache.layers, strict=True)):
        assert _close(found.keys[:, :, 10], right.keys[:, :, 10]), index  # row 10 ran through every layer
        assert torch.equal(found.keys[:, :, 20], right.keys[:, :, 20])
    # Row 11 was dropped before layer 1: recomputed there it would have moved a little, as row 10 was wrong.
    assert torch.equal(broken.cache.layers[2].keys[:, :, 11], whole.cache.layers[2].keys[:, :, 11])


def _four_layers(family: str) -> dict[str, Any]:
    return {"layer_types": ["sliding_attention", "full_attention"] * 2} if family in ("gemma2", "gemma3_text") else {}


def test_watched_layers_say_how_far_their_rows_moved(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    result = _engine(model).prefill(_TEXT)
    layer = result.cache.layers[1]
    layer.value_store[:, :, 11] += 2.0
    noted: list[Any] = []

    def choose(index: int, rows: torch.Tensor, changes: Any) -> None:
        noted.append(changes)

    runner = RecomputeRunner(ModelRunner(model))
    with pytest.raises(ValueError, match="the cache holds 40 positions"):
        runner.recompute_positions(_TEXT[:-1], result.cache, [3])
    runner.recompute_positions(_TEXT, result.cache, [10, 11, 39], choose=choose, watch=[0])
    assert noted[0] is None
    assert noted[1] is not None
    assert noted[1].values.max() <= 1e-6
    assert noted[1].keys.max() <= 1e-6
    with result.cache.rewriting(torch.tensor([10, 11]), watch=[1]):
        stored = layer.keys[:, :, 10:12].clone(), layer.values[:, :, 10:12].clone()
        layer.update(stored[0] + 1.0, stored[1] * 0.5)
        assert torch.allclose(layer.changes.values.mean(), torch.tensor(1.0))  # as far off as they are long now
        size = (stored[0] + 1.0).square().sum(dim=(0, 1, 3)).mean()
        assert torch.allclose(layer.changes.keys, torch.full((2,), 2.0 * 8) / size)  # 2 heads of 8, each off by one
    assert layer.changes is None
    assert not layer.watched


@pytest.mark.parametrize("watched", ["sdpa", "eager"])
def test_attention_is_what_the_eager_model_reports(tiny: Callable[..., Any], watched: str) -> None:
    eager = tiny("llama", attn_implementation="eager")
    weights = eager(torch.tensor([_TEXT]), output_attentions=True).attentions  # [1, heads, 40, 40] each
    model = tiny("llama", attn_implementation=watched)
    reading = _engine(model).prefill(_TEXT)
    reading.cache.set_length(36)
    runner = RecomputeRunner(ModelRunner(model))
    known = torch.ones(36, dtype=torch.bool)
    mass = runner.attention_to(_TEXT[36:], reading.cache, known=known, layers=range(0, 2))
    assert reading.cache.get_seq_length() == 36
    for found, right in zip(mass, weights, strict=True):
        assert torch.allclose(found, right[0, :, 36:, :36].mean(dim=(0, 1)), atol=1e-5)
    known[5] = False
    hidden = runner.attention_to(_TEXT[36:], reading.cache, known=known, layers=range(1, 2))
    assert hidden.shape == (1, 36)
    assert hidden[0, 5] == 0.0
    assert hidden[0, 4] > 0.0


def test_a_pass_in_one_thread_leaves_another_alone(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    engine = _engine(model)
    expected = engine.prefill(_TEXT).logits
    hooks_before = [len(layer._forward_pre_hooks) for layer in decoder_layers(model)]
    runner = RecomputeRunner(ModelRunner(model))
    found: list[torch.Tensor] = []

    def choose(layer: int, rows: torch.Tensor, changes: Any) -> torch.Tensor | None:
        if layer == 1:  # in the midst of this thread's pass another one runs the same layers
            thread = threading.Thread(target=lambda: found.append(engine.prefill(_TEXT).logits))
            thread.start()
            thread.join()
            return torch.tensor([1])
        return None

    runner.recompute_positions(_TEXT, engine.prefill(_TEXT).cache, [3, 39], choose=choose)
    assert torch.equal(found[0], expected)
    runner.close()
    assert [len(layer._forward_pre_hooks) for layer in decoder_layers(model)] == hooks_before


def test_a_vision_tower_with_as_many_layers_is_not_taken_for_the_decoder() -> None:
    model = tiny_model("llama", seed=8)
    decoder = list(model.model.layers)
    tower = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in decoder)
    model._modules = {"vision": tower, **model._modules}
    assert decoder_layers(model) == decoder
