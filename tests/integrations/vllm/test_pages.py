"""Pages of any order can be read, and what holds no element once is refused. vLLM's own: test_exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.pages import Pages, learn_order, slots_of


class _Backend:
    """Writes pages in an order of its own, as attention backends do."""

    def __init__(
        self, *, heads: int, tokens: int, dim: int, seed: int, loses: bool = False, in_columns: bool = False
    ) -> None:
        count = 2 * heads * tokens * dim
        self._order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).view(2, heads, tokens, dim)
        if in_columns:  # as vLLM's CPU backend in float32: keys by dimension, then values by token
            keys, values = torch.arange(count).view(2, heads, -1)
            self._order = torch.stack(
                [keys.view(heads, dim, tokens).transpose(1, 2), values.view(heads, tokens, dim)]
            ).contiguous()
        if loses:
            self._order.view(-1)[0] = self._order.view(-1)[1]

    def do_kv_cache_update(self, layer: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        tokens = cache.shape[2]
        for row, slot in enumerate(slots.tolist()):
            page = cache[slot // tokens]
            flat = page.reshape(-1).clone()
            for kind, states in enumerate((keys, values)):
                flat[self._order[kind, :, slot % tokens]] = states[row]
            page.copy_(flat.view(page.shape))


class _Layer:
    def __init__(self, impl: _Backend) -> None:
        self.impl = impl


@given(
    heads=st.integers(1, 3),
    tokens=st.sampled_from([4, 8]),
    dim=st.sampled_from([4, 6]),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    by_token=st.booleans(),
    in_columns=st.booleans(),
)
def test_what_is_written_is_read(
    heads: int, tokens: int, dim: int, seed: int, dtype: torch.dtype, by_token: bool, in_columns: bool
) -> None:
    layer = _Layer(_Backend(heads=heads, tokens=tokens, dim=dim, seed=seed, in_columns=in_columns))
    cache = torch.zeros(5, heads, tokens, 2 * dim, dtype=dtype)
    if by_token:  # as some devices keep it: [pages, tokens, heads, ...] seen from the other side
        cache = torch.zeros(5, tokens, heads, 2 * dim, dtype=dtype).transpose(1, 2)
    order = learn_order(layer, cache, heads=heads, tokens=tokens, dim=dim)
    pages = Pages(layer, cache, heads=heads, dim=dim, order=order)
    table = torch.tensor([3, 0, 4])
    states = torch.randn(2, heads, 3 * tokens, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    pages.write(slots_of(table, tokens=tokens, start=0, end=3 * tokens), states)
    assert torch.equal(pages.read(table), states)
    assert torch.equal(pages.read(table[1:2]), states[:, :, tokens : 2 * tokens])
    pages.write(slots_of(table, tokens=tokens, start=1, end=tokens + 2), states[:, :, 1 : tokens + 2] * 2)
    assert torch.equal(pages.read(table)[:, :, 1 : tokens + 2], states[:, :, 1 : tokens + 2] * 2)
    assert torch.equal(pages.read(table)[:, :, tokens + 2 :], states[:, :, tokens + 2 :])


def test_pages_that_lose_elements_are_refused() -> None:
    layer = _Layer(_Backend(heads=2, tokens=4, dim=4, seed=0, loses=True))
    with pytest.raises(UnsupportedModelError, match="each key and value once"):
        learn_order(layer, torch.zeros(3, 2, 4, 8), heads=2, tokens=4, dim=4)
    with pytest.raises(UnsupportedModelError, match="elements"):
        learn_order(layer, torch.zeros(3, 2, 4, 5), heads=2, tokens=4, dim=4)
