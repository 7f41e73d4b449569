from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import KVBoost, UnsupportedModelError
from kvboost.model import ModelRunner

_TEXT = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "glm", "gpt2", "cohere", "stablelm"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_all_rows_computed_again_equal_a_full_prefill(family: str, attention: str, tiny: Callable[..., Any]) -> None:
    model = tiny(family, attn_implementation=attention)
    engine = KVBoost(model, None, chunk_size=8)
    whole = engine.prefill(_TEXT)
    broken = engine.prefill(_TEXT[::-1])  # right shape, wrong content in every row
    logits = ModelRunner(model).forward_rows(_TEXT, broken.cache, range(len(_TEXT)))
    scale = whole.logits.abs().max()
    assert (logits - whole.logits).abs().max() <= 3e-5 * scale
    for right, repaired in zip(whole.cache.extract(0, 40), broken.cache.extract(0, 40), strict=True):
        assert (right - repaired).abs().max() <= 3e-5 * right.abs().max()


def test_only_the_chosen_rows_change(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    engine = KVBoost(model, None, chunk_size=8)
    result = engine.prefill(_TEXT)
    before = result.cache.extract(0, 40)
    for layer in result.cache.layers:
        layer.key_store[:, :, 10:12].zero_()
    ModelRunner(model).forward_rows(_TEXT, result.cache, [10, 11, 39])
    for right, repaired in zip(before, result.cache.extract(0, 40), strict=True):
        assert torch.equal(right[:, :, :10], repaired[:, :, :10])
        assert torch.equal(right[:, :, 12:39], repaired[:, :, 12:39])
        assert (right - repaired).abs().max() <= 3e-5 * right.abs().max()


def test_row_recomputation_refuses_sliding_layers(tiny: Callable[..., Any]) -> None:
    model = tiny("gemma3_text")
    engine = KVBoost(model, None, chunk_size=8)
    with pytest.raises(UnsupportedModelError, match="sliding"):
        ModelRunner(model).forward_rows(_TEXT, engine.prefill(_TEXT).cache, [3])
