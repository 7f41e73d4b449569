"""The worker's side: holds the store, writes held KV into pages, and keeps what a step has computed.

Runs in each worker process, on the thread that runs the model; only fetching from slower tiers is in the background.
Invariant: KV is written into pages only from a lease that the scheduler was told of, so a claim never fails for want
of it. A request whose fetch fails is computed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.core.guarded import EmptyLease
from kvboost.errors import UnsupportedModelError
from kvboost.extend import ChunkStore, ContentLease, Lease
from kvboost.integrations.vllm.decoder import Decoder, find_decoder
from kvboost.integrations.vllm.messages import Fetch, Orders, Report, Save
from kvboost.integrations.vllm.messages import Place as PlaceOrder
from kvboost.integrations.vllm.moved import place_moved
from kvboost.integrations.vllm.pages import Pages, learn_order, slots_of
from kvboost.integrations.vllm.place import Place
from kvboost.integrations.vllm.stats import Counts
from kvboost.types import Chunk, KVBlock, PutOutcome

_log = logging.getLogger(__name__)
_FETCHERS = 4


@dataclass
class _Held:
    """What is held for one request."""

    chunks: list[Chunk]
    exact: Lease
    moved: ContentLease
    """Of the chunks behind the exact ones."""

    @property
    def blocks(self) -> dict[int, KVBlock]:
        """The moved blocks, by the index of their chunk."""
        behind = enumerate(self.moved.blocks, len(self.exact.blocks))
        return {index: block for index, block in behind if block is not None}

    def release(self) -> None:
        """Let go of all."""
        self.exact.release()
        self.moved.release()


class WorkerSide:
    """One worker's store and pages."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: ChunkStore = place.open(memory=True)
        self._guarded = place.guarded(self._store)
        self._fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="kvboost-fetch")
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._fetching: set[str] = set()
        self._report = Report()
        self._failed_pages: set[int] = set()
        self._failures = 0
        self._pages: list[Pages] = []
        self._decoder: Decoder | None = None
        self.counts = Counts()

    def register(self, layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor]) -> None:
        """Learn the order of the pages. Raises UnsupportedModelError if they cannot be read."""
        place = self._place
        orders: dict[Any, torch.Tensor] = {}
        for name in place.layers:
            layer, cache = layers[name], caches[name]
            kind = (type(layer.impl), cache.shape[1:], cache.stride(), cache.dtype, cache.device)
            if kind not in orders:
                orders[kind] = learn_order(layer, cache, heads=place.heads, tokens=place.block_size, dim=place.dim)
            self._pages.append(Pages(layer, cache, heads=place.heads, dim=place.dim, order=orders[kind]))
        try:
            self._decoder = find_decoder(dict(layers), place.layers)
        except UnsupportedModelError as error:
            level = logging.WARNING if place.mode == "approximate" else logging.INFO
            _log.log(level, "kvboost: approximate reuse is off: %s", error)

    def begin(self, orders: Orders) -> None:
        """Before the forward: let go of what nobody wants, fetch, and write what is held into pages."""
        for request in orders.releases:
            self._release(request)
        for fetch in orders.fetches:
            with self._lock:
                self._fetching.add(fetch.request)
            self._fetchers.submit(self._fetch, fetch)
        for order in orders.places:
            try:
                self._write(order)
            except Exception:  # noqa: BLE001 - whatever it is, vLLM computes these pages instead
                _log.exception("kvboost: KV of request %s could not be loaded; it is computed", order.request)
                self.counts.failed_loads += 1
                self._failures += 1
                with self._lock:
                    self._report.failures += 1
                first = order.start // self._place.block_size
                self._failed_pages.update(order.pages[first : -(-order.end // self._place.block_size)])
            finally:
                self._release(order.request)

    def end(self, orders: Orders) -> None:
        """After the forward: keep what it has computed.

        Unless a load has failed that the scheduler did not know of: then this step may have read pages without KV.
        """
        for save in orders.saves if orders.epoch == self._failures else ():
            try:
                self._save(save)
            except Exception:  # noqa: BLE001 - a cache may only help
                _log.exception("kvboost: KV of request %s could not be kept", save.request)
                self.counts.failed_saves += 1

    def report(self) -> Report | None:
        """What happened since the last report; None if nothing did."""
        with self._lock:
            report, self._report = self._report, Report()
        return report if report != Report() else None

    def failed_pages(self) -> set[int]:
        """Pages that could not be loaded since the last call."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def close(self) -> None:
        """Write what waits, and close the store."""
        self._fetchers.shutdown(cancel_futures=True)
        self._store.close()

    def _fetch(self, fetch: Fetch) -> None:
        held = _Held(fetch.chunks, EmptyLease(), EmptyLease())
        try:
            held.exact = self._guarded.lease(fetch.chunks)
            count = len(held.exact.blocks)
            if fetch.anywhere and self._decoder is not None and count < len(fetch.chunks):
                held.moved = self._guarded.lease_content(fetch.chunks, after=count)
        except Exception:  # noqa: BLE001 - the scheduler waits for an answer
            _log.exception("kvboost: KV of request %s could not be fetched; it is computed", fetch.request)
        with self._lock:
            wanted = fetch.request in self._fetching
            self._fetching.discard(fetch.request)
            unused: _Held | None = held
            if wanted:
                unused = self._held.pop(fetch.request, None)
                self._held[fetch.request] = held
                self._report.held[fetch.request] = len(held.exact.blocks)
                self._report.moved[fetch.request] = list(held.blocks)
        if unused is not None:
            unused.release()

    def _release(self, request: str) -> None:
        with self._lock:
            self._fetching.discard(request)
            held = self._held.pop(request, None)
        if held is not None:
            held.release()

    def _write(self, order: PlaceOrder) -> None:
        with self._lock:
            held = self._held[order.request]
        pages = torch.tensor(order.pages, dtype=torch.int64, device=self._pages[0].device)
        count = len(held.exact.blocks)
        if order.tokens:
            states = self._built(order, held)
        else:
            states = self._joined(held.chunks[:count], held.exact.blocks, start=order.start, end=order.end)
        slots = slots_of(pages, tokens=self._place.block_size, start=order.start, end=order.end)
        for layer, target in enumerate(self._pages):
            target.write(slots, states[2 * layer : 2 * layer + 2].to(target.device))
        self._guarded.used([chunk.prefix_key for chunk in held.chunks[:count]])
        self.counts.loaded_tokens += order.end - order.start

    def _built(self, order: PlaceOrder, held: _Held) -> torch.Tensor:
        """The KV of a request of which some was computed behind other text, for positions ``[start, end)``.

        Nothing is read from pages: those that vLLM has by itself may only be computed in this step.
        """
        assert self._decoder is not None
        place, count = self._place, len(held.exact.blocks)
        exact = min(held.chunks[count - 1].end if count else 0, order.end)
        shape = (2 * len(self._pages), place.heads, order.end, place.dim)
        states = torch.zeros(shape, dtype=place.layout.slots[0].dtype, device=self._pages[0].device)
        if exact:
            known = self._joined(held.chunks[:count], held.exact.blocks, start=0, end=exact)
            states[:, :, :exact] = known.to(states.device)
        computed = place_moved(
            self._decoder,
            place.codec,
            states,
            tokens=order.tokens,
            exact=exact,
            chunks=held.chunks,
            blocks=held.blocks,
            ratio=place.recompute_ratio,
        )
        self.counts.computed_tokens += computed
        self.counts.moved_tokens += order.end - exact - computed
        self.counts.loaded_tokens -= order.end - exact  # counted as moved or computed
        return states[:, :, order.start :]

    def _joined(self, chunks: Sequence[Chunk], blocks: Sequence[KVBlock], *, start: int, end: int) -> torch.Tensor:
        """The KV of positions ``[start, end)``: [2 * layers, heads, tokens, dim]."""
        parts = []
        for chunk, block in zip(chunks, blocks, strict=True):
            first, last = max(start, chunk.start), min(end, chunk.end)
            if first < last:
                (states,) = self._place.codec.unpack(block.tensors)
                parts.append(states[:, :, first - chunk.start : last - chunk.start])
        joined = torch.cat(parts, dim=2)
        if joined.shape[2] != end - start:
            raise RuntimeError(f"{joined.shape[2]} of {end - start} positions are held")
        return joined

    def _save(self, save: Save) -> None:
        pages = torch.tensor(save.pages, device=self._pages[0].device)
        states = torch.cat([layer.read(pages).cpu() for layer in self._pages])
        offset = save.first_page * self._place.block_size
        for chunk, context in zip(save.chunks, save.contexts, strict=True):

            def make(chunk: Chunk = chunk, context: bytes = context) -> KVBlock:
                part = states[:, :, chunk.start - offset : chunk.end - offset].clone()
                packed = self._place.codec.pack([part], start=chunk.start)
                return KVBlock.of(chunk, tuple(packed), context=context, bitwise=True)

            outcome = self._guarded.keep(make)
            if outcome is PutOutcome.REFUSED:
                return  # its successors could not be reached
            with self._lock:
                self._report.stored.append((chunk.prefix_key, chunk.content_key))
            self.counts.saved_tokens += chunk.end - chunk.start
