"""The worker's side: holds the store, writes held KV into pages, and keeps what a step has computed.

Runs in the worker's process, on the thread that runs the model; only fetching from slower tiers is in the background.
Invariant: KV is written into pages only from a lease that the scheduler knows of, so a claim never fails for want
of it. A request whose fetch fails is computed.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.approx.reposition import Move
from kvboost.core.guarded import EmptyLease, GuardedStore
from kvboost.errors import UnsupportedModelError
from kvboost.extend import ChunkStore, ContentLease, Lease
from kvboost.integrations.vllm.decoder import Decoder, build_moved, find_decoder
from kvboost.integrations.vllm.messages import IDLE_S, Fetch, Load, Orders, Report, Save
from kvboost.integrations.vllm.page_events import Changes
from kvboost.integrations.vllm.pages import Pages, learn_order, slots_of
from kvboost.integrations.vllm.setup import Setup
from kvboost.store import MemoryStore, TieredStore
from kvboost.types import Chunk, KVBlock, PutOutcome

_log = logging.getLogger(__name__)
_FETCHERS = 4


@dataclass
class _Held:
    """What is held for one fetch."""

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
    """The worker's store and pages."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._store: ChunkStore = setup.open(memory=True)
        self._guarded = GuardedStore(self._store)
        self._fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="kvboost-fetch")
        self._lock = threading.Condition()  # notified of every fetch that is over
        self._held: dict[int, _Held] = {}
        self._fetching: set[int] = set()
        self._report = Report()
        self._failed_pages: set[int] = set()
        self._failures = 0
        self._pages: list[Pages] = []
        self._decoder: Decoder | None = None
        self._counts: Counter[str] = Counter()
        self._changes: Changes | None = None
        if setup.has_events and isinstance(self._store, MemoryStore | TieredStore):
            self._changes = Changes()
            self._store.listen(self._changes)

    def register(self, layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor]) -> None:
        """Learn the order of the pages. Raises UnsupportedModelError if they cannot be read."""
        setup, size = self._setup, self._setup.block_size
        heads, dim = setup.spec.heads, setup.spec.dim
        orders: dict[Any, torch.Tensor] = {}
        for name in setup.layers:
            layer, cache = layers[name], caches[name]
            kind = (type(layer.impl), cache.shape[1:], cache.stride(), cache.dtype, cache.device)
            if kind not in orders:
                orders[kind] = learn_order(layer, cache, heads=heads, tokens=size, dim=dim)
            self._pages.append(Pages(layer, cache, heads=heads, dim=dim, order=orders[kind]))
        try:
            self._decoder = find_decoder(dict(layers), setup.layers)
        except UnsupportedModelError as error:
            level = logging.WARNING if setup.settings.mode == "approximate" else logging.INFO
            _log.log(level, "kvboost: approximate reuse is off: %s", error)

    def begin(self, orders: Orders) -> None:
        """Before the forward: let go of what nobody wants, fetch, and write what is held into pages."""
        for number in orders.releases:
            self._release(number)
        for fetch in orders.fetches:
            with self._lock:
                self._fetching.add(fetch.number)
            self._fetchers.submit(self._fetch, fetch)
        for load in orders.loads:
            try:
                self._write(load)
            except Exception:  # noqa: BLE001 - whatever it is, vLLM computes these pages instead
                _log.exception("kvboost: the KV of a request could not be loaded; it is computed")
                self._counts["failed_loads"] += 1
                self._failures += 1
                with self._lock:
                    self._report.failures += 1
                size = self._setup.block_size
                self._failed_pages.update(load.pages[load.start // size : -(-load.end // size)])
            finally:
                self._release(load.fetch)
        if orders.idle:
            with self._lock:
                # vLLM asks again at once, and its loop would keep the fetching threads from running.
                if self._fetching and not self._report.held:
                    self._lock.wait(IDLE_S)

    def end(self, orders: Orders) -> None:
        """After the forward: keep what it has computed.

        Unless a load has failed that the scheduler did not know of: then this step may have read pages without KV.
        """
        for save in orders.saves if orders.failures == self._failures else ():
            try:
                self._save(save)
            except Exception:  # noqa: BLE001 - a cache may only help
                _log.exception("kvboost: the KV of a request could not be kept")
                self._counts["failed_saves"] += 1

    def report(self) -> Report | None:
        """What happened since the last report; None if nothing did."""
        with self._lock:
            report, self._report = self._report, Report()
        if self._changes is not None:
            report.changes = self._changes.drain()
        return report if report != Report() else None

    def drain_counts(self) -> dict[str, int]:
        """Counts since the last call, by the names of :data:`kvboost.integrations.vllm.connector.COUNTS`."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def failed_pages(self) -> set[int]:
        """Pages that could not be loaded since the last call."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def close(self) -> None:
        """Write what waits, and close the store."""
        self._fetchers.shutdown(cancel_futures=True)
        self._store.close()

    def _fetch(self, fetch: Fetch) -> None:
        with self._lock:
            if fetch.number not in self._fetching:
                return  # released while it waited for its turn
        held = _Held(fetch.chunks, EmptyLease(), EmptyLease())
        try:
            held.exact = self._guarded.lease(fetch.chunks)
            count = len(held.exact.blocks)
            if fetch.anywhere and self._decoder is not None and count < len(fetch.chunks):
                held.moved = self._guarded.lease_content(fetch.chunks, after=count)
        except Exception:  # noqa: BLE001 - the scheduler waits for an answer
            _log.exception("kvboost: the KV of a request could not be fetched; it is computed")
        with self._lock:
            wanted = fetch.number in self._fetching
            self._lock.notify_all()
            if wanted:
                self._fetching.remove(fetch.number)
                self._held[fetch.number] = held
                self._report.held[fetch.number] = len(held.exact.blocks)
                self._report.moved[fetch.number] = list(held.blocks)
        if not wanted:
            held.release()

    def _release(self, number: int) -> None:
        with self._lock:
            self._fetching.discard(number)
            held = self._held.pop(number, None)
        if held is not None:
            held.release()

    def _write(self, load: Load) -> None:
        with self._lock:
            held = self._held[load.fetch]
        blocks = held.exact.blocks
        chunks = held.chunks[: len(blocks)]
        if load.tokens:
            states = self._built(load, held)
        else:
            states = self._joined(chunks, blocks, start=load.start, end=load.end)
            self._counts["loaded_tokens"] += load.end - load.start
        pages = torch.tensor(load.pages, dtype=torch.int64, device=self._pages[0].device)
        slots = slots_of(pages, tokens=self._setup.block_size, start=load.start, end=load.end)
        for layer, target in enumerate(self._pages):
            target.write(slots, states[2 * layer : 2 * layer + 2].to(target.device))
        self._guarded.used([chunk.prefix_key for chunk in chunks])

    def _built(self, load: Load, held: _Held) -> torch.Tensor:
        """The KV of a request of which some was computed behind other text, for positions ``[start, end)``.

        Nothing is read from pages: those that vLLM has by itself may only be computed in this step.
        """
        assert self._decoder is not None
        setup, count = self._setup, len(held.exact.blocks)
        exact = min(held.chunks[count - 1].end if count else 0, load.end)
        shape = (2 * len(self._pages), setup.spec.heads, load.end, setup.spec.dim)
        states = torch.zeros(shape, dtype=setup.spec.dtype, device=self._pages[0].device)
        if exact:
            known = self._joined(held.chunks[:count], held.exact.blocks, start=0, end=exact)
            states[:, :, :exact] = known.to(states.device)
        found = ((held.chunks[index].start, block) for index, block in held.blocks.items())
        moves = (
            Move(setup.codec.unpack(block.tensors), old_start=block.start, new_start=start)
            for start, block in found
            if start < load.end
        )
        ratio = setup.settings.recompute_ratio
        gaps, again = build_moved(self._decoder, states, moves, tokens=load.tokens, exact=exact, ratio=ratio)
        # vLLM may have a page more by itself than the exact chunks reach.
        self._counts["loaded_tokens"] += max(0, exact - load.start)
        self._counts["computed_tokens"] += gaps
        self._counts["recomputed_tokens"] += again
        self._counts["moved_tokens"] += max(0, load.end - max(exact, load.start) - gaps - again)
        return states[:, :, load.start :]

    def _joined(self, chunks: Sequence[Chunk], blocks: Sequence[KVBlock], *, start: int, end: int) -> torch.Tensor:
        """The KV of positions ``[start, end)``: [2 * layers, heads, tokens, dim]."""
        parts = []
        for chunk, block in zip(chunks, blocks, strict=True):
            first, last = max(start, chunk.start), min(end, chunk.end)
            if first < last:
                (states,) = self._setup.codec.unpack(block.tensors)
                parts.append(states[:, :, first - chunk.start : last - chunk.start])
        joined = torch.cat(parts, dim=2)
        if joined.shape[2] != end - start:
            raise RuntimeError(f"{joined.shape[2]} of {end - start} positions are held")
        return joined

    def _save(self, save: Save) -> None:
        pages, spec = torch.tensor(save.pages, device=self._pages[0].device), self._setup.spec
        states = torch.empty(
            (2 * len(self._pages), spec.heads, len(pages) * self._setup.block_size, spec.dim), dtype=spec.dtype
        )
        for index, layer in enumerate(self._pages):
            out = states[2 * index : 2 * index + 2]
            if layer.device == out.device:
                layer.read_into(out, pages)
            else:  # one copy of a layer, in order
                out.copy_(layer.read(pages))
        offset = save.first_page * self._setup.block_size
        for chunk, context in zip(save.chunks, save.contexts, strict=True):

            def make(chunk: Chunk = chunk, context: bytes = context) -> KVBlock:
                part = states[:, :, chunk.start - offset : chunk.end - offset].clone()
                packed = self._setup.codec.pack([part], start=chunk.start)
                return KVBlock.of(chunk, tuple(packed), context=context, bitwise=True)

            outcome = self._guarded.keep(make)
            if outcome is PutOutcome.REFUSED:  # its successors could not be reached
                self._counts["refused_saves"] += 1
                with self._lock:
                    self._report.refused.add(save.request)
                return
            with self._lock:
                self._report.stored.append((chunk.prefix_key, chunk.content_key))
            self._counts["saved_tokens"] += chunk.end - chunk.start
