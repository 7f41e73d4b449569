"""Reads and writes vLLM's KV pages without knowing how a backend orders their elements.

Made once per worker. Backends keep pages in orders of their own: by head, in columns, in tiles for matrix units. They
all write them in one function, ``do_kv_cache_update``. So pages are written through that, and the order is learnt from
it: numbers written to a spare page and read back say where each element went. Invariant: what :meth:`Pages.read`
returns is what was written, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch

from kvboost.errors import UnsupportedModelError

_BASE = 128  # the digits of an element's number: bfloat16 holds integers up to 256


class Pages:
    """The pages of one attention layer."""

    def __init__(self, layer: Any, cache: torch.Tensor, *, heads: int, dim: int, order: torch.Tensor) -> None:
        """``cache`` is the layer's [pages, ...]; ``order`` is what :func:`learn_order` found."""
        self._layer, self._cache, self._order = layer, cache, order
        self._heads, self._dim = heads, dim
        self._steps = _steps_of(order.view(2, heads, -1, dim))

    @property
    def _page_tokens(self) -> int:
        return self._order.numel() // (2 * self._heads * self._dim)

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._cache.device

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """The keys and values of these pages [n], one behind the other: [2, heads, n * tokens per page, dim]."""
        out = self._cache.new_empty(2, self._heads, len(pages) * self._page_tokens, self._dim)
        self.read_into(out, pages)
        return out

    def read_into(self, out: torch.Tensor, pages: torch.Tensor) -> None:
        """The same, into ``out``."""
        flat = self._cache.index_select(0, pages).reshape(len(pages), -1)
        shape = (len(pages), self._heads, self._page_tokens, self._dim)
        for kind, target in enumerate(out.view(2, self._heads, len(pages), -1, self._dim)):
            if self._steps is not None:  # one copy; gathering element by element takes several times as long
                first, *steps = self._steps[kind]
                states = flat.as_strided(shape, (flat.stride(0), *steps), first)
            else:
                states = flat.index_select(1, self._order.view(2, -1)[kind]).view(shape)
            target.copy_(states.transpose(0, 1))

    def write(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Put ``states`` [2, heads, tokens, dim] into ``slots`` [tokens]: page times tokens per page, plus offset."""
        keys, values = states.transpose(1, 2).contiguous()
        self._layer.impl.do_kv_cache_update(self._layer, keys, values, self._cache, slots)


def learn_order(layer: Any, cache: torch.Tensor, *, heads: int, tokens: int, dim: int) -> torch.Tensor:
    """Where each element of a page lies: indices into the flat page, for [keys and values, heads, tokens, dim].

    Raises UnsupportedModelError if the page does not hold each element once, as with a quantised cache.
    """
    if getattr(layer.impl, "do_kv_cache_update", None) is None:
        raise UnsupportedModelError(f"the attention {type(layer.impl).__name__} writes no pages by itself")
    count = 2 * heads * tokens * dim
    page = _spare_page(cache)
    if page.numel() != count:
        raise UnsupportedModelError(f"a page has {page.numel()} elements, not {count}")
    # From one on: what nothing was written to is zero.
    numbers = torch.arange(1, count + 1).view(2, heads, tokens, dim)
    slots = torch.arange(tokens, dtype=torch.int64, device=cache.device)
    found = torch.zeros(count, dtype=torch.int64)
    unit = 1  # of the digit that is written
    while unit <= count:
        digits = (numbers // unit % _BASE).to(cache.device, cache.dtype)
        keys, values = digits.transpose(1, 2).contiguous()
        layer.impl.do_kv_cache_update(layer, keys, values, page, slots)
        found += page.reshape(-1).cpu().to(torch.int64) * unit
        unit *= _BASE
    if not torch.equal(found.sort().values, numbers.view(-1)):
        raise UnsupportedModelError("a page does not hold each key and value once, as the model computes them")
    return found.argsort().to(cache.device)


def _steps_of(order: torch.Tensor) -> list[tuple[int, ...]] | None:
    """For keys and for values: the first element's index, and the steps to the next head, token and dimension.

    None if the indices of [keys and values, heads, tokens, dim] are not at equal steps, as in tiles.
    """
    found = []
    for indices in order.cpu():
        first, steps = int(indices[0, 0, 0]), []
        expected = torch.tensor(first)
        for axis, length in enumerate(indices.shape):
            step = int(indices.select(axis, min(1, length - 1))[0, 0]) - first
            shape = [-1 if each == axis else 1 for each in range(3)]
            expected = expected + (torch.arange(length) * step).view(shape)
            steps.append(step)
        if not torch.equal(indices, expected):
            return None
        found.append((first, *steps))
    return found


def _spare_page(cache: torch.Tensor) -> torch.Tensor:
    """One page that lies in memory as the cache's own do."""
    shape, strides = (1, *cache.shape[1:]), cache.stride()
    size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    room = torch.zeros(size, dtype=cache.dtype, device=cache.device)
    return room.as_strided(shape, (size, *strides[1:]))


def slots_of(pages: torch.Tensor, *, tokens: int, start: int, end: int) -> torch.Tensor:
    """The slots of positions ``[start, end)`` of a sequence that lies in ``pages``."""
    positions = torch.arange(start, end, device=pages.device)
    return pages[positions // tokens] * tokens + positions % tokens
