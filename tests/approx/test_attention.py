from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvboost.approx import attention
from kvboost.approx.attention import BlockedAttention
from kvboost.hf.attention import Call


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
    options = {"scaling": 0.3}
    plain = partial(sdpa_attention_forward, Layer(), query, key, value, mask, **options)
    call = Call(Layer(), query, key, value, mask, options, lambda: plain()[0])
    if count > 16:
        blocked = BlockedAttention(lambda: positions).attend(call)
        assert blocked.shape == whole.shape
        assert torch.allclose(whole, blocked, atol=1e-6)
    else:
        small = BlockedAttention(lambda: positions).attend(call)
        assert small.isnan().any(), "few rows are one call, over all keys"
    others = BlockedAttention(lambda: positions[:-1])  # another number of positions: some other attention
    assert others.attend(call).isnan().any()
