from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvboost.approx import attention
from kvboost.approx.attention import BlockedAttention


@dataclass
class Positions:
    positions: torch.Tensor


@pytest.mark.parametrize("count", [5, 16, 40, 41])
@pytest.mark.parametrize("boolean", [True, False])
def test_blocks_give_what_one_call_gives(count: int, boolean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK", 16)
    generator = torch.Generator().manual_seed(count)
    positions = torch.randperm(200, generator=generator)[:count].sort().values
    query, key, value = (torch.randn(1, 3, n, 8, generator=generator) for n in (count, 200, 200))
    mask = (torch.arange(200) <= positions.view(-1, 1)).view(1, 1, count, 200)
    mask = mask if boolean else torch.where(mask, 0.0, -torch.inf)
    whole = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    key[:, :, int(positions[-1]) + 1 :] = float("nan")  # behind the last row nothing is looked at
    calls: list[int] = []
    real = BlockedAttention._in_blocks
    monkeypatch.setattr(BlockedAttention, "_in_blocks", lambda self, *a, **k: (calls.append(1), real(self, *a, **k))[1])
    if count > 16:
        with BlockedAttention(Positions(positions)):
            blocked = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
        assert torch.allclose(whole, blocked, atol=1e-6)
        assert calls == [1]
    with BlockedAttention(Positions(positions[:-1])):  # another number of positions: some other attention
        scaled_dot_product_attention(query, value, value, attn_mask=mask)
    assert len(calls) == (count > 16)
