"""Tests what the loaded model supports, by its cache layers and by running it.

Called once when an engine is made. There is no table of families: the model's behaviour decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout, SlabCache, layout_of, stock_cache
from kvboost.hf.generate import run_generate
from kvboost.hf.runner import ModelRunner

_PROBE_TOKENS = 12
_PROBE_NEW_TOKENS = 3
_WITHOUT_REUSE = "Pass strict=False to run it without reuse."
# Largest difference, relative to the largest logit, that regrouped sums explain in each precision.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Rotary frequencies that depend on the sequence length, kept as state between calls.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelFacts:
    """What a model's cache looks like and how far exact reuse holds."""

    layout: KVLayout
    max_positions: int | None
    """The longest sequence the model supports; None if it has no limit."""
    exact_limit: int | None
    """Longer prompts are computed without reuse; None if there is no such limit."""
    exact_limit_reason: str | None


def probe_model(model: Any, *, layout: KVLayout | None = None) -> ModelFacts:
    """Check that reuse cannot change this model's output; raise UnsupportedModelError with the reason if it can.

    With the ``layout`` that an earlier probe of this model found, it is not run.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models encode their prompt differently; use a decoder-only model")
    _check_layers(config)
    layout = layout or _check_forward(model, config)
    limit, reason = exact_limit_of(config)
    # Dynamic NTK is made for prompts beyond the configured length, so that length is no limit to it.
    longest = None if reason and reason.startswith("dynamic") else max_positions_of(config)
    return ModelFacts(layout, longest, limit, reason)


# Sliding layers qualify: kept whole, with the model's own sliding mask, they give the same attention.
_KNOWN_LAYERS = {
    "DummyLayer",  # of layers that keep nothing; not in all versions of Transformers
    "DynamicIndexedLayer",  # sparse attention, in versions that have it: one more entry per token
    *(
        kind.__name__
        for kind in (
            DynamicLayer,
            DynamicSlidingWindowLayer,
            LinearAttentionLayer,
            LinearAttentionAndFullAttentionLayer,
            LinearAttentionAndSlidingWindowAttentionLayer,
        )
    ),
}
_UNEXPECTED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _check_layers(config: Any) -> None:
    """Every cache layer must keep entries per token that later tokens cannot change, or states that can be copied."""
    layers = DynamicCache(config=config).layers
    others = sorted({type(layer).__name__ for layer in layers} - _KNOWN_LAYERS)
    if others:
        raise UnsupportedModelError(
            f"{config.model_type} keeps what is neither one entry per token nor a state that can be copied "
            f"({', '.join(others)}), so its cache cannot be cut into chunks. {_WITHOUT_REUSE}"
        )


def _check_forward(model: Any, config: Any) -> KVLayout:
    """A prefill in two steps through our cache, then decoding from it, must match plain Transformers."""
    try:
        return _checked_layout(model, config)
    except UnsupportedModelError:
        raise
    except _UNEXPECTED as error:
        raise UnsupportedModelError(
            f"{config.model_type} does not run on a cache that is given to it ({type(error).__name__}: {error}). "
            f"{_WITHOUT_REUSE}"
        ) from error


@torch.no_grad()
def _checked_layout(model: Any, config: Any) -> KVLayout:
    ids = torch.arange(_PROBE_TOKENS) * 7919 % min(config.vocab_size, 30_000)
    runner = ModelRunner(model)
    batch = ids.view(1, -1).to(runner.device)
    stock = stock_cache(config)  # without windows, which shows the layout
    whole = model(input_ids=batch, **{runner.cache_name: stock}, use_cache=True).logits[0, -1]
    layout = layout_of(stock)
    unfilled = UnsupportedModelError(
        f"{config.model_type} did not fill a Transformers cache with one entry per token. {_WITHOUT_REUSE}"
    )
    attending = () if layout.counts else layout.with_kv
    if not layout.slots or any(stock.layers[layer].get_seq_length() != _PROBE_TOKENS for layer in attending):
        raise unfilled
    half = _PROBE_TOKENS // 2
    cache = SlabCache(layout, capacity=_PROBE_TOKENS + _PROBE_NEW_TOKENS)
    runner.append(ids[:half], cache, logits=False)
    states = [state.clone() for state in cache.states()]
    stepped = runner.append(ids[half:], cache, logits=True)
    assert stepped is not None
    if any(spec.kind == "recurrent" for spec in layout.states):
        # So short a text hardly needs what was summed before: in half precision, rounding could explain its loss.
        cache.set_length(half)
        pairs = zip(layout.states, states, strict=True)
        cache.place_states([torch.zeros_like(s) if spec.kind == "recurrent" else s for spec, s in pairs])
        without = runner.append(ids[half:], cache, logits=True)
        if without is not None and torch.equal(stepped, without):
            raise UnsupportedModelError(
                f"{config.model_type} answers differently when its prompt is prefilled in two steps: in Transformers "
                f"each begins its recurrent sums at zero. {_WITHOUT_REUSE}"
            )
    compare_logits(config, whole, stepped, "its prompt is prefilled in two steps")
    if cache.get_seq_length() != _PROBE_TOKENS:
        raise unfilled
    cache.set_length(half)
    cache.place_states(states)
    # generate gives logits in float32, whatever they were computed in. In bfloat16 the steps are the same or nearly so:
    # its own tolerance would let through layers whose rows depend on each other.
    decoded = torch.float16 if whole.dtype is torch.bfloat16 else whole.dtype
    for expected, found in zip(_greedy_logits(model, batch, None), _greedy_logits(model, batch, cache), strict=False):
        given = "Transformers' generate continues from a given cache"
        compare_logits(config, expected.to(decoded), found.to(decoded), given)
        if expected.argmax() != found.argmax():
            break  # a near tie that rounding decided: the texts differ from here on
    return layout


def _greedy_logits(model: Any, batch: torch.Tensor, cache: SlabCache | None) -> list[torch.Tensor]:
    """The logits of a few greedy steps, [vocab] each."""
    arguments = {"do_sample": False, "max_new_tokens": _PROBE_NEW_TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
    no_draft = {"prompt_lookup_num_tokens": None}  # one that the model's own configuration asks for reads it all again
    decoded = run_generate(
        model,
        input_ids=batch,
        attention_mask=torch.ones_like(batch),
        cache=cache,
        arguments=arguments | no_draft | {"return_dict_in_generate": True, "output_logits": True},
        after_each_token=lambda: False,
        tokenizer=None,
    )
    return [step[0] for step in decoded.raw.logits]


def compare_logits(
    config: Any, expected: torch.Tensor, found: torch.Tensor, when: str, *, remedy: str = _WITHOUT_REUSE
) -> None:
    """Raise UnsupportedModelError if two computations of the same text differ by more than rounding explains."""
    difference = (found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-12)
    tolerance = _TOLERANCE.get(expected.dtype, 8e-2)
    if not difference <= tolerance:  # written so that NaN fails too
        raise UnsupportedModelError(
            f"{config.model_type} answers differently when {when} "
            f"(relative difference {difference:.1e}, rounding explains {tolerance:.0e}). {remedy}"
        )


def max_positions_of(config: Any) -> int | None:
    """The longest sequence the model supports; None if its config has no limit."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def exact_limit_of(config: Any) -> tuple[int | None, str | None]:
    """The number of tokens up to which rotary frequencies stay the same, and the reason; None without a limit."""
    rope = getattr(config, "rope_parameters", None) or {}
    # One dict for the model, or one per layer type.
    variants = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    for variant in variants:
        kind = variant.get("rope_type")
        if kind in _LENGTH_DEPENDENT_ROPE:
            original = variant.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = int(original or max_positions_of(config) or 0) - 1
            return limit, (
                f"{kind} RoPE changes its frequencies beyond {limit} tokens, so KV computed before that point "
                "cannot replace KV computed after it"
            )
    return None, None
