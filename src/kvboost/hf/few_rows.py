"""Linear layers over few rows, as joint decode steps have them: weights times rows instead of rows times weights.

Used by :mod:`kvboost.hf.ragged`. In float32 on CPUs, MKL's kernel for some ten rows takes longer than for the same
product with the two sides exchanged (docs/results/batched_decoding.md). Whether it does is measured for each shape when
the runner is made. The result is the same up to rounding, so nothing that promises bits uses it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

ROWS = range(12, 49)
"""Numbers of rows for which it may pay. Below and above, the usual way was as fast or faster where it was measured."""
_TEST_ROWS, _TEST_ROUNDS = 16, 5
_MIN_GAIN = 1.1  # below it the difference may be noise
_TEST_BYTES = 1 << 25  # weights run through in a round: more than most caches hold, as in a model

_log = logging.getLogger("kvboost.engine")


def exchanged(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear(rows, weight, bias)`` of [..., inputs], up to rounding."""
    flat = rows.reshape(-1, rows.shape[-1]).t()
    product = torch.mm(weight, flat) if bias is None else torch.addmm(bias[:, None], weight, flat)
    return product.t().contiguous().view(*rows.shape[:-1], -1)


def is_eligible(weight: torch.Tensor) -> bool:
    """Whether it can pay for these weights at all."""
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.dim() == 2


@torch.no_grad()
def shapes_to_exchange(model: Any) -> frozenset[torch.Size]:
    """The shapes of weights for which :func:`exchanged` is the faster way here."""
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for module in model.modules():
        if type(module) is torch.nn.Linear and is_eligible(module.weight):
            by_shape.setdefault(module.weight.shape, []).append(module.weight)
    chosen = frozenset(shape for shape, weights in by_shape.items() if _pays(weights))
    if by_shape:
        names = ", ".join("x".join(map(str, shape)) for shape in sorted(chosen)) or "none"
        _log.info(
            "linear layers multiplied as weights times rows for %d to %d rows: %s (timed now, %d shapes in all)",
            ROWS[0],
            ROWS[-1],
            names,
            len(by_shape),
        )
    return chosen


def _pays(weights: Sequence[torch.Tensor]) -> bool:
    inputs = weights[0].shape[1]
    some = [weight[: max(1, _TEST_BYTES // (4 * inputs))] for weight in weights]  # a part of a large one
    some = some[: max(1, _TEST_BYTES // some[0].nbytes)]
    rows = torch.zeros(_TEST_ROWS, inputs)
    seconds: dict[Any, list[float]] = {linear: [], exchanged: []}
    try:
        for _ in range(_TEST_ROUNDS + 1):
            for way, taken in seconds.items():
                begin = time.perf_counter()
                for weight in some:
                    way(rows, weight, None)
                taken.append(time.perf_counter() - begin)
    except RuntimeError as error:  # weights of a kind of their own, or taken away by whoever streams them
        _log.info("linear layers of shape %s run as usual: %s", tuple(weights[0].shape), error)
        return False
    usual, other = (statistics.median(taken[1:]) for taken in seconds.values())  # without the first round
    return usual >= _MIN_GAIN * other
