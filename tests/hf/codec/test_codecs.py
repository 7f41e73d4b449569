from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.approx.probe import probe_reposition
from kvboost.approx.reposition import Move
from kvboost.errors import ConfigError
from kvboost.hf.cache import KVLayout, SlabCache, TensorSpec
from kvboost.hf.codec import CODECS, codec_for
from kvboost.hf.codec.base import RoundingCodec
from kvboost.hf.codec.int4 import _hadamard
from tests.helpers.devices import Devices, host

_CPU = torch.device("cpu")
_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _layout(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> KVLayout:
    return KVLayout(tuple(TensorSpec(heads, dim, dtype, _CPU) for heads, dim in shapes))


def _block(layout: KVLayout, tokens: int, *, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(len(slots), spec.heads, tokens, spec.dim, generator=generator).to(spec.dtype)
        for spec, slots in layout.groups.items()
    )


# Equal shapes, an odd number of layers, keys wider than values, layers that differ, odd head sizes.
_LAYOUTS = {
    "equal": [(2, 64)] * 4,
    "odd": [(3, 16)] * 6,
    "wide keys": [(1, 96), (1, 64), (1, 96), (1, 64)],
    "mixed": [(2, 8), (2, 8), (2, 8), (1, 5), (2, 8), (2, 8), (1, 5), (1, 5)],
    "one": [(1, 1), (1, 1)],
    "80": [(2, 80)] * 2,
}


@pytest.mark.parametrize("bits", list(CODECS))
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name", list(_LAYOUTS))
@settings(max_examples=8, deadline=None)
@given(tokens=st.integers(1, 150), start=st.sampled_from([0, 1, 200]), seed=st.integers(0, 99))
def test_blocks_come_back_in_place_and_near(
    bits: int, dtype: torch.dtype, name: str, tokens: int, start: int, seed: int
) -> None:
    layout = _layout(*_LAYOUTS[name], dtype=dtype)
    codec = codec_for(bits, layout)
    block = _block(layout, tokens, seed=seed)
    packed = codec.pack(block, start=start)
    assert all(torch.equal(a, b) for a, b in zip(packed, codec.pack(block, start=start), strict=True))
    cache = SlabCache(layout, capacity=start + tokens + 3, batch=2)
    codec.place(cache, start, packed, row=1)
    share = {16: 0.0, 8: 0.012, 4: 0.2}[bits]  # of a row's size; half a scale is 0.4 % and 4 % of its range
    rounding = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for slab, alone, right in zip(cache.slabs, codec.unpack(packed), block, strict=True):
        there = slab[:, 1, :, start : start + tokens]
        assert torch.equal(there, alone)
        assert there.dtype == dtype
        error = (there.float() - right.float()).square().mean(dim=-1).sqrt()
        assert (error <= (share + rounding) * (right.float().abs().amax() + 1)).all()
        assert not slab[:, 0].any()  # nothing beside the rows asked for
        assert not slab[:, 1, :, :start].any()
        assert not slab[:, 1, :, start + tokens :].any()


def test_sixteen_bits_are_the_same_bits_and_share_no_memory() -> None:
    layout = _layout((2, 8), (2, 8))
    block = _block(layout, 5)
    packed = codec_for(16, layout).pack(block, start=0)
    assert torch.equal(packed[0], block[0])
    assert packed[0].data_ptr() != block[0].data_ptr()


@given(seed=st.integers(0, 999), size=st.floats(1e-20, 1e20))
@settings(max_examples=30, deadline=None)
def test_eight_bits_err_by_half_a_scale_at_most(seed: int, size: float) -> None:
    layout = _layout((2, 128), (2, 128))
    block = tuple(tensor * size for tensor in _block(layout, 7, seed=seed))
    packed = codec_for(8, layout).pack(block, start=3)
    back = codec_for(8, layout).unpack(packed)[0]
    scale = packed[1].float().repeat_interleave(64, dim=-1)
    assert ((back - block[0]).abs() <= 0.501 * scale).all()


@given(seed=st.integers(0, 999), size=st.floats(1e-20, 1e20))
@settings(max_examples=30, deadline=None)
def test_four_bits_err_by_half_a_scale_at_most(seed: int, size: float) -> None:
    """Values element by element; keys as they are rotated, where the matrix product rounds a little more."""
    layout = _layout((2, 64), (2, 64))
    block = tuple(tensor * size for tensor in _block(layout, 70, seed=seed))
    packed = codec_for(4, layout).pack(block, start=3)
    error = codec_for(4, layout).unpack(packed)[0] - block[0]
    key_scales, value_scales = packed[1].float(), packed[5].float()
    assert (error[1:].abs() <= 0.501 * value_scales).all()
    assert ((error[:1] @ _hadamard(64)).abs() <= 0.75 * key_scales).all()


def _outlying_channels(axis: int) -> tuple[torch.Tensor, ...]:
    """Keys and values [2, heads, tokens, dim] with a few large entries along ``axis``: 3 channels, or 2 tokens."""
    block = _block(_layout((2, 64), (2, 64)), 128)[0]
    large = torch.zeros(128, 64)
    if axis == 3:
        large[:, [3, 17, 40]] = torch.tensor([60.0, -45.0, 30.0])
    else:
        large[[9, 77]] = 50.0
    return (block + large,)


def test_keys_keep_their_channels_and_values_their_tokens() -> None:
    """The axes of KIVI: this fails if keys and values are exchanged."""
    codec = codec_for(4, _layout((2, 64), (2, 64)))

    def errors(block: tuple[torch.Tensor, ...]) -> tuple[float, float]:
        back = codec.unpack(codec.pack(block, start=1))
        key, value = (back[0] - block[0]).square().mean(dim=(1, 2, 3)).sqrt().tolist()
        return key, value

    key, value = errors(_outlying_channels(3))
    assert key < 0.15  # as if the large channels were not there
    assert value > 5 * key
    # A token of large values does not touch the others.
    block = _outlying_channels(2)
    back = codec.unpack(codec.pack(block, start=1))[0]
    others = [token for token in range(128) if token not in (9, 77)]
    assert (back[1] - block[0][1])[:, others].square().mean().sqrt() < 0.15


@pytest.mark.parametrize(("bits", "least"), [(8, 1.9), (4, 3.5)])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (8, 128), (1, 256)])
@pytest.mark.parametrize("start", [0, 128])
def test_the_ratio_with_everything_counted(bits: int, least: float, heads: int, dim: int, start: int) -> None:
    layout = _layout(*[(heads, dim)] * 8, dtype=torch.bfloat16)
    block = _block(layout, 128)
    packed = codec_for(bits, layout).pack(block, start=start)
    ratio = sum(tensor.nbytes for tensor in block) / sum(tensor.nbytes for tensor in packed)
    # The first block of a text keeps a row as it is.
    assert ratio >= least - (0.1 if start == 0 and bits == 4 else 0.0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_what_is_not_finite_spoils_only_its_own_row(bits: int, bad: float) -> None:
    layout = _layout((2, 64), (2, 64))
    block = _block(layout, 40)
    good = codec_for(bits, layout).unpack(codec_for(bits, layout).pack(block, start=1))[0]
    block[0][1, 1, 5, 7] = bad
    back = codec_for(bits, layout).unpack(codec_for(bits, layout).pack(block, start=1))[0]
    assert back.isfinite().all()
    others = [token for token in range(40) if token != 5]
    assert torch.equal(back[1][:, others], good[1][:, others])
    assert torch.equal(back[0], good[0])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("level", [0.0, 5.0, -0.001])
def test_constant_rows_stay_constant(bits: int, level: float) -> None:
    layout = _layout((2, 64), (2, 64))
    back = codec_for(bits, layout).unpack(codec_for(bits, layout).pack((torch.full((2, 2, 9, 64), level),), start=4))
    assert (back[0] - level).abs().max() <= 0.01 * abs(level)


def test_the_first_token_of_a_text_is_kept_as_it_is() -> None:
    layout = _layout((2, 64), (2, 64))
    block = _block(layout, 30)
    block[0][:, :, 0] *= 500  # an attention sink must not coarsen its neighbours
    codec = codec_for(4, layout)
    back = codec.unpack(codec.pack(block, start=0))[0]
    assert torch.equal(back[:, :, 0], block[0][:, :, 0])
    assert (back - block[0])[:, :, 1:].square().mean().sqrt() < 0.15


@pytest.mark.parametrize("bits", [8, 4])
def test_what_was_packed_for_another_layout_is_refused_before_anything_is_written(bits: int) -> None:
    layout = _layout((2, 64), (2, 64))
    codec = codec_for(bits, layout)
    for other in (_layout((2, 32), (2, 32)), _layout((1, 64), (1, 64)), _layout(*[(2, 64)] * 4)):
        packed = codec_for(bits, other).pack(_block(other, 6), start=1)
        cache = SlabCache(layout, capacity=20, batch=2)
        with pytest.raises(ValueError, match="layout"):
            codec.place(cache, 0, packed)
        assert not cache.slabs[0].any()
        with pytest.raises(ValueError, match="another layout"):
            codec_for(bits, other).place(cache, 0, packed)
    packed = codec.pack(_block(layout, 6), start=1)
    with pytest.raises(ValueError, match="layout"):
        codec.unpack(packed[:-1])
    with pytest.raises(ValueError, match="do not fit a cache"):
        codec.place(SlabCache(layout, capacity=10), 252, packed)


def test_unknown_bits_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="16, 8, 4"):
        codec_for(3, _layout((1, 4), (1, 4)))


