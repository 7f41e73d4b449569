"""The codec benchmark on a tiny model: every scheme appears, raw agreement is perfect, the order is as known."""

from __future__ import annotations

import torch

from benchmarks.common.roundings import SCHEMES
from benchmarks.internals import KVLayout, TensorSpec, codec_for
from benchmarks.store.codec import packed_bits, speeds

_LAYOUT = KVLayout((TensorSpec(2, 64, torch.float32, torch.device("cpu")),) * 4)


def test_bits_count_scales_and_means() -> None:
    assert packed_bits(codec_for(8, _LAYOUT), _LAYOUT, 128) == 8.25
    assert packed_bits(codec_for(4, _LAYOUT), _LAYOUT, 128) == 4.5
    assert packed_bits(codec_for(4, _LAYOUT), _LAYOUT, 1) > 8  # one token pays for a whole window's means


def test_speeds_cover_every_shape_and_leave_the_threads_alone() -> None:
    before = torch.get_num_threads()
    found = speeds(chunk=4, repeat=1)
    assert torch.get_num_threads() == before
    assert {entry["codec"] for entry in found} == {"raw", "int8", "int4-hadamard"}
    assert all(min(entry["decode"]) > 0 for entry in found)


def test_schemes_treat_keys_and_values_by_their_own_axes() -> None:
    block = torch.randn(4, 2, 100, 64, generator=torch.Generator().manual_seed(1))
    block[..., 5] += 80.0  # one large channel everywhere
    kivi, swapped = (SCHEMES[name] for name in list(SCHEMES)[:2])
    right, wrong = (s.trip([block], _LAYOUT, None, 128)[0] - block for s in (kivi, swapped))
    assert right[::2].abs().mean() < 0.2 * wrong[::2].abs().mean()
    assert wrong[1::2].abs().mean() < 0.2 * right[1::2].abs().mean()
