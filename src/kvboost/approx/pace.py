"""Stops a repair that will not be faster than computing the prompt, a few layers after it began.

Used by :mod:`kvboost.approx.repair`. The time of a repair is a guess until it runs: another process on the machine
may make it many times longer. On an accelerator the host runs ahead and its clock shows little, so nothing is stopped.
"""

from __future__ import annotations

import time

import torch

from kvboost.approx.recompute import MAX_POSITIONS, PositionSelector
from kvboost.core.prefill import ApproxSpans
from kvboost.hf.cache import KVChanges

_FREE_SHARE = 0.03  # of the time to compute: stopping earlier than this would judge by noise


class RepairTooSlow(Exception):
    """Computing is expected to be faster than going on with a repair."""

    def __init__(self, *, seconds: float, expected: float, compute: float) -> None:
        super().__init__(
            f"the repair was stopped: it would have taken {seconds:.2f} s where computing takes about {compute:.2f} s"
        )
        self.seconds, self.expected = seconds, expected


class Paced:
    """A position selector that raises RepairTooSlow if the layers so far show that repairing ``spans`` does not pay."""

    def __init__(self, selector: PositionSelector, spans: ApproxSpans, *, layers: int, positions: int) -> None:
        self._selector, self._spans, self._layers = selector, spans, layers
        self._forwards = -(-positions // MAX_POSITIONS)
        self._began = time.perf_counter()

    def __call__(self, layer: int, positions: torch.Tensor, changes: KVChanges | None) -> torch.Tensor | None:
        """Called before each layer."""
        if layer == 0:
            self._began = time.perf_counter()  # of this forward
        else:
            took = time.perf_counter() - self._began
            seconds, compute = took / layer * self._layers * self._forwards, self._spans.compute_seconds
            if took > _FREE_SHARE * compute and seconds > compute:
                raise RepairTooSlow(seconds=seconds, expected=self._spans.expected_seconds, compute=compute)
        return self._selector(layer, positions, changes)
