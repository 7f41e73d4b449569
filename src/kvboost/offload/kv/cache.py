"""A Transformers cache that stays within a budget of memory, however long the sequence gets.

Made for one sequence and used as ``past_key_values`` inside a ``with`` block, in the thread that runs the model. While
the block is open the model's attention is computed from the pages. Invariant: what it gives is that of an unpaged cache
up to rounding in float32; a model that attends in another way is refused, not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers.cache_utils import Cache

from kvboost.direct_io import up_to_page
from kvboost.errors import CapacityError, ConfigError, UnsupportedModelError
from kvboost.hf.attention import NAME, Call, Plan, attending
from kvboost.hf.cache import KVLayout
from kvboost.hf.layers import windows_by_layer
from kvboost.hf.probe import compare_logits, probe_model
from kvboost.hf.runner import ModelRunner
from kvboost.offload.kv.layer import PagedLayer, PageShape, band
from kvboost.offload.kv.pager import TRANSIT, FileSpill, HostSpill, Pager, PagingLedger

_UNPAGED = "Run it without kv_bytes."
_MAX_AT_ONCE = 8  # pages read and computed with in one call
_PROBE_TOKENS = 24
_PROBE_BLOCK = 4


class PagedCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Pages of every layer over one pager."""

    def __init__(
        self, model: Any, *, kv_bytes: int, block_tokens: int, layout: KVLayout, directory: Path | None = None
    ) -> None:
        """Hold at most ``kv_bytes`` of KV in memory, in pages of ``block_tokens``.

        The ``layout`` comes from :func:`probe_paging`. A CPU's pages are spilled to ``directory``, which should not lie
        in memory, as some /tmp do.
        """
        self.layout, self._implementation = layout, model.config._attn_implementation
        slots = layout.slots
        windows = windows_by_layer(model)
        if 2 * len(windows) != len(slots):
            raise UnsupportedModelError(f"not every layer has keys and values of its own. {_UNPAGED}")
        shapes = [PageShape(k, v, block_tokens) for k, v in zip(slots[::2], slots[1::2], strict=True)]
        frame_bytes = up_to_page(max(shape.nbytes for shape in shapes))
        minimum = min_budget(layout, block_tokens)
        if kv_bytes < minimum:
            raise CapacityError(
                f"kv_bytes={kv_bytes} is too small for blocks of {block_tokens} tokens: a block of each of the "
                f"{len(shapes)} layers and {TRANSIT} on their way take {minimum} bytes; raise it, or lower block_tokens"
            )
        left = kv_bytes // frame_bytes - len(shapes)
        group = max(1, min(_MAX_AT_ONCE, left // (2 * TRANSIT)))  # half of what is left is enough for reading ahead
        self.pages_at_once = group
        """Pages that are read, and in decoding computed with, in one call."""
        quotas = _resident_pages(left - TRANSIT * group, windows, block_tokens)
        devices = {spec.device for spec in slots}
        if len(devices) > 1:
            raise UnsupportedModelError(f"its layers lie on several devices. {_UNPAGED}")
        device = devices.pop()
        spill = FileSpill(directory) if device.type == "cpu" else HostSpill(device)
        self._pager = Pager(spill, frame_bytes=frame_bytes, budget=kv_bytes, group=group)
        self._attention, self._block = _Attention(self), ExitStack()
        super().__init__(
            layers=[
                PagedLayer(self._pager, shape, resident=quota, window=window, announce=self._attention.expect)
                for shape, quota, window in zip(shapes, quotas, windows, strict=True)
            ]
        )

    @property
    def ledger(self) -> PagingLedger:
        """Bytes taken, their peak, and bytes read and written."""
        return self._pager.ledger

    def place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Append a block's tensors, as :meth:`SlabCache.span` gives them, [slots, heads, tokens, dim] each."""
        slots = self._by_slot(tensors)
        for layer, keys, values in zip(self.layers, slots[::2], slots[1::2], strict=True):
            layer.append(keys, values)

    def span(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Copies of the KV of positions ``[start, end)`` as :meth:`place` takes it, outside the budget."""
        copies = tuple(
            torch.empty(len(slots), spec.heads, end - start, spec.dim, dtype=spec.dtype, device=spec.device)
            for spec, slots in self.layout.groups.items()
        )
        slots = self._by_slot(copies)
        for layer, keys, values in zip(self.layers, slots[::2], slots[1::2], strict=True):
            layer.copy_to(start, keys, values)
        return copies

    def _by_slot(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views [1, heads, tokens, dim], one for each of the layout's slots."""
        found = {
            slot: tensor[index : index + 1]
            for tensor, slots in zip(tensors, self.layout.groups.values(), strict=True)
            for index, slot in enumerate(slots)
        }
        return [found[slot] for slot in range(len(found))]

    def __enter__(self) -> Self:
        if self._pager.closed:
            raise ConfigError("this paged cache is closed; make a new one")
        self._attention.open = True
        self._block.enter_context(attending(self._attention, of=self._implementation))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.close()
        self._attention.open = False
        self.close()
        if kind is None:
            self._attention.check()

    def close(self) -> None:
        """Release memory and file. The end of the ``with`` block does so too."""
        self._pager.close()
        self.layers: list[PagedLayer] = []


class _Attention(Plan):
    """Computes the attention that follows a layer's new KV."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self.open = False
        self._waiting: tuple[PagedLayer, torch.Tensor, torch.Tensor] | None = None

    def expect(self, layer: PagedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The next attention is this layer's."""
        if not self.open:
            raise ConfigError("a paged cache works inside its with block only: with PagedCache(...) as cache: ...")
        self.check()
        if keys.requires_grad:
            raise ConfigError("a paged cache keeps no gradients; run the model under torch.no_grad()")
        self._waiting = layer, keys, values

    def check(self) -> None:
        """Raises UnsupportedModelError if a layer's new KV was not followed by its attention."""
        if self._waiting is not None:
            self._waiting = None
            raise UnsupportedModelError(
                f"its attention is not Transformers' {NAME!r}, which could go over pages one by one. {_UNPAGED}"
            )

    def attend(self, call: Call) -> torch.Tensor:
        """Attention of new tokens to themselves and all pages, [1, new, heads, dim]."""
        if self._waiting is None:  # another model's
            return call.plain()
        (layer, keys, values), self._waiting = self._waiting, None
        query = call.query
        if call.options.get("dropout") or query.shape[2] != keys.shape[2] or call.more_than_a_mask:
            raise UnsupportedModelError(f"its attention is of a kind that pages cannot follow. {_UNPAGED}")
        _check_mask(call.mask, query, layer.window)
        result = layer.attend(
            query,
            keys,
            values,
            scale=query.shape[-1] ** -0.5 if call.scale is None else call.scale,
            next_slots=lambda: self._next_slots(layer),
        )
        return result.transpose(1, 2).contiguous()

    def _next_slots(self, layer: PagedLayer) -> list[int]:
        """What the next layer reads; after the last layer comes the first, for the next token."""
        layers = self._cache.layers
        following: PagedLayer = layers[(layers.index(layer) + 1) % len(layers)]
        return following.slots_ahead()


def _check_mask(mask: torch.Tensor | None, query: torch.Tensor, window: int | None) -> None:
    """A mask may say what the new tokens see of each other and nothing else: no padding, no bias."""
    if mask is None:
        return
    tokens = query.shape[2]
    if mask.dtype == torch.bool and mask.shape[-2:] == (tokens, tokens):
        seen = band(tokens, window, device=mask.device)
        if bool((mask == seen).all()):
            return
    raise UnsupportedModelError(
        f"its attention has a mask or a bias of its own (padding?), which pages do not know. {_UNPAGED}"
    )


def min_budget(layout: KVLayout, block_tokens: int) -> int:
    """Bytes that paging needs at least: a page being filled for each layer, and those on their way."""
    slots = layout.slots
    largest = max(k.bytes_per_row + v.bytes_per_row for k, v in zip(slots[::2], slots[1::2], strict=True))
    return up_to_page(largest * block_tokens) * (len(slots) // 2 + TRANSIT)


def _resident_pages(left: int, windows: list[int | None], block_tokens: int) -> list[int]:
    """How many whole pages of each layer stay in memory, of ``left`` in all.

    As evenly as possible, so that each layer has something to compute with while its other pages are read.
    """
    useful = [left if window is None else -(-window // block_tokens) + 1 for window in windows]
    quotas = [0] * len(windows)
    while left and (open_layers := [i for i, quota in enumerate(quotas) if quota < useful[i]]):
        each = max(1, min(left // len(open_layers), *(useful[i] - quotas[i] for i in open_layers)))
        for index in open_layers[:left]:
            quotas[index] += each
            left -= each
    return quotas


@torch.no_grad()
def probe_paging(model: Any, *, directory: Path | None = None) -> KVLayout:
    """The layout of a model's pages, once a short text has shown the same logits through pages as without.

    Raises UnsupportedModelError with the reason where it has not.
    """
    config = model.config.get_text_config(decoder=True)
    layout = probe_model(model).layout
    if layout.states:
        raise UnsupportedModelError(f"its recurrent layers keep a state, which goes into no page. {_UNPAGED}")
    if layout.indexed:
        raise UnsupportedModelError(f"its sparse attention keeps index keys, which go into no page. {_UNPAGED}")
    runner = ModelRunner(model)
    ids = [i * 7919 % min(config.vocab_size, 30_000) for i in range(_PROBE_TOKENS)]
    whole, _ = runner.prefill_plain(ids)
    budget = min_budget(layout, _PROBE_BLOCK)
    with PagedCache(model, kv_bytes=budget, block_tokens=_PROBE_BLOCK, directory=directory, layout=layout) as cache:
        half = _PROBE_TOKENS // 2
        runner.run(torch.tensor([ids[:half]], device=runner.device), cache, logits=False)
        runner.run(torch.tensor([ids[half:-1]], device=runner.device), cache, logits=False)
        paged = runner.run(torch.tensor([ids[-1:]], device=runner.device), cache, logits=True)
    assert paged is not None
    compare_logits(config, whole, paged, "its KV lies in pages", remedy=_UNPAGED)
    return layout
