"""Stops a repair that will not be faster than computing the prompt, a few layers after it began.

Used by :mod:`kvboost.approx.repair`. The time of a repair is a guess until it runs: another process on the machine
may make it many times longer. Invariant: it is judged by its first layers only, when little is lost by stopping it. On
an accelerator the host runs ahead of the device, so a fast launch hides a slow repair there.
"""

from __future__ import annotations

from time import perf_counter

import torch

from kvboost.approx.recompute import MAX_POSITIONS, PositionSelector
from kvboost.core.spans import ApproxSpans
from kvboost.hf.cache import KVChanges

_JUDGED_LAYERS = 3  # by the fastest of them: one may have to warm up, or wait for another process


class RepairTooSlow(Exception):
    """Computing is expected to be faster than going on with a repair."""

    def __init__(self, *, seconds: float, expected: float, compute: float) -> None:
        super().__init__(
            f"the repair was stopped: it would have taken {seconds:.2f} s where computing takes about {compute:.2f} s"
        )
        self.seconds, self.expected = seconds, expected


class Paced:
    """A position selector that raises RepairTooSlow if the first layers show that repairing ``spans`` does not pay."""

    def __init__(
        self, selector: PositionSelector, spans: ApproxSpans, *, layers: int, positions: int, decided: int
    ) -> None:
        """Positions may be dropped up to layer ``decided``, so earlier ones tell nothing of those behind it."""
        self._selector, self._spans, self._layers = selector, spans, layers
        self._forwards = -(-positions // MAX_POSITIONS)
        self._judged = range(decided + 1, min(decided + 1 + _JUDGED_LAYERS, layers))
        self._fastest = float("inf")
        self._began = self._layer_began = perf_counter()

    def __call__(self, layer: int, positions: torch.Tensor, changes: KVChanges | None) -> torch.Tensor | None:
        """Called before each layer."""
        now = perf_counter()
        if layer in self._judged:
            self._fastest = min(self._fastest, now - self._layer_began)
            if layer == self._judged[-1]:
                self._judged = range(0)  # also not in the forwards that follow
                spent, left = now - self._began, self._fastest * (self._forwards * self._layers - layer)
                if left > self._spans.compute_seconds:
                    raise RepairTooSlow(
                        seconds=spent + left,
                        expected=self._spans.expected_seconds,
                        compute=self._spans.compute_seconds,
                    )
        self._layer_began = perf_counter()
        return self._selector(layer, positions, changes)
