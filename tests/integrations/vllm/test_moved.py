"""Moved KV is re-rotated as the model would have rotated it, and gaps and some of it are computed."""

from __future__ import annotations

from typing import Any

import torch

from kvboost.approx.reposition import Move, Rotation
from kvboost.integrations.vllm.decoder import most_changed
from kvboost.integrations.vllm.moved import place_moved, rotated

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
    count = place_moved(decoder, states, moves, tokens=list(range(100, 150)), exact=10, ratio=0.2)
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
