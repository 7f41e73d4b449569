"""What the attention of a repair does: it attends in blocks, or records where the attention goes.

Used by :mod:`kvboost.approx.recompute`, for one forward in one thread. Invariant: what a layer gets is what ``sdpa``
would have returned, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvboost.hf.attention import Call, Plan

_BLOCK = 128  # queries that attend together: few enough to see nearly the same keys, enough to fill the kernel


class BlockedAttention(Plan):
    """Splits the attention of scattered positions into blocks, each without the keys its mask hides anyway.

    This halves the keys on average. CPU only: other devices' kernels are faster on one call.
    """

    def __init__(self, positions: Callable[[], torch.Tensor]) -> None:
        """``positions`` gives those that reach a layer: they may become fewer from layer to layer."""
        self._positions = positions

    def attend(self, call: Call) -> torch.Tensor:
        """In blocks, if these are the positions and they are enough."""
        positions, query = self._positions(), call.query
        if query.device.type != "cpu" or call.mask is None or not _BLOCK < len(positions) == query.shape[2]:
            return call.plain()
        key, value = _repeated(call.key, query), _repeated(call.value, query)
        parts = []
        for start in range(0, len(positions), _BLOCK):
            block = slice(start, start + _BLOCK)
            visible = int(positions[block][-1]) + 1
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query[:, :, block],
                    key[:, :, :visible],
                    value[:, :, :visible],
                    attn_mask=call.mask[:, :, block, :visible],
                    scale=call.scale,
                )
            )
        return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


class StopForward(Exception):
    """The last requested layer has run."""


class AttentionTap(Plan):
    """Records the attention mass on the first ``cached`` keys in the given layers."""

    def __init__(self, layers: range, *, cached: int) -> None:
        self._layers, self._cached = layers, cached
        self._next = 0
        self.masses: list[torch.Tensor] = []

    def attend(self, call: Call) -> torch.Tensor:
        """What ``sdpa`` returns. Raises StopForward in the last of the layers."""
        if self._next in self._layers:
            self.record(_attention_shares(call))
        else:
            self._next += 1
        return call.plain()

    def record(self, shares: torch.Tensor) -> None:
        """The shares of one layer's queries on its keys, [1, heads, queries, keys]."""
        if self._next in self._layers:
            self.masses.append(shares.float().mean(dim=(0, 1, 2))[: self._cached])
        self._next += 1
        if self._next >= self._layers.stop:
            raise StopForward


class EagerTap(TorchFunctionMode):
    """Records for a tap the softmax of ``eager`` attention, which each model has of its own: only torch sees it."""

    def __init__(self, tap: AttentionTap, *, keys: int) -> None:
        super().__init__()
        self._tap, self._keys = tap, keys

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.softmax and result.dim() == 4 and result.shape[-1] >= self._keys:
            self._tap.record(result)  # some add a sink after the keys
        return result


def _attention_shares(call: Call) -> torch.Tensor:
    """The softmax of one layer, [1, heads, queries, keys]."""
    scores = call.query.float() @ _repeated(call.key, call.query).float().transpose(-1, -2)
    scores *= call.scale if call.scale is not None else call.query.shape[-1] ** -0.5
    if call.mask is not None:
        scores = scores.masked_fill(~call.mask, -torch.inf) if call.mask.dtype == torch.bool else scores + call.mask
    return scores.softmax(dim=-1)


def _repeated(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values with a head for every head of the queries."""
    groups = query.shape[1] // states.shape[1]
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)
