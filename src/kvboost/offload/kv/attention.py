"""Attention over parts of a sequence, and how the parts are joined into what one softmax over all would give.

Used by the paged cache. Every part gives its output and the logarithm of the sum it was divided by; the parts' shares
follow from those. Invariant: all of it is computed in float32 at least, whatever the model's dtype.
"""

from __future__ import annotations

import torch

_PARTS_AT_ONCE = 256  # queries times parts that wait to be joined: few calls for one query, little memory for many


def parts_at_once(queries: int) -> int:
    """How many parts may be computed and joined together for so many queries."""
    return max(1, _PARTS_AT_ONCE // queries)


class JoinedAttention:
    """Joins the attention of the same queries to parts of a sequence. Every query must see some of the first part."""

    def __init__(self) -> None:
        self._outputs: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._parts = 0

    def add(self, output: torch.Tensor, weight: torch.Tensor) -> None:
        """The outputs of some parts [parts, heads, queries, dim] and the logs of their sums [parts, heads, queries]."""
        self._outputs.append(output)
        self._weights.append(weight)
        self._parts += len(output)
        if self._parts > parts_at_once(output.shape[2]):
            self._join()

    def result(self) -> torch.Tensor:
        """[1, heads, queries, dim]."""
        if self._parts > 1:
            self._join()
        return self._outputs[0]

    def _join(self) -> None:
        weights = torch.cat(self._weights)
        total = weights.logsumexp(dim=0, keepdim=True)
        shares = (weights - total).exp_().unsqueeze(-1)
        self._outputs = [(torch.cat(self._outputs) * shares).sum(dim=0, keepdim=True)]
        self._weights, self._parts = [total], 1


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``query`` [1, heads, queries, dim] to the keys [parts, heads, keys, dim] of each part by itself.

    ``mask`` [queries, keys] says which of them it sees; without one, all. A query that sees none gets zeros, with the
    weight of minus infinity.
    """
    query = query.expand(len(keys), -1, -1, -1)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if mask is None and query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=scale)
        return output, weight.reshape(query.shape[:3])
    scores = (query @ keys.transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    weight = scores.logsumexp(dim=-1)
    shares = (scores - weight.clamp_min(torch.finfo(weight.dtype).min).unsqueeze(-1)).exp_()
    return shares @ values, weight


def attend_causally(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens to each other: each sees itself and those before it, ``window`` at most.

    ``query`` has the shape [1, heads, tokens, dim], keys and values [1, key heads, tokens, dim].
    """
    tokens, groups = query.shape[2], query.shape[1] // keys.shape[1]
    keys = keys.to(query.dtype).repeat_interleave(groups, dim=1)
    values = values.to(query.dtype).repeat_interleave(groups, dim=1)
    plain = window is None or tokens <= window
    if plain and query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, is_causal=True, scale=scale
        )
        return output, weight.reshape(query.shape[:3])
    return attend(query, keys, values, scale=scale, mask=band(tokens, window, device=query.device))


def band(tokens: int, window: int | None, *, device: torch.device) -> torch.Tensor:
    """What new tokens see of each other, [tokens, tokens]."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril_()
    return seen if window is None else seen.triu_(1 - window)
