"""Linear layers over few rows, as joint decode steps have them: weights times rows instead of rows times weights.

Used by :mod:`kvboost.hf.ragged`. In float32 on CPUs, MKL's kernel for some ten rows takes up to 2.7 times as long as
for the same product with the two sides exchanged. Whether it does is measured when the runner is made. The result is
the same up to rounding, so nothing that promises bits uses it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

import torch
from torch.nn.functional import linear

ROWS = range(8, 64)
"""Numbers of rows for which it pays."""
_TEST_ROWS, _TEST_ROUNDS = 16, 5
_MIN_GAIN = 1.1  # below it the difference may be noise
_TEST_BYTES = 1 << 26  # weights run through in a round: more than caches hold, as in a model


def exchanged(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear(rows, weight, bias)`` of [..., inputs], up to rounding."""
    flat = rows.reshape(-1, rows.shape[-1]).t()
    product = torch.mm(weight, flat) if bias is None else torch.addmm(bias[:, None], weight, flat)
    return product.t().contiguous().view(*rows.shape[:-1], -1)


@torch.no_grad()
def exchanging_pays(model: Any) -> bool:
    """Whether :func:`exchanged` is the faster way for the shape that most of a model's weights have."""
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear and is_eligible(m.weight)]
    if not layers:
        return False
    sizes: Counter[torch.Size] = Counter()
    for layer in layers:
        sizes[layer.weight.shape] += layer.weight.numel()
    [(shape, _)] = sizes.most_common(1)
    some = [layer.weight for layer in layers if layer.weight.shape == shape]
    some = some[: max(1, _TEST_BYTES // some[0].nbytes)]
    rows = torch.zeros(_TEST_ROWS, shape[1], dtype=some[0].dtype)
    seconds: dict[Any, list[float]] = {linear: [], exchanged: []}
    for _ in range(_TEST_ROUNDS + 1):
        for way, taken in seconds.items():
            begin = time.perf_counter()
            for weight in some:
                way(rows, weight, None)
            taken.append(time.perf_counter() - begin)
    usual, other = (statistics.median(taken[1:]) for taken in seconds.values())  # without the first round
    return usual >= _MIN_GAIN * other


def is_eligible(weight: torch.Tensor) -> bool:
    """Whether it can pay for these weights at all."""
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.dim() == 2
