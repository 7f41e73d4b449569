"""Attention of one new token of many rows, in one call of torch's kernel for sequences in pages, without a mask.

Used by :mod:`kvboost.hf.ragged` on CUDA, where torch has that kernel and a probe found its results right. A group's
rows are pages as they lie: page ``i`` of a row begins ``i * PAGE`` positions into it, at one stride for all heads, so
that a table of page numbers finds them and nothing is copied or padded. Never run on a GPU: tests hold the numbers
against a kernel written from its documentation.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


def _kernel() -> Any:
    try:
        from torch.nn.attention import varlen
    except ImportError:  # torch before 2.10
        return None
    return varlen.varlen_attn


varlen_attn: Any = _kernel()
PAGE = 256
"""Positions: what FlashAttention-2 takes, and a divisor of every row's capacity."""


def has_kernel(device: torch.device) -> bool:
    """Whether torch can attend to pages there; whether it does is the probe's to say."""
    known = varlen_attn is not None and "block_table" in inspect.signature(varlen_attn).parameters
    return known and device.type == "cuda"


class RowPages:
    """What the kernel is told of one group's rows in one step: on one device, the same for all layers."""

    def __init__(self, lengths: torch.Tensor, *, longest: int, capacity: int) -> None:
        """``lengths`` [rows] are those before the new token, and ``longest`` the longest with it."""
        rows = len(lengths)
        self._capacity, self._longest = capacity, longest
        self._seen = (lengths + 1).to(torch.int32)
        self._queries = torch.arange(rows + 1, dtype=torch.int32, device=lengths.device)
        self._keys = torch.nn.functional.pad(self._seen.cumsum(0, dtype=torch.int32), (1, 0))
        self._rows = torch.arange(rows, dtype=torch.int32, device=lengths.device)[:, None]
        self._pages = torch.arange(-(-longest // PAGE), dtype=torch.int32, device=lengths.device)
        self._tables: dict[int, torch.Tensor] = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """Of ``query`` [rows, heads, 1, dim] to ``keys`` and ``values`` [rows, key heads, capacity, dim]."""
        key_heads = keys.shape[1]
        pages_per_row = key_heads * self._capacity // PAGE
        if key_heads not in self._tables:
            self._tables[key_heads] = self._rows * pages_per_row + self._pages
        found: torch.Tensor = varlen_attn(
            query[:, :, 0],
            self._paged(keys, pages_per_row),
            self._paged(values, pages_per_row),
            self._queries,
            self._keys,
            1,
            self._longest,
            scale=scale,
            # One query sees all keys before it either way; told so, the kernel computes heads of shared keys together.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            enable_gqa=True,
            seqused_k=self._seen,
            block_table=self._tables[key_heads],
        )
        return found[:, :, None]

    def _paged(self, store: torch.Tensor, pages_per_row: int) -> torch.Tensor:
        """A view [pages, PAGE, key heads, dim] whose pages overlap: those of a table are each one row's own."""
        rows, heads, capacity, dim = store.shape
        pages = (rows - 1) * pages_per_row + capacity // PAGE
        return store.as_strided((pages, PAGE, heads, dim), (PAGE * dim, dim, capacity * dim, 1))