def test_a_rounding_codec_that_does_not_say_how_to_pack_cannot_be_made() -> None:
    class Forgetful(RoundingCodec):
        name = "forgetful"

        def _tokens(self, packed: Any) -> int:
            return 1

        def _write(self, packed: Any, targets: Any) -> None: ...

    with pytest.raises(TypeError, match="pack"):
        Forgetful(_layout((1, 4), (1, 4)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["llama", "phi", "gemma3_text", "gpt2"])
def test_a_models_rows_go_through_and_move(bits: int, family: str, tiny: Callable[..., Any]) -> None:
    from kvboost import KVBoost

    model = tiny(family)
    cache = KVBoost(model, None, chunk_size=8, quality="exact").prefill(list(range(3, 43))).cache
    codec = codec_for(bits, cache.layout)
    tensors = codec.unpack(codec.pack(cache.span(8, 40), start=8))
    for one, other in zip(tensors, cache.span(8, 40), strict=True):
        assert (one - other).square().mean().sqrt() <= 0.12 * other.square().mean().sqrt()
    if family != "gpt2":  # learned positions do not move, and need not
        probe_reposition(model, cache.layout).place(cache, [Move(tensors, 8, 60)])


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), gap=st.integers(0, 12), most=st.sampled_from([1, 40])
)
def test_an_accelerator_copies_neighbours_together(sizes: list[int], gap: int, most: int) -> None:
    """The same blocks, whether copied one by one or several at once, in few launches."""
    with Devices() as devices:
        device = torch.device("cuda", 0)
        layout = KVLayout((TensorSpec(2, 8, torch.float32, device),) * 4)
        ends = list(accumulate(sizes))
        spans = list(zip([0, *ends], ends, strict=False))
        cache, copy = (SlabCache(layout, capacity=ends[-1]) for _ in range(2))
        cache.place(0, [torch.randn(4, 2, ends[-1], 8).to(device)])
        codec = codec_for(16, layout)
        with mock.patch("kvboost.hf.codec.base._AT_ONCE", most * layout.bytes_per_token):
            devices.events.clear()
            found = list(codec.pack_each(cache, spans))
            together = most > 1 and ends[-1] <= most
            if together and len(sizes) > 1:
                assert devices.counts["launch"] == 2
            for (start, end), packed in zip(spans, found, strict=True):
                assert torch.equal(host(packed[0]), host(cache.span(start, end)[0]))
                assert host(packed[0]).untyped_storage().nbytes() == host(packed[0]).nbytes, "of its own memory"
            copy.place(0, [torch.zeros(4, 2, ends[-1], 8).to(device)])
            blocks = [(start, packed) for (start, _), packed in zip(spans, found, strict=True)]
            left_out = blocks[gap : gap + 1]
            codec.place_each(copy, [block for block in blocks if block not in left_out])
        for (start, end), packed in zip(spans, found, strict=True):
            placed = host(copy.span(start, end)[0])
            assert (
                not placed.any() if any(start == one for one, _ in left_out) else torch.equal(placed, host(packed[0]))
            )
