"""Which models of vLLM can be repaired; the others are declined with a reason."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.decoder import find_decoder

_NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


class _Attention(torch.nn.Module):
    def __init__(self, rotary: str, *, adapters: bool) -> None:
        super().__init__()
        self.attn = torch.nn.Identity()
        self.qkv_proj = SimpleNamespace(**({"base_layer": 1} if adapters else {}))
        table = {"cos_sin_cache": torch.zeros(4, 8), "rotary_dim": 8, "is_neox_style": True}
        self.rotary_emb = type(rotary, (SimpleNamespace,), {})(**table)


def _model(layer: str, rotary: str, *, adapters: bool) -> torch.nn.Module:
    def make() -> torch.nn.Module:
        module = type(layer, (torch.nn.Module,), {})()
        module.self_attn = _Attention(rotary, adapters=adapters)
        return module

    root = torch.nn.Module()
    root.model = torch.nn.Module()
    root.model.layers = torch.nn.ModuleList([make(), make()])
    return root


@pytest.mark.parametrize(
    ("layer", "rotary", "adapters", "said"),
    [
        ("Qwen3DecoderLayer", "RotaryEmbedding", False, ""),
        ("MixtralDecoderLayer", "RotaryEmbedding", False, "its layers are MixtralDecoderLayer"),
        ("LlamaDecoderLayer", "RotaryEmbedding", True, "adapters are enabled"),
        ("LlamaDecoderLayer", "MRotaryEmbedding", False, "encoded by MRotaryEmbedding"),
    ],
)
def test_other_models_are_declined_with_a_reason(layer: str, rotary: str, adapters: bool, said: str) -> None:
    root = _model(layer, rotary, adapters=adapters)
    attention: dict[str, Any] = {name: root.get_submodule(name) for name in _NAMES}
    if not said:
        assert find_decoder(attention, _NAMES).rotation.frequencies == 4
    else:
        with pytest.raises(UnsupportedModelError, match=re.escape(said)):
            find_decoder(attention, _NAMES)


def test_a_module_that_nobody_holds_is_not_found() -> None:
    attention: dict[str, Any] = {name: torch.nn.Identity() for name in _NAMES}
    with pytest.raises(UnsupportedModelError, match="was not found"):
        find_decoder(attention, _NAMES)
