from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvboost.approx import attention
from kvboost.approx.attention import BlockedAttention


@dataclass
class Positions:
    positions: torch.Tensor


class Layer(torch.nn.Module):
    """Queries of two heads share each head of keys."""

    num_key_value_groups = 2


@pytest.mark.parametrize("count", [5, 16, 40, 41])
@pytest.mark.parametrize("boolean", [True, False])
def test_blocks_give_what_one_call_gives(count: int, boolean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK", 16)
    generator = torch.Generator().manual_seed(count)
    positions = torch.randperm(190, generator=generator)[:count].sort().values
    query, key, value = (
        torch.randn(1, heads, n, 8, generator=generator) for heads, n in ((6, count), (3, 200), (3, 200))
    )
    mask = (torch.arange(200) <= positions.view(-1, 1)).view(1, 1, count, 200)
    mask = mask if boolean else torch.where(mask, 0.0, -torch.inf)
    whole, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=0.3)
    key[:, :, int(positions[-1]) + 1 :] = float("nan")  # after the last row nothing is looked at
    if count > 16:
        blocked = BlockedAttention(Positions(positions)).attend(Layer(), query, key, value, mask, scaling=0.3)
        assert blocked.shape == whole.shape
        assert torch.allclose(whole, blocked, atol=1e-6)
    else:
        small = BlockedAttention(Positions(positions)).attend(Layer(), query, key, value, mask, scaling=0.3)
        assert small.isnan().any(), "few rows are one call, over all keys"
    others = BlockedAttention(Positions(positions[:-1]))  # another number of positions: some other attention
    assert others.attend(Layer(), query, key, value, mask, scaling=0.3).isnan().any()
