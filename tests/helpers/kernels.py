"""Kernels that a test can rely on, whatever CPU it runs on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import linear


def round_by_rows(patch: pytest.MonkeyPatch) -> None:
    """Let linear layers split their sums by the number of rows, as the kernels of most CPUs do for some numbers."""

    def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        cut = self.in_features // 2 if x.numel() // x.shape[-1] % 32 else 0
        result = linear(x[..., cut:], self.weight[:, cut:], self.bias)
        return result + linear(x[..., :cut], self.weight[:, :cut]) if cut else result

    patch.setattr(torch.nn.Linear, "forward", forward)


def with_flash_attention(model: Any, patch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """A copy of ``model`` with FlashAttention-2, whose kernel is not there: torch's stands in for it.

    Beside it a list that gets the batch of each call.
    """

    def kernel(query: Any, key: Any, value: Any, mask: Any, *, softmax_scale: float, **_: Any) -> torch.Tensor:
        assert mask is None
        calls.append(query.shape[0])
        rows, keys = query.shape[1], key.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            *(states.transpose(1, 2) for states in (query, key, value)),
            attn_mask=torch.ones(rows, keys).tril(keys - rows) > 0,
            scale=softmax_scale,
            enable_gqa=True,
        ).transpose(1, 2)

    calls: list[int] = []
    patch.setattr("transformers.integrations.flash_attention._flash_attention_forward", kernel)
    copied = copy.deepcopy(model)
    copied.config._attn_implementation = "flash_attention_2"
    return copied, calls
