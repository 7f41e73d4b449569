"""Tiny configurations of Transformers' causal language models: usual sizes, and a table of exceptions.

Sizes are given to a family's own class as its arguments, so that it derives the rest (kinds of layers, sizes of heads).
Invariant: every kind of layer that a family has by default is in its tiny configuration too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

VOCAB = 512
_LAYERS = 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
    # The same in the words of older families
    "d_model": 64,
    "n_embd": 64,
    "n_layer": _LAYERS,
    "n_layers": _LAYERS,
    "num_layers": _LAYERS,
    "encoder_layers": _LAYERS,  # from which decoders of such a pair count their own
    "decoder_layers": _LAYERS,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "attention_heads": 4,
    "ffn_hidden_size": 128,
    "ffn_dim": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "n_positions": 4096,
    "max_seq_len": 4096,
    "rotary_dim": 8,
    # Mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Latent attention and sparse attention
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    # More than the prompts here. Behind fewer, many scores are exactly zero in models this small, and which of them are
    # chosen depends on how many keys a forward sees: plain Transformers' own answers with a cache and without differ.
    "index_topk": 512,
    # Recurrent layers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_expand": 2,
    "mamba_dt_rank": 8,
    "ssm_state_size": 16,
    "state_size": 16,
    "time_step_rank": 8,
    "n_groups": 1,
    "expand": 2,
    "lru_width": 64,
    "attention_window_size": 64,
    "hidden_size_global": 64,
    # Towers for pictures and sound, which are built and not run
    "depth": 1,
    "out_hidden_size": 64,
    "image_size": 32,
    "patch_size": 16,
    # Gemma 3n and 4
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 8,
    # At the usual 0.02 the logits of so small a model hardly depend on the prompt.
    "initializer_range": 0.1,
    "init_std": 0.1,
}
_TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # if its own are too large
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")

# What the sizes above do not make right. A dict is for a configuration inside the configuration.
_GEMMA_3N = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,  # its last two layers use the KV of the first two
}
_DOTS_3 = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
    "head_dim": 32,
    "shared_experts_intermediate_size": 64,
}
_QWEN_4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 500, "num_hidden_layers": _LAYERS},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "cpmant": {"dim_head": 16, "dim_ff": 128},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": _DOTS_3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64, "mlp_layer_types": ["dense"] * 4},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS_3,
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n": {"text_config": _GEMMA_3N},
    "gemma3n_text": _GEMMA_3N,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 64},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"expert_ffn_hidden_size": 64, "moe_topk": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QWEN_4},
    "qwen4_exp_text": _QWEN_4,
    "reformer": {
        "axial_pos_embds_dim": [16, 48],
        "attn_layers": ["local", "lsh"] * 2,
        "attention_head_size": 16,
        "hash_seed": 0,
    },
    "roc_bert": {"pronunciation_embed_dim": 32, "shape_embed_dim": 32, "shape_vocab_size": VOCAB},
    "xlm": {"emb_dim": 64},
    "xlstm": {"hidden_size": 128},  # its heads are rounded up to 64
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(family: str) -> PretrainedConfig:
    """A configuration of a model small enough to be built in a second."""
    config_class = CONFIG_MAPPING[family]
    config = config_class(**_arguments(config_class, _EXCEPTIONS.get(family, {})))
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True  # the families around BERT are encoders unless told
    return config


def _arguments(config_class: type[PretrainedConfig], exceptions: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration's class is called with."""
    default = config_class()
    inner = {name: value for name, value in vars(default).items() if isinstance(value, PretrainedConfig)}
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    arguments = {name: _SIZES[name] for name, value in fields.items() if name in _SIZES and _is_size(value)}
    for name, value in fields.items():
        if name in _TOKENS and _is_size(value) and value >= VOCAB:
            arguments[name] = _TOKENS[name]
    if {"kv_lora_rank", "num_key_value_heads"} <= set(arguments):
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]  # latent attention has one for each
    arguments |= {name: value for name, value in exceptions.items() if name not in inner}
    for name, value in inner.items():
        arguments[name] = type(value)(**_arguments(type(value), exceptions.get(name, {})))
    return arguments | _kinds_of_layers(config_class, default, arguments)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kinds_of_layers(
    config_class: type[PretrainedConfig], default: PretrainedConfig, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Where four layers would leave a kind of layer out: each kind once, then as the default has them."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    small = config_class(**arguments)
    lists = {}
    for name in fields.intersection(_KINDS_OF_LAYERS) - set(arguments):
        kinds, found = getattr(default, name), getattr(small, name)
        if kinds and (len(found) != _LAYERS or set(found) != set(kinds)):
            lists[name] = [*dict.fromkeys(kinds), *kinds][:_LAYERS]
    return lists
