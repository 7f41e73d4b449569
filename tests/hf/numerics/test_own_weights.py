"""Routers and experts multiply in rows that do not depend on what else is in the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import grouped_mm, linear

from kvboost.core.verify import same_bits
from kvboost.hf.attention import UnsupportedAttentionError
from kvboost.hf.cache import SlabCache
from kvboost.hf.numerics import choose_numerics, own_weights
from kvboost.hf.numerics.own_weights import WholeVectors, forward_of, is_own, shapes_of
from kvboost.hf.numerics.rows import RowSizes
from kvboost.hf.numerics.tiles import Tiles
from kvboost.hf.probe import probe_model
from kvboost.hf.shape import shape_of
from tests.helpers.models import tiny_model
from tests.helpers.packing import pack_all

_IDS = (torch.arange(400) * 7919 % 97).view(1, -1)
_WIDE = {"hidden_size": 512, "moe_intermediate_size": 768, "max_position_embeddings": 1024}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _WIDE,
    "qwen2_moe": {**_WIDE, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 256},
    "mixtral": {"hidden_size": 512, "intermediate_size": 768, "max_position_embeddings": 1024},
    # of three the order of their sum is seen, and of two it is not
    "olmoe": {"hidden_size": 512, "intermediate_size": 768, "num_experts": 8, "num_experts_per_tok": 3},
}


def _kv(model: Any, layout: Any, tiles: Any, cuts: list[int]) -> tuple[torch.Tensor, ...]:
    cache, start = SlabCache(layout, capacity=_IDS.shape[1]), 0
    for end in [*cuts, _IDS.shape[1]]:
        with tiles.step(cache, end - start), torch.no_grad():
            model.get_decoder()(input_ids=_IDS[:, start:end], past_key_values=cache, use_cache=True)
        start = end
    return cache.extract(0, _IDS.shape[1])


def _differs(family: str, dtype: torch.dtype) -> bool:
    model = tiny_model(family, dtype=dtype, **_FAMILIES[family])
    layout = probe_model(model).layout
    chosen = choose_numerics(model, layout, shape_of(model, layout), numerics=None)
    assert chosen.tiles is not None, chosen.reason
    whole = _kv(model, layout, chosen.tiles, [])
    parts = [_kv(model, layout, chosen.tiles, cuts) for cuts in ([1, 5, 40], [300], [129, 130, 333])]
    return not all(same_bits(one, other) for part in parts for one, other in zip(whole, part, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", _FAMILIES)
def test_a_prefill_has_the_same_bits_however_it_is_cut(family: str, dtype: torch.dtype) -> None:
    assert not _differs(family, dtype)


def test_rows_in_other_sizes_have_other_bits_which_is_seen_before_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_weights, "run_rows", lambda layer, x, sizes: layer(x))
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model("qwen3_moe", dtype=dtype, **_WIDE)
        layout = probe_model(model).layout
        chosen = choose_numerics(model, layout, shape_of(model, layout), numerics=None)
        if chosen.tiles is None:
            assert "has other bits" in str(chosen.reason)
            return
    pytest.skip("no kernel of this machine rounds by the number of rows")


def test_a_function_of_few_numbers_is_that_of_many() -> None:
    x = torch.randn(333, 1, generator=torch.Generator().manual_seed(1)) * 4
    with WholeVectors():
        whole = torch.sigmoid(x)
        for end in (1, 7, 17, 64, 100, 332):
            assert same_bits(torch.sigmoid(x[:end]), whole[:end])
            assert same_bits(x[:end, 0].sigmoid(), whole[:end, 0])
            assert torch.nn.functional.silu(x[:end].view(1, end, 1)).shape == (1, end, 1)
    assert torch.allclose(whole, torch.sigmoid(x))


class _Other(torch.nn.Module):
    def __init__(self, multiply: Any) -> None:
        super().__init__()
        self.weight, self._multiply = torch.nn.Parameter(torch.eye(4)), multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._multiply(x, self.weight)
        return result


@pytest.mark.parametrize(
    "multiply",
    [
        torch.matmul,
        torch.mm,
        lambda x, w: x @ w,
        lambda x, w: torch.einsum("ri,oi->ro", x, w),
        lambda x, w: linear(x, w[:2]),
        lambda x, w: grouped_mm(x, w[None], offs=torch.tensor([2]), bias=w[:1]),
        lambda x, w: grouped_mm(x, w.t()[None].contiguous(), offs=torch.tensor([2])),
    ],
)
def test_what_multiplies_otherwise_is_refused_when_it_runs(multiply: Any) -> None:
    with pytest.raises(UnsupportedAttentionError, match="_Other multiplies with"):
        forward_of(_Other(multiply), {})(torch.ones(2, 4))


def test_only_transformers_modules_with_matrices_are_taken() -> None:
    model = tiny_model("qwen3_moe")
    known = (torch.nn.Linear, torch.nn.Embedding)
    own = {type(module).__name__ for module in model.modules() if is_own(module, known)}
    assert own == {"Qwen3MoeExperts", "Qwen3MoeTopKRouter"}
    assert not is_own(_Other(torch.matmul), known)
    experts = model.model.layers[0].mlp.experts
    assert {shape[:2] for shape, _ in shapes_of(experts)} == {(48, 32), (32, 24)}


def test_rows_of_no_expert_are_zero() -> None:
    sizes = {(4, 4, torch.float32, False): RowSizes(1, 32, (), 24)}
    offs = torch.tensor([2, 2, 3])
    other = _Other(lambda x, w: grouped_mm(x, torch.stack([w * n for n in (1, 5, 7)]).transpose(1, 2), offs=offs))
    expected = torch.ones(5, 4) * torch.tensor([1.0, 1, 7, 0, 0])[:, None]
    assert torch.equal(forward_of(other, sizes)(torch.ones(5, 4)), expected)


def test_packed_experts_take_what_may_be_packed_and_follow_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_all(monkeypatch)
    model, other, same = (tiny_model("qwen3_moe", seed=seed, **_WIDE) for seed in (0, 1, 0))
    layout = probe_model(model).layout
    every, some, none = (Tiles(model, layout, granule=256, budget=budget) for budget in (1 << 30, 38_000_000, 0))
    experts = sum(weight.nbytes for name, weight in model.named_parameters() if "experts" in name)
    assert every.packed_bytes > experts > none.packed_bytes == 0
    assert every.packed_bytes - experts < some.packed_bytes <= 38_000_000
    before = _kv(model, layout, every, [])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(other.get_parameter(name))
    written = _kv(model, layout, every, [])
    assert not same_bits(before[-1], written[-1])
    for name, weight in model.named_parameters():
        weight.data = same.get_parameter(name).data
    assert all(same_bits(one, again) for one, again in zip(before, _kv(model, layout, every, []), strict=True))
