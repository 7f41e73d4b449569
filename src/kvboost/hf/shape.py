"""A model's shape, from the model itself or, if only its KV layout is needed, from its config.

Used by memory estimates. Invariant: a model gives the same shape with its weights and without them.
"""

from __future__ import annotations

from typing import Any

import torch

from kvboost.capacity import ModelShape
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.hf.attention import NAME
from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.codec import codec_for
from kvboost.hf.layers import windows_by_layer
from kvboost.hf.numerics.tiles import why_no_tiles
from kvboost.hf.probe import max_positions_of

_SAMPLE_TOKENS = 64  # the 4-bit codec keeps one mean for so many


def shape_of(model: Any, layout: KVLayout) -> ModelShape:
    """The shape of a model, loaded or not."""
    config = model.config.get_text_config(decoder=True)
    layers = layout.num_layers
    keys = layout.slots[0]
    embedding = model.get_input_embeddings().weight
    inside = sum(p.numel() for p in model.parameters() if p.dim() > 1) - embedding.numel()
    head = model.get_output_embeddings()
    if head is not None and head.weight is embedding:
        inside += embedding.numel()  # one matrix for both: the vocabulary is multiplied with, too
    return ModelShape(
        layers=layers,
        hidden=int(config.hidden_size),
        intermediate=_intermediate(config),
        vocab=int(embedding.shape[0]),
        heads=int(getattr(config, "num_attention_heads", 1)),  # a recurrent model has none
        kv_heads=max(spec.heads for spec in layout.slots),
        head_dim=max(spec.dim for spec in layout.slots),
        element=keys.dtype.itemsize,
        parameters=inside,
        kv_per_token=layout.bytes_per_token,
        windows=_windows(model, layers),
        masks=model.config._attn_implementation == NAME,
        tiled=keys.device.type == "cpu" and why_no_tiles(model) is None,  # as far as can be told without running it
        max_positions=max_positions_of(config),
        on_host=keys.device.type == "cpu",
        state_bytes=layout.state_bytes,
    )


def stored_bytes_per_token(layout: KVLayout) -> dict[int, int]:
    """What a token takes in the store, by bits: measured on a small block, as the codec packs it."""
    sizes: dict[int, int] = {}
    for bits in (16, 8, 4):
        block = [
            torch.zeros(len(slots), spec.heads, _SAMPLE_TOKENS, spec.dim, dtype=spec.dtype, device=spec.device)
            for spec, slots in layout.groups.items()
        ]
        # Not where a text begins: the first token, which the 4-bit codec keeps as it is, is one in many.
        packed = codec_for(bits, layout).pack(block, start=_SAMPLE_TOKENS)
        sizes[bits] = -(-sum(t.numel() * t.element_size() for t in packed) // _SAMPLE_TOKENS)
    return sizes


def layout_of_config(config: Any, *, dtype: torch.dtype, device: torch.device) -> KVLayout:
    """The KV layout a config promises; what a loaded model really keeps is found by running it."""
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{config.model_type} reads its prompt with an encoder; give a decoder-only model")
    heads = int(text.num_attention_heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    slot = TensorSpec(int(kv_heads), dim, dtype, device)
    return KVLayout((slot,) * (2 * int(text.num_hidden_layers)))


def _intermediate(config: Any) -> int:
    """Numbers a token has inside an MLP, at most: of all experts it is sent to."""
    wide = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    if isinstance(wide, list | tuple):  # one for each layer
        wide = max(wide)
    if not getattr(config, "num_experts_per_tok", None):
        return int(wide)
    return int(getattr(config, "moe_intermediate_size", None) or wide) * int(config.num_experts_per_tok)


def _windows(model: Any, layers: int) -> tuple[int | None, ...]:
    try:
        return tuple(windows_by_layer(model))[:layers]
    except UnsupportedModelError:
        return (None,) * layers  # full attention takes the most memory
