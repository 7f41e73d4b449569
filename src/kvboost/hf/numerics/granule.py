"""How far attention pads its keys, so that a row's sums do not depend on how many keys lie behind it.

Used by :mod:`kvboost.hf.numerics.choose` once per model. torch's flash kernel takes keys in blocks of 512 and leaves
the product with a block's values to a matrix kernel of the CPU, which splits its sums by the block's length. So the
granule is found by running the kernel. Invariant: every multiple of the granule gives the bits of a full block.
"""

from __future__ import annotations

import torch

from kvboost.hf.attention import flash
from kvboost.hf.cache import KVLayout

_BLOCK = 512  # keys
_GRANULES = (32, 64, 128, 256, _BLOCK)
_QUERIES = (32, 192, 768)  # from each of these on, the kernel takes more queries at a time


def key_granule(layout: KVLayout) -> int | None:
    """The smallest granule for all layers of a model; None if not even whole blocks give the same bits."""
    kinds = {(spec.dim, spec.dtype) for spec in layout.slots}
    differing = {keys for dim, dtype in kinds for keys in range(32, _BLOCK + 1, 32) if not _agrees(keys, dim, dtype)}
    return next((granule for granule in _GRANULES if not any(keys % granule == 0 for keys in differing)), None)


def _agrees(keys: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether so many keys give the bits of a full block with the others hidden."""
    value = torch.zeros(1, 1, _BLOCK, dim)
    value[0, 0, :keys] = cancelling_values(keys, dim, dtype)
    value = value.to(dtype)
    hidden = torch.zeros(_BLOCK, dtype=dtype).masked_fill_(torch.arange(_BLOCK) >= keys, float("-inf"))
    expected = _equal_weights(_QUERIES[0], value, hidden)[:, :, :1]
    return all(
        torch.equal(found, expected.expand_as(found))
        for found in (_equal_weights(queries, value[:, :, :keys], hidden[:keys]) for queries in _QUERIES)
    )


def _equal_weights(queries: int, value: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Attention that gives all visible keys the same weight."""
    query = value.new_zeros(1, 1, queries, value.shape[3])
    return flash(query, torch.zeros_like(value), value, hidden.expand(1, 1, queries, -1), None)


def attention_bits(dtype: torch.dtype) -> list[torch.Tensor]:
    """What the kernel makes of some values: other bits on a CPU where a granule would have to be found again."""
    value = cancelling_values(_BLOCK, 64, dtype).to(dtype).view(1, 1, _BLOCK, 64)
    visible = torch.zeros(_BLOCK, dtype=dtype)
    return [_equal_weights(q, value[:, :, :keys], visible[:keys]) for q in _QUERIES[:2] for keys in (96, _BLOCK)]


def cancelling_values(count: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [count, dim] of many magnitudes whose sums over ``count`` are zero but for rounding."""
    generator = torch.Generator().manual_seed(count)
    half, places = count // 2, torch.randperm(count, generator=generator)
    magnitudes = 2.0 ** torch.randint(-9, 10, (half, dim), generator=generator)
    some = (torch.randn(half, dim, generator=generator) * magnitudes).to(dtype).float()
    values = torch.zeros(count, dim)
    values[places[:half]], values[places[half : 2 * half]] = some, -some
    return values
