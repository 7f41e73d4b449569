"""Intercepts the attention calls of one forward pass in one thread, for any model family.

Used by :mod:`kvboost.approx.recompute`. Torch hands every call of its functions to an active mode, so neither the
model nor Transformers is changed. Invariant: what a mode returns is what the function would have returned, up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

_BLOCK = 128  # queries that attend together: few enough to see nearly the same keys, enough to fill the kernel


class HasPositions(Protocol):
    """A pass over positions that may become fewer from layer to layer."""

    positions: torch.Tensor


class BlockedAttention(TorchFunctionMode):
    """Splits the attention of scattered positions into blocks, each without the keys its mask hides anyway.

    This halves the keys on average. CPU only: other devices' kernels are faster on one call.
    """

    def __init__(self, running: HasPositions) -> None:
        super().__init__()
        self._running = running

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, mask = args[0], kwargs.get("attn_mask")
            positions = self._running.positions
            if query.device.type == "cpu" and mask is not None and _BLOCK < len(positions) == query.shape[2]:
                return self._in_blocks(positions, *args, **kwargs)
        return func(*args, **kwargs)

    def _in_blocks(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """The result of one call, [batch, heads, positions, dim]."""
        parts = []
        for start in range(0, len(positions), _BLOCK):
            block = slice(start, start + _BLOCK)
            visible = int(positions[block][-1]) + 1
            mask = attn_mask[:, :, block, :visible]
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query[:, :, block], key[:, :, :visible], value[:, :, :visible], attn_mask=mask, **options
                )
            )
        return torch.cat(parts, dim=2)


class StopForward(Exception):
    """The last requested layer has run."""


class AttentionTap(TorchFunctionMode):
    """Records the attention mass on the first ``cached`` keys in the given layers. Sees this thread's calls only."""

    def __init__(self, layers: range, *, cached: int, keys: int) -> None:
        super().__init__()
        self._layers, self._cached, self._keys = layers, cached, keys
        self._next = 0
        self.masses: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._record(lambda: _attention_mass(*args, **kwargs))
        result = func(*args, **kwargs)
        if func is torch.nn.functional.softmax and result.dim() == 4 and result.shape[-1] >= self._keys:
            self._record(lambda: result.float().mean(dim=(0, 1, 2)))  # eager attention; some add a sink behind the keys
        return result

    def _record(self, mass: Callable[[], torch.Tensor]) -> None:
        if self._next in self._layers:
            self.masses.append(mass()[: self._cached])
        self._next += 1
        if self._next >= self._layers.stop:
            raise StopForward


def _attention_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention probabilities averaged over heads and queries, [keys]. Takes the kernel's own arguments."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.float() @ key.float().transpose(-1, -2)  # [1, heads, queries, keys]
    scores *= scale if scale is not None else query.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(dim=-1).mean(dim=(0, 1, 2))
