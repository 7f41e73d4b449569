"""Which models of vLLM can be repaired; the others are declined with a reason."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost.approx.reposition import Move, Rotation
from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.decoder import build_moved, find_decoder, most_changed, rotated

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


_LAYERS, _HEADS, _DIM = 2, 2, 8


class _Decoder:
    """Rotary angles of a real table; computing marks positions with their token."""

    rotation = Rotation(0, _DIM // 2, interleaved=False)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None] * 10000.0 ** (-torch.arange(_DIM // 2) / (_DIM // 2))
        return 1.5 * angles.cos(), 1.5 * angles.sin()  # a table with a scale, as YaRN has it

    def recompute(
        self, tokens: torch.Tensor, positions: torch.Tensor, states: torch.Tensor, *, moved: torch.Tensor, keep: int
    ) -> int:
        done = torch.cat([positions[~moved], positions[moved][:keep]])
        states[:, :, done] = tokens[done][:, None].float()
        return len(done)

    def keys(self, raw: torch.Tensor, start: int) -> torch.Tensor:
        cos, sin = self.angles(torch.arange(start, start + raw.shape[-2]))
        left, right = raw.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def test_keys_turn_and_values_stay() -> None:
    decoder: Any = _Decoder()
    raw = torch.randn(_HEADS, 5, _DIM)
    states = torch.stack([decoder.keys(raw, 3), raw, decoder.keys(raw, 3), raw])
    cpu = torch.device("cpu")
    moved = rotated(decoder, Move((states,), old_start=3, new_start=40), device=cpu)
    torch.testing.assert_close(moved[0], decoder.keys(raw, 40))
    torch.testing.assert_close(moved[2], decoder.keys(raw, 40))
    assert torch.equal(moved[1], raw)
    assert rotated(decoder, Move((states,), old_start=3, new_start=3), device=cpu) is states


def test_gaps_and_a_share_are_computed_and_nothing_before_the_exact_end() -> None:
    decoder: Any = _Decoder()
    stored = torch.full((2 * _LAYERS, _HEADS, 20, _DIM), -1.0)
    moves = [Move((stored,), old_start=7, new_start=start) for start in (20, 40)]
    states = torch.full((2 * _LAYERS, _HEADS, 50, _DIM), 7.0)
    count = build_moved(decoder, states, moves, tokens=list(range(100, 150)), exact=10, ratio=0.2)
    kinds = states[1, 0, :, 0]  # a layer's values
    assert (kinds[:10] == 7).all(), "exact"
    assert torch.equal(kinds[10:20], torch.arange(110.0, 120.0)), "a gap"
    moved = kinds[20:50]
    assert int((moved == -1).sum()) == 24
    assert count == (10, 6)


def test_what_was_not_moved_goes_on_and_of_the_moved_what_changed_most() -> None:
    before = torch.zeros(_HEADS, 6, _DIM)
    after = before.clone()
    after[0, :, 0] = torch.tensor([0.0, 3.0, 0.0, 1.0, -2.0, 9.0])
    moved = torch.tensor([False, True, False, True, True, True])
    assert most_changed(before, after, moved, 2).tolist() == [0, 1, 2, 5]
    assert most_changed(before, after, moved, 0).tolist() == [0, 2]
    assert most_changed(before, after, moved, 4).tolist() == [0, 1, 2, 3, 4, 5]
