"""Prompts that are prefilled together get the bits that each gets alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.core.verify import same_bits
from kvboost.errors import UnsupportedModelError
from kvboost.hf import attention
from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.joint import JointPrefill, probe_joint
from kvboost.hf.numerics import choose_numerics
from kvboost.hf.probe import probe_model
from kvboost.hf.runner import ModelRunner
from kvboost.hf.shape import shape_of
from tests.helpers.models import tiny_model

_WIDE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 1024}
_TEXT = torch.randint(3, 97, (700,), generator=torch.Generator().manual_seed(3)).tolist()
_MADE: dict[Any, tuple[ModelRunner, KVLayout, JointPrefill]] = {}
_FAMILIES = ["llama", "gemma3_text", "gpt2", "qwen2"]  # a window, positions that are learned, biases


def made(family: str, dtype: torch.dtype) -> tuple[ModelRunner, KVLayout, JointPrefill]:
    if (family, dtype) not in _MADE:
        model = tiny_model(family, dtype=dtype, **_WIDE)
        layout = probe_model(model).layout
        runner = ModelRunner(model, choose_numerics(model, layout, shape_of(model, layout), numerics=None).tiles)
        _MADE[family, dtype] = runner, layout, probe_joint(runner, layout)
    return _MADE[family, dtype]


def cache_with(runner: ModelRunner, layout: KVLayout, tokens: list[int]) -> SlabCache:
    cache = SlabCache(layout, capacity=len(tokens) + 300)
    for slab in cache.slabs:
        slab.fill_(torch.nan)  # what an earlier request left must not leak through padding
    if tokens:
        runner.append(tokens, cache, logits=False)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", _FAMILIES)
@settings(max_examples=12, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 40)), min_size=2, max_size=16),
    seed=st.integers(0, 50),
)
def test_each_prompt_gets_the_bits_it_gets_alone(
    family: str, dtype: torch.dtype, parts: list[tuple[int, int]], seed: int
) -> None:
    runner, layout, joint = made(family, dtype)
    texts = [_TEXT[seed + i : seed + i + held + new] for i, (held, new) in enumerate(parts)]
    held = [held for held, _ in parts]
    alone = [cache_with(runner, layout, text[:count]) for text, count in zip(texts, held, strict=True)]
    together = [cache_with(runner, layout, text[:count]) for text, count in zip(texts, held, strict=True)]
    tails = [text[count:] for text, count in zip(texts, held, strict=True)]
    expected = [runner.append(tail, cache, logits=True) for tail, cache in zip(tails, alone, strict=True)]
    found = joint.append(tails, together)
    torch.testing.assert_close(found, torch.stack(expected), rtol=2e-2, atol=2e-2)
    for one, other, text in zip(alone, together, texts, strict=True):
        assert one.get_seq_length() == other.get_seq_length() == len(text)
        assert all(map(same_bits, one.extract(0, len(text)), other.extract(0, len(text))))


def test_a_step_that_fails_leaves_every_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, layout, joint = made("llama", torch.float32)
    caches = [cache_with(runner, layout, _TEXT[:count]) for count in (20, 30)]
    before = [cache.extract(0, cache.get_seq_length()) for cache in caches]
    flash, calls = attention.flash, []

    def fails_late(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        return flash(*arguments)

    monkeypatch.setattr(attention, "flash", fails_late)
    with pytest.raises(RuntimeError, match="no memory"):
        joint.append([_TEXT[20:25], _TEXT[30:31]], caches)
    assert [cache.get_seq_length() for cache in caches] == [20, 30]
    for cache, kept in zip(caches, before, strict=True):
        assert all(map(same_bits, cache.extract(0, cache.get_seq_length()), kept))


def test_a_model_without_tiles_is_refused(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    with pytest.raises(UnsupportedModelError, match="depends on its shape"):
        probe_joint(ModelRunner(model), probe_model(model).layout)


@pytest.mark.parametrize("bug", ["positions", "mask"])
def test_a_model_that_prefills_otherwise_in_company_is_refused(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, layout, _ = made("llama", torch.float32)
    if bug == "positions":  # a model that counts positions by itself
        run_rows = ModelRunner.run_rows
        monkeypatch.setattr(
            ModelRunner, "run_rows", lambda self, ids, cache, rows, **inputs: run_rows(self, ids, cache, rows)
        )
    else:  # a model that makes its own mask of the one it is given
        masks_for = attention.JointStep.masks_for
        monkeypatch.setattr(
            attention.JointStep,
            "masks_for",
            lambda self, given: masks_for(self, None if given is None else given.clone()),
        )
    with pytest.raises(UnsupportedModelError, match=r"other KV beside|changes its mask"):
        probe_joint(runner, layout)


def on_an_accelerator(family: str) -> tuple[ModelRunner, KVLayout]:
    """As a model is run there, but on the CPU, which makes a mask of what that kernel does not need one for."""
    runner = ModelRunner(tiny_model(family, max_position_embeddings=1024))
    runner.unmasked, runner.joins = "lower right", True
    return runner, probe_model(runner.model).layout


@pytest.mark.parametrize("family", ["llama", "gpt2", "glm"])
@settings(max_examples=12, deadline=None)
@given(parts=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=2, max_size=8))
def test_without_tiles_each_prompt_gets_what_it_gets_alone_up_to_rounding(
    family: str, parts: list[tuple[int, int]]
) -> None:
    runner, layout = on_an_accelerator(family)
    joint = probe_joint(runner, layout)
    texts = [_TEXT[i : i + held + new] for i, (held, new) in enumerate(parts)]
    alone, together = (
        [cache_with(runner, layout, text[:held]) for text, (held, _) in zip(texts, parts, strict=True)]
        for _ in range(2)
    )
    tails = [text[held:] for text, (held, _) in zip(texts, parts, strict=True)]
    expected = [runner.append(tail, cache, logits=True) for tail, cache in zip(tails, alone, strict=True)]
    found = joint.append(tails, together)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
    for one, other, text in zip(alone, together, texts, strict=True):
        for a, b in zip(one.extract(0, len(text)), other.extract(0, len(text)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_prompts_are_prefilled_one_by_one_with_windows_and_where_bits_are_promised() -> None:
    runner, layout = on_an_accelerator("gemma3_text")
    with pytest.raises(UnsupportedModelError, match="have a window"):
        probe_joint(runner, layout)
    runner, layout = on_an_accelerator("llama")
    runner.joins = False
    with pytest.raises(UnsupportedModelError, match="depends on its shape"):
        probe_joint(runner, layout)
