"""The decoder layers of a model and their attention windows.

Used by joint decoding, recomputation, KV paging, layer streaming and memory estimates. Invariant: a kind of attention
layer that is not known here is refused, never taken for full attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer

from kvboost.errors import UnsupportedModelError


def decoder_of(model: Any) -> Any:
    """The model without its projection onto the vocabulary, or all of it where that cannot be run by itself."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    alone = isinstance(decoder, torch.nn.Module) and "input_ids" in inspect.signature(decoder.forward).parameters
    return decoder if alone else model


def without_peft(model: Any) -> Any:
    """The model that PEFT may have wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def cache_name(model: Any) -> str:
    """The argument of a model's forward, and the entry of its output, that is its cache."""
    arguments = inspect.signature(without_peft(model).forward).parameters
    return "cache_params" if "cache_params" in arguments else "past_key_values"


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The decoder layers, in order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    # Of the text model: a vision tower may have as many layers.
    inside = model.get_decoder() if hasattr(model, "get_decoder") else model
    found = [module for module in inside.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
    if not found:
        raise UnsupportedModelError(
            f"{model.config.model_type} has no list of {count} decoder layers, so they cannot be run one by one"
        )
    return list(found[0])


def attention_windows(model: Any) -> dict[str, int | None]:
    """The attention window of each kind of layer, by its name in the config; None is full attention."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return {"all": window}
    known = {"full_attention": None, "sliding_attention": window, **dict.fromkeys(_without_kv(config, kinds))}
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise UnsupportedModelError(
            f"{config.model_type} has layers of kind {', '.join(unknown)}, whose attention is not supported here"
        )
    return {kind: known[kind] for kind in kinds}


def _without_kv(config: Any, kinds: Sequence[str]) -> set[str]:
    """The kinds of layers that have a recurrent state, or nothing at all, in place of keys and values; or beside all.

    None of them hides a key.
    """
    layers = DynamicCache(config=config).layers
    return {
        kind
        for kind, layer in zip(kinds, layers, strict=False)
        if not isinstance(layer, DynamicLayer) or type(layer) is LinearAttentionAndFullAttentionLayer
    }


def windows_by_layer(model: Any) -> list[int | None]:
    """The attention window of each layer, in order; None is full attention."""
    config = model.config.get_text_config(decoder=True)
    windows = attention_windows(model)
    kinds = getattr(config, "layer_types", None) or ["all"] * config.num_hidden_layers
    return [windows[kind] for kind in kinds]
