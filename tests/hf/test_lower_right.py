"""Steps without a mask give what steps with one give, and only where they can."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import CausalBias

from kvboost.hf import lower_right as module
from kvboost.hf.attention import Plan, UnsupportedAttentionError, attending
from kvboost.hf.cache import SlabCache
from kvboost.hf.lower_right import LowerRight, probe_lower_right
from kvboost.hf.numerics import choose_numerics
from kvboost.hf.probe import probe_model
from kvboost.hf.runner import ModelRunner
from kvboost.hf.shape import shape_of
from tests.helpers.devices import Devices, on_device, put
from tests.helpers.models import tiny_model

_TEXT = torch.randint(3, 97, (120,), generator=torch.Generator().manual_seed(5)).tolist()


def prefilled(runner: ModelRunner, cuts: list[int], *, without_masks: bool) -> tuple[SlabCache, torch.Tensor]:
    """The text in these steps, and its last logits."""
    cache = SlabCache(probe_model(runner.model).layout, capacity=len(_TEXT))
    runner.unmasked, start, logits = "lower right" if without_masks else None, 0, None
    for end in (*cuts, len(_TEXT)):
        logits = runner.append(_TEXT[start:end], cache, logits=True)
        start = end
    runner.unmasked = None
    assert logits is not None
    return cache, logits


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "glm"])  # shared keys, windows, no rotation
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 119), max_size=4, unique=True).map(sorted))
def test_the_results_are_those_under_a_mask(family: str, cuts: list[int]) -> None:
    runner = ModelRunner(tiny_model(family))
    found, logits = prefilled(runner, cuts, without_masks=True)
    expected, by_mask = prefilled(runner, cuts, without_masks=False)
    torch.testing.assert_close(logits, by_mask, rtol=1e-4, atol=1e-4)
    for one, other in zip(found.span(0, 120), expected.span(0, 120), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_no_mask_is_made_and_no_key_is_repeated(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(tiny("llama"))
    seen: list[tuple[int, int]] = []
    dispatch = CausalBias._dispatch

    def watched(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((query.shape[1], key.shape[1]))
        return dispatch(query, key, *args, **kwargs)

    cache, runner.unmasked = SlabCache(probe_model(runner.model).layout, capacity=120), "lower right"
    monkeypatch.setattr("kvboost.hf.attention.sdpa_mask", None)
    monkeypatch.setattr(CausalBias, "_dispatch", staticmethod(watched))
    runner.append(_TEXT[:40], cache, logits=False)
    runner.append(_TEXT[40:], cache, logits=False)
    assert seen == [(4, 2), (4, 2)], "in both layers, the second step only"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_probe_runs_a_model_both_ways(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = put(tiny_model(family), lambda _: "cuda:0")
    with Devices():
        layout = probe_model(model).layout
        assert "flash kernel does not take" in (probe_lower_right(model, layout) or "")  # a build without CUDA says so
        monkeypatch.setattr(module, "can_use_flash_attention", lambda _: True)
        monkeypatch.setattr(  # a simulated device has no tensors of torch's class
            module,
            "causal_lower_right",
            lambda rows, keys: on_device(torch.ones(rows, keys).tril(keys - rows) > 0, "cuda:0"),
        )
        assert probe_lower_right(model, layout) is None


def test_the_probe_finds_a_mask_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = put(tiny_model("llama"), lambda _: "cuda:0")
    monkeypatch.setattr(module, "can_use_flash_attention", lambda _: True)
    monkeypatch.setattr(module, "causal_lower_right", lambda queries, keys: None)
    with Devices():
        layout = probe_model(model).layout
        assert probe_lower_right(model, layout) == "its attention computes something else without a mask"


def test_models_that_go_on_as_they_are(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_use_flash_attention", lambda _: True)
    model = tiny("llama")
    assert probe_lower_right(model, probe_model(model).layout) == "CPUs have steps of their own"
    capped = put(tiny_model("gemma2"), lambda _: "cuda:0")
    with Devices():
        reason = probe_lower_right(capped, probe_model(capped).layout)
    assert reason is not None
    assert "'eager'" in reason or "more than a mask" in reason  # older Transformers run it through sdpa


def test_what_needs_more_than_a_mask_is_refused(tiny: Callable[..., Any]) -> None:
    plan = LowerRight(8)
    call: Any = type("Call", (), {"mask": plan.causal.clone(), "more_than_a_mask": "softcap", "options": {}})()
    with pytest.raises(UnsupportedAttentionError):
        plan.attend(call)
    with attending(Plan()):
        assert plan.mask(mask_function=module.causal_mask_function) is plan.causal


def whole(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, rows: int, keys: int, **given: Any) -> torch.Tensor:
    """``varlen_attn`` as torch documents it, for one sequence: each row by itself, as in whole sums."""
    assert given["num_splits"] == 1
    assert given["window_size"] == (-1, 0)
    assert (cu_q.tolist(), cu_k.tolist()) == ([0, rows], [0, keys])
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, 1).transpose(0, 1) for one in (key, value))
    found = []
    for row in range(rows):
        seen = keys - rows + row + 1
        weights = ((query[row][:, None] * key[:, :seen]).sum(-1) * given["scale"]).softmax(-1)
        found.append((weights[..., None] * value[:, :seen]).sum(1))
    return torch.stack(found)


@pytest.mark.parametrize("depends", [False, True])
def test_without_a_grid_where_sums_do_not_depend_on_the_step(depends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library that makes products independent of their rows would do, and a kernel that is not."""

    def product(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        found = (rows[..., None, :] * weight).sum(-1)
        return found * (1 + rows.shape[1] * 1e-6) if depends else found

    model = tiny_model("llama")
    layout = probe_model(model).layout
    assert "no attention in whole sums" in (module.probe_whole_sums(model, layout, max_positions=512) or "")
    monkeypatch.setattr(module.row_pages, "has_kernel", lambda device: True)
    monkeypatch.setattr(module.row_pages, "varlen_attn", whole)
    monkeypatch.setattr("torch.nn.functional.linear", product)
    monkeypatch.setattr(module, "WHOLE", 40)
    monkeypatch.setattr(module, "_CUTS", ((2,), (8, 30)))  # whole vectors of the CPU's functions
    assert module.probe_whole_sums(model, layout, max_positions=512) == (
        "a prefill resumed at (2,) has other bits" if depends else None
    )


@pytest.mark.parametrize("reason", [None, "a prefill resumed at (1,) has other bits"])
def test_bitwise_on_an_accelerator(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.hf.numerics.choose.probe_lower_right", lambda *_: None)
    monkeypatch.setattr("kvboost.hf.numerics.choose.probe_whole_sums", lambda *_, **__: reason)
    model = put(tiny_model("llama"), lambda _: "cuda:0")
    with Devices():
        layout = probe_model(model).layout
        found = choose_numerics(model, layout, shape_of(model, layout), numerics="bitwise")
    assert found.rule.is_bitwise
    assert found.rule.max_tokens == (module.WHOLE if reason is None else 1024), "no longer than was tried"
    assert found.rule.grid == (None if reason is None else 1024)
    assert found.unmasked == ("whole sums" if reason is None else "lower right")
    assert found.spec == ("bitwise:any|whole sums" if reason is None else "bitwise:1024|lower right")


@pytest.mark.parametrize("how", ["in place", "its forward", "another module"])
def test_layers_that_are_compiled_later_get_their_mask(how: str, tiny: Callable[..., Any]) -> None:
    runner = ModelRunner(copy.deepcopy(tiny("llama")))
    cache, runner.unmasked = SlabCache(probe_model(runner.model).layout, capacity=120), "lower right"
    runner.append(_TEXT[:40], cache, logits=False)
    layers = runner.model.model.layers
    for index, layer in enumerate(layers):
        if how == "in place":
            layer.compile(backend="eager")
        elif how == "its forward":
            layer.forward = torch.compile(layer.forward, backend="eager")
        else:
            layers[index] = torch.compile(layer, backend="eager")
    found = runner.append(_TEXT[40:], cache, logits=True)
    _, expected = prefilled(ModelRunner(tiny("llama")), [40], without_masks=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_steps_of_eager_attention_are_short_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the scores of all heads in memory."""
    model = put(tiny_model("llama"), lambda _: "cuda:0")
    with Devices():
        layout = probe_model(model).layout
        assert choose_numerics(model, layout, shape_of(model, layout), numerics="fast").rule.max_tokens > 1024
        monkeypatch.setattr(model.config, "_attn_implementation", "eager")
        assert choose_numerics(model, layout, shape_of(model, layout), numerics="fast").rule.max_tokens == 1024
