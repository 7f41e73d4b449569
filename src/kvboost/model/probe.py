"""Finds out what the loaded model allows, by its cache layers and by running it.

Called once when an engine is made. No table of families: what counts is how this model behaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvboost.errors import UnsupportedModelError
from kvboost.model.cache import KVLayout, SlabCache, layout_of
from kvboost.model.runner import ModelRunner

_PROBE_TOKENS = 12
# Largest difference, relative to the largest logit, that regrouped sums explain in each precision.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Rotary frequencies that depend on the sequence length, kept as state between calls.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelFacts:
    """What a model's cache looks like and how far exact reuse holds."""

    layout: KVLayout
    max_positions: int | None
    """The longest sequence the model was made for; None if it has no limit."""
    exact_limit: int | None
    """Prompts longer than this are read without reuse; None if there is no such limit."""
    exact_limit_reason: str | None


def probe_model(model: Any) -> ModelFacts:
    """Check that reuse cannot change this model's output; raise UnsupportedModelError with the reason if it can."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models read their prompt differently; use a decoder-only model")
    _check_layers(config)
    layout = _check_forward(model, config)
    limit, reason = _exact_limit(config)
    return ModelFacts(layout, _max_positions(config), limit, reason)


def _check_layers(config: Any) -> None:
    """Every cache layer must keep one row per token that later tokens cannot change."""
    # A sliding layer qualifies: kept whole, with the model's own sliding mask, it gives the same attention.
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    others = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers if type(layer) not in known})
    if others:
        raise UnsupportedModelError(
            f"{config.model_type} keeps state that is not one row per token ({', '.join(others)}), "
            "so its cache cannot be cut into chunks. Pass strict=False to run it without reuse."
        )


@torch.no_grad()
def _check_forward(model: Any, config: Any) -> KVLayout:
    """Two steps through our cache must give what one step without a cache gives."""
    vocab = config.vocab_size
    ids = torch.arange(_PROBE_TOKENS) * 7919 % max(2, min(vocab, 30_000))
    runner = ModelRunner(model)
    batch = ids.view(1, -1).to(runner.device)
    stock = DynamicCache()  # without a config every layer keeps all rows, which is the layout we want to see
    whole = model(input_ids=batch, past_key_values=stock, use_cache=True).logits[0, -1].float()
    if len(stock.layers) == 0 or any(layer.get_seq_length() != _PROBE_TOKENS for layer in stock.layers):
        raise UnsupportedModelError(
            f"{config.model_type} did not fill a Transformers cache with one row per token; "
            "pass strict=False to run it without reuse"
        )
    layout = layout_of(stock)
    cache = SlabCache(layout, capacity=_PROBE_TOKENS)
    runner.append(ids[: _PROBE_TOKENS // 2], cache, logits=False)
    stepped = runner.append(ids[_PROBE_TOKENS // 2 :], cache, logits=True)
    assert stepped is not None
    difference = (stepped.float() - whole).abs().max() / whole.abs().max().clamp_min(1e-12)
    tolerance = _TOLERANCE.get(layout.slots[0].dtype, 8e-2)
    if not difference <= tolerance:  # also catches NaN
        raise UnsupportedModelError(
            f"{config.model_type} answers differently when its prompt is read in two steps "
            f"(relative difference {difference:.1e}, allowed {tolerance:.0e}); pass strict=False to run without reuse"
        )
    return layout


def _max_positions(config: Any) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _exact_limit(config: Any) -> tuple[int | None, str | None]:
    rope = getattr(config, "rope_parameters", None) or {}
    # One dict for the model, or one per layer type.
    variants = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    for variant in variants:
        kind = variant.get("rope_type")
        if kind in _LENGTH_DEPENDENT_ROPE:
            original = variant.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = int(original or _max_positions(config) or 0) - 1
            return limit, (
                f"{kind} RoPE changes its frequencies beyond {limit} tokens, so KV read before that point "
                "cannot stand for KV read after it"
            )
    return None, None
