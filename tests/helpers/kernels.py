"""Kernels that a test can rely on, whatever CPU it runs on."""

from __future__ import annotations

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
