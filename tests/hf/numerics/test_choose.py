"""The granule of attention's keys is found by running its kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import pytest
import torch

from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.numerics import choose as choose_module
from kvboost.hf.numerics.choose import key_granule


def layout(dtype: torch.dtype = torch.float32) -> KVLayout:
    return KVLayout((TensorSpec(2, 16, dtype, torch.device("cpu")),) * 2)


def kernel(split: Callable[[int, int], int]) -> Callable[..., torch.Tensor]:
    """Sums of values [1, 1, keys, dim], split where ``split(queries, keys)`` says."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, _: None
    ) -> torch.Tensor:
        weights = bias[0, 0, 0].exp()
        rows = [row * weight for row, weight in zip(value[0, 0].unbind(), weights, strict=True)]
        cut = split(query.shape[2], value.shape[2])
        sums = [reduce(torch.add, part) for part in (rows[:cut], rows[cut:]) if part]
        return reduce(torch.add, sums).expand(1, 1, query.shape[2], -1)

    return attend


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (lambda queries, keys: 256, 32),  # hidden keys add zeros
        (lambda queries, keys: 256 if keys % 128 == 0 else 40, 128),
        (lambda queries, keys: 256 if keys == 512 else 40, 512),
        (lambda queries, keys: 256 if queries < 768 else 40, None),
    ],
    ids=["none", "by 128", "by block", "by queries"],
)
def test_the_granule_is_the_smallest_whose_multiples_agree(
    split: Callable[[int, int], int], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_module, "flash", kernel(split))
    assert key_granule(layout()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_kernel_has_a_granule(dtype: torch.dtype) -> None:
    found = key_granule(layout(dtype))
    assert found is not None
    assert 512 % found == 0
