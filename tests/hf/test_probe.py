from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import GenerationMode, KVBoost, UnsupportedModelError
from kvboost.hf.numerics import choose
from kvboost.hf.probe import probe_model

_PROMPT = list(range(3, 60))


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("mamba", {}, "each begins its recurrent sums at zero"),
        # In half precision rounding could explain the loss of so short a text's state.
        ("mamba", {"dtype": torch.bfloat16}, "each begins its recurrent sums at zero"),
        ("falcon_mamba", {"dtype": torch.bfloat16}, "each begins its recurrent sums at zero"),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4}, "prefilled in two steps"),
        (
            "recurrent_gemma",
            {"num_hidden_layers": 3, "head_dim": 8, "lru_width": 32},
            "in two steps|does not run on a cache",
        ),
        # Transformers' own generate goes wrong for this family as soon as a cache is handed to it.
        ("mpt", {}, "continues from a given cache"),
    ],
)
def test_refuses_with_a_reason(family: str, overrides: dict[str, Any], reason: str, tiny: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        probe_model(tiny(family, **overrides))


def test_a_refused_model_still_runs_when_not_strict(tiny: Callable[..., Any]) -> None:
    model = tiny("mamba")
    with pytest.warns(UserWarning, match="without reuse"):
        engine = KVBoost(model, None, strict=False)
    result = engine.generate(_PROMPT, max_new_tokens=3, temperature=0)
    assert result.reuse.reason is not None
    assert "begins its recurrent sums at zero" in result.reuse.reason
    assert result.cached_tokens == 0
    assert engine.warm(_PROMPT) == 0
    assert not engine.verify_correctness()


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "mistral", "llama4_text", "cohere2", "gpt_oss"])
def test_sliding_and_chunked_layers_agree_with_transformers_beyond_their_window(
    family: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_GRID_ON_CPU", 16)  # for the families that are stepped on a grid
    kinds = {"llama4_text": "chunked_attention"}
    overrides: dict[str, Any] = {"sliding_window": 16, "head_dim": 8}
    if family == "llama4_text":
        overrides = {"attention_chunk_size": 16, "head_dim": 8, "intermediate_size_mlp": 48}
    if family != "mistral":
        overrides["layer_types"] = [kinds.get(family, "sliding_attention"), "full_attention"]
    model = tiny(family, **overrides)
    engine = KVBoost(model, None, chunk_size=8, chunking="fixed")
    engine.warm(_PROMPT)
    for length in (20, 41, 57):
        warm = engine.prefill(_PROMPT[:length])
        stock = engine.prefill(_PROMPT[:length], mode=GenerationMode.BASELINE)
        assert warm.reuse.exact_tokens > 0
        assert (warm.logits - stock.logits).abs().max() <= 1e-5 * stock.logits.abs().max()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_rope_limits_reuse(kind: str, tiny: Callable[..., Any]) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 80}
        model = tiny("llama", rope_parameters=rope, max_position_embeddings=320)
    else:
        model = tiny("llama", rope_parameters=rope, max_position_embeddings=80)
    engine = KVBoost(model, None, chunk_size=8, chunking="fixed")
    prompt = list(range(3, 93))
    engine.warm(prompt[:79])
    inside = engine.prefill(prompt[:79])
    assert inside.reuse.exact_tokens == 78
    beyond = engine.prefill(prompt)
    assert beyond.reuse.exact_tokens == 0
    assert kind in str(beyond.reuse.reason)
    again = engine.prefill(prompt[:79])
    assert again.reuse.exact_tokens == 78
    assert torch.equal(again.logits, inside.logits), "a long prompt in between must leave no trace"
    assert engine.verify_correctness()


def test_probing_leaves_the_random_numbers_alone(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    KVBoost(model, None).prefill(_PROMPT)
    assert torch.equal(torch.rand(1), expected)
