"""Moved KV is re-rotated as the model would have rotated it, and gaps and a sample are computed."""

from __future__ import annotations

from typing import Any

import torch

from kvboost.approx.reposition import Rotation
from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.codec import codec_for
from kvboost.integrations.vllm.moved import place_moved, rotated
from kvboost.types import Chunk, KVBlock

_LAYERS, _HEADS, _DIM = 2, 2, 8


class _Decoder:
    """Rotary angles of a real table; computing marks positions with their token."""

    rotation = Rotation(0, _DIM // 2, interleaved=False)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None] * 10000.0 ** (-torch.arange(_DIM // 2) / (_DIM // 2))
        return 1.5 * angles.cos(), 1.5 * angles.sin()  # a table with a scale, as YaRN has it

    def recompute(self, tokens: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        states[:, :, positions] = tokens[positions][:, None].float()

    def keys(self, raw: torch.Tensor, start: int) -> torch.Tensor:
        cos, sin = self.angles(torch.arange(start, start + raw.shape[-2]))
        left, right = raw.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def test_keys_turn_and_values_stay() -> None:
    decoder: Any = _Decoder()
    raw = torch.randn(_HEADS, 5, _DIM)
    states = torch.stack([decoder.keys(raw, 3), raw, decoder.keys(raw, 3), raw])
    moved = rotated(decoder, states, old=3, new=40)
    torch.testing.assert_close(moved[0], decoder.keys(raw, 40))
    torch.testing.assert_close(moved[2], decoder.keys(raw, 40))
    assert torch.equal(moved[1], raw)
    assert rotated(decoder, states, old=3, new=3) is states


def _chunk(start: int, end: int) -> Chunk:
    return Chunk(start, end, b"", bytes([start]), None, bytes([start]))


def test_gaps_and_a_sample_are_computed_and_nothing_before_the_exact_end() -> None:
    decoder: Any = _Decoder()
    spec = TensorSpec(_HEADS, _DIM, torch.float32, torch.device("cpu"))
    codec = codec_for(16, KVLayout((spec,) * (2 * _LAYERS)))
    chunks = [_chunk(0, 10), _chunk(10, 20), _chunk(20, 40), _chunk(40, 60)]
    stored = torch.full((2 * _LAYERS, _HEADS, 20, _DIM), -1.0)
    block = KVBlock.of(chunks[2], (stored,), context=b"", bitwise=True)
    last = KVBlock.of(chunks[3], (stored,), context=b"", bitwise=True)
    states = torch.full((2 * _LAYERS, _HEADS, 50, _DIM), 7.0)
    count = place_moved(
        decoder,
        codec,
        states,
        tokens=list(range(100, 150)),
        exact=10,
        chunks=chunks,
        blocks={2: block, 3: last},
        ratio=0.2,
    )
    kinds = states[1, 0, :, 0]  # a layer's values
    assert (kinds[:10] == 7).all(), "exact"
    assert torch.equal(kinds[10:20], torch.arange(110.0, 120.0)), "a gap"
    moved = kinds[20:50]
    assert int((moved == -1).sum()) == 24
    assert count == 10 + 6
