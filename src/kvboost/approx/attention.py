"""Steps into the attention of a forward pass, in one thread and for one call, whatever family the model is of.

Used by :mod:`kvboost.approx.recompute`. Torch hands every call of its functions to an active mode, so neither the
model nor Transformers is changed. Invariant: what a mode returns is what the function would have returned, up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

_BLOCK = 128  # rows that attend together: few enough to see nearly the same keys, enough to fill the kernel


class HasRows(Protocol):
    """A pass over rows that may become fewer from layer to layer."""

    rows: torch.Tensor


class BlockedAttention(TorchFunctionMode):
    """Lets scattered rows attend in blocks, each without the keys behind its last row, which its mask hides anyway.

    Half the keys on average. On the CPU only: other devices' kernels are better left whole.
    """

    def __init__(self, running: HasRows) -> None:
        super().__init__()
        self._running = running

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, mask = args[0], kwargs.get("attn_mask")
            rows = self._running.rows
            if query.device.type == "cpu" and mask is not None and _BLOCK < len(rows) == query.shape[2]:
                return self._in_blocks(rows, *args, **kwargs)
        return func(*args, **kwargs)

    def _in_blocks(
        self,
        rows: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """[batch, heads, rows, dim], as one call would give."""
        parts = []
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            seen = int(rows[block][-1]) + 1
            mask = attn_mask[:, :, block, :seen]
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query[:, :, block], key[:, :, :seen], value[:, :, :seen], attn_mask=mask, **options
                )
            )
        return torch.cat(parts, dim=2)


class SeenEnough(Exception):
    """The last layer that was asked for has been seen."""


class AttentionTap(TorchFunctionMode):
    """Notes the attention mass on the first ``rows`` keys in chosen layers. Sees this thread's calls only."""

    def __init__(self, layers: range, *, rows: int, keys: int) -> None:
        super().__init__()
        self._layers, self._rows, self._keys = layers, rows, keys
        self._next = 0
        self.seen: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._note(lambda: _attention_mass(*args, **kwargs))
        result = func(*args, **kwargs)
        if func is torch.nn.functional.softmax and result.dim() == 4 and result.shape[-1] >= self._keys:
            self._note(lambda: result.float().mean(dim=(0, 1, 2)))  # eager attention; some add a sink behind the keys
        return result

    def _note(self, mass: Callable[[], torch.Tensor]) -> None:
        if self._next in self._layers:
            self.seen.append(mass()[: self._rows])
        self._next += 1
        if self._next >= self._layers.stop:
            raise SeenEnough


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
    """Attention probabilities averaged over heads and queries, [keys]. Takes what the kernel itself is given."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.float() @ key.float().transpose(-1, -2)  # [1, heads, queries, keys]
    scores *= scale if scale is not None else query.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(dim=-1).mean(dim=(0, 1, 2))
