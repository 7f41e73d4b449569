"""Blocks in host memory, below a memory store whose tensors lie on an accelerator.

Made by the engine for ``host_cache_bytes``; used as a :class:`kvboost.extend.Tier`. It ends with the process, so it
is filled by what is evicted from the accelerator's memory. Invariants: the bytes held, those being copied included,
never exceed the capacity; a block with stored successors is not evicted, whether its own parent is here or not, as
leaves come down first; a block is there once its copy is whole, and its pages are written again only after the last
copy out of them.

Blocks lie in fixed pages (:class:`PagePool`), pinned where there is an accelerator. They go back to the
device they came from. Pinned copies were not run on an accelerator here: the tests run this tier on the CPU, with
streams that deliver late.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvboost.store.counters import ContentKeys, Counters
from kvboost.store.eviction import LeafFirstLRU
from kvboost.store.record.header import info_of
from kvboost.store.tiers.base import MAX_VARIANTS
from kvboost.streams import BlockingStreams, Event, Streams
from kvboost.types import BlockInfo, KVBlock, PutOutcome, StoreStats

_SLAB_BYTES = 16 * 2**20  # pinned in a few milliseconds, during which lookups wait

_log = logging.getLogger(__name__)


class PagePool:
    """At most ``capacity_bytes`` in pages of ``page_bytes``, allocated a slab at a time and used again.

    Pinned memory is slow to allocate and to free, so no record has memory of its own. A page has one owner; one that a
    copy may still read is handed out together with the event to wait for. Not thread-safe: its owner holds a lock.
    """

    def __init__(self, capacity_bytes: int, *, page_bytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        """``allocate`` gives so many bytes of host memory, or raises if there are no more."""
        self._page_bytes, self._allocate = page_bytes, allocate
        self._max_pages = capacity_bytes // page_bytes
        self._slab_pages = max(1, min(self._max_pages, _SLAB_BYTES // page_bytes))
        self._slabs: list[torch.Tensor] = []
        self._free: list[int] = []  # a heap: the lowest first, so that a record's pages tend to be neighbours
        self._read_until: dict[int, Event] = {}  # of free pages

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and those that are not allocated yet."""
        return len(self._free) + self._max_pages - self._allocated

    def count(self, nbytes: int) -> int:
        """Pages that so many bytes take."""
        return -(-nbytes // self._page_bytes)

    def take(self, nbytes: int) -> tuple[list[int], list[Event]] | None:
        """Pages for so many bytes, and what to wait for before writing to them; None if there are not enough."""
        wanted = self.count(nbytes)
        while len(self._free) < wanted:
            if not self._grow():
                return None
        pages = [heapq.heappop(self._free) for _ in range(wanted)]
        events = [self._read_until.pop(page, None) for page in pages]
        return pages, list({id(event): event for event in events if event is not None}.values())

    def give_back(self, pages: Sequence[int], *, after: Event | None) -> None:
        """These are free once ``after`` has happened."""
        for page in pages:
            heapq.heappush(self._free, page)
            if after is not None:
                self._read_until[page] = after

    def runs(self, pages: Sequence[int], nbytes: int) -> Iterator[torch.Tensor]:
        """The first ``nbytes`` of these pages, [bytes]: neighbours come as one."""
        first = 0
        while first < len(pages):
            slab, start = divmod(pages[first], self._slab_pages)
            last = first + 1
            while last < len(pages) and pages[last] == pages[last - 1] + 1 and pages[last] // self._slab_pages == slab:
                last += 1
            size = min((last - first) * self._page_bytes, nbytes)
            yield self._slabs[slab].narrow(0, start * self._page_bytes, size)
            nbytes -= size
            first = last

    @property
    def _allocated(self) -> int:
        return min(self._max_pages, len(self._slabs) * self._slab_pages)

    def _grow(self) -> bool:
        """One more slab; False if there may be none, or if the system has none to give."""
        before = self._allocated
        count = min(self._slab_pages, self._max_pages - before)
        if count < 1:
            return False
        try:
            self._slabs.append(self._allocate(count * self._page_bytes))
        except (RuntimeError, MemoryError) as error:  # also what torch raises if memory cannot be pinned
            self._max_pages = before
            _log.warning("the host tier stays at %d bytes, no more can be pinned: %s", before * self._page_bytes, error)
            return False
        for page in range(before, before + count):
            heapq.heappush(self._free, page)
        return True


@dataclass(slots=True)
class _Record:
    """A block whose bytes lie in pages."""

    block: KVBlock
    """Without its tensors."""
    tensors: list[tuple[torch.Size, torch.dtype, torch.device]]
    pages: list[int]
    read_until: Event | None = None
    """The last copy out of the pages."""


class HostTier:
    """Blocks in host memory, at most ``capacity_bytes`` of them."""

    name = "host"
    outlives_process = False

    def __init__(self, capacity_bytes: int, *, page_bytes: int = 256 * 2**10, streams: Streams | None = None) -> None:
        """``streams`` copy between the device and the pages, and allocate those; by default as the CPU does.

        A block takes whole pages: small ones waste less, large ones take fewer copies.
        """
        self._capacity = capacity_bytes
        self._streams = streams if streams is not None else BlockingStreams()
        self._pool = PagePool(capacity_bytes, page_bytes=page_bytes, allocate=self._streams.host_memory)
        self._policy = LeafFirstLRU()
        self._lock = threading.Lock()
        self._records: dict[bytes, _Record] = {}
        self._copying: set[bytes] = set()  # capacity is reserved, the tensors are being copied
        self._successors: Counter[bytes] = Counter()  # of stored and coming blocks, by their parent's key
        self._contents = ContentKeys()
        self._bytes = 0
        self._counters = Counters()
        self._removed: Callable[[bytes], None] = lambda key: None

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these are here."""
        with self._lock:
            return [key in self._records for key in keys]

    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        """For each content, the newest blocks that hold it, newest last."""
        with self._lock:
            newest = [self._contents.of(content)[-MAX_VARIANTS:] for content in content_keys]
            return [[info_of(self._records[key].block) for key in keys] for keys in newest]

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        """The blocks under these keys, in this order, copied to where they came from. Their ``ready`` says when."""
        for key in keys:
            with self._lock:  # until the copy is on its way: then its event keeps the pages
                record = self._records.get(key)
                self._counters.looked_up(found=record is not None)
                block = self._copied_out(record) if record is not None else None
            yield block

    def store(self, block: KVBlock) -> PutOutcome:
        """Copy ``block`` to host memory; others are evicted for it, leaves first and least recently used first."""
        with self._lock:
            if block.key in self._records:
                return PutOutcome.PRESENT
            taken = None if block.key in self._copying else self._reserve(block)
            if taken is None:
                self._counters.refused += 1
                return PutOutcome.REFUSED
            self._copying.add(block.key)
        pages, readers = taken
        kept: _Record | None = None
        try:
            for event in readers:
                event.synchronize()
            copied = self._streams.copy(self._segments(block.tensors, pages, block.nbytes), after=block.ready)
            if copied is not None:
                copied.synchronize()
            tensors = [(tensor.shape, tensor.dtype, tensor.device) for tensor in block.tensors]
            kept = _Record(replace(block, tensors=(), ready=None), tensors, pages)
        finally:
            with self._lock:
                self._copying.discard(block.key)
                if kept is None:
                    self._pool.give_back(pages, after=None)
                    self._uncount(block)
                else:
                    self._records[block.key] = kept
                    self._contents.add(block.content_key, block.key)
                    self._policy.inserted(
                        block.key, parent=block.parent_key, nbytes=block.nbytes, content=block.content_key
                    )
        return PutOutcome.STORED

    def used(self, chain: Sequence[bytes]) -> None:
        """The keys of one prompt were used: each becomes more recent than its successors."""
        with self._lock:
            self._policy.used([key for key in chain if key in self._records])

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these blocks."""
        with self._lock:
            for key in keys:
                if key in self._records:
                    self._drop(key)

    def flush(self) -> None:
        """Nothing to do: what was stored is here until the process ends."""

    def clear(self) -> None:
        """Forget every block."""
        with self._lock:
            for key in list(self._records):
                self._drop(key)

    def stats(self) -> StoreStats:
        """Counters and sizes, consistent with each other."""
        with self._lock:
            return self._counters.stats(
                self.name, chunks=len(self._records), nbytes=self._bytes, capacity_bytes=self._capacity
            )

    def close(self) -> None:
        """Forget every block."""
        self.clear()

    def on_remove(self, removed: Callable[[bytes], None]) -> None:
        """Call ``removed`` with the key of every block that leaves this tier."""
        with self._lock:
            self._removed = removed

    def _reserve(self, block: KVBlock) -> tuple[list[int], list[Event]] | None:
        """Evict others until ``block`` fits, count it and take its pages; None if it cannot. The lock is held."""
        if block.nbytes > self._capacity:
            return None
        self._bytes += block.nbytes
        if block.parent_key is not None:
            self._successors[block.parent_key] += 1  # before evicting: the parent must not be the victim
        while self._bytes > self._capacity or (taken := self._pool.take(block.nbytes)) is None:
            victim = self._policy.victim(self._is_leaf)
            if victim is None:
                self._uncount(block)
                return None
            self._drop(victim)
            self._counters.evictions += 1
        return taken

    def _is_leaf(self, key: bytes) -> bool:
        return key not in self._successors

    def _drop(self, key: bytes) -> None:
        record = self._records.pop(key)
        self._pool.give_back(record.pages, after=record.read_until)
        self._policy.removed(key)
        self._uncount(record.block)
        self._contents.remove(record.block.content_key, key)
        self._removed(key)

    def _uncount(self, block: KVBlock) -> None:
        self._bytes -= block.nbytes
        if block.parent_key is not None:
            self._successors[block.parent_key] -= 1
            if not self._successors[block.parent_key]:
                del self._successors[block.parent_key]

    def _copied_out(self, record: _Record) -> KVBlock:
        tensors = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in record.tensors)
        segments = [(page, part) for part, page in self._segments(tensors, record.pages, record.block.nbytes)]
        # The new tensors' memory may still be in use by what was computed before they were made.
        ready = self._streams.copy(segments, after=self._streams.event())
        record.read_until = ready
        return replace(record.block, tensors=tensors, ready=ready)

    def _segments(
        self, tensors: Sequence[torch.Tensor], pages: Sequence[int], nbytes: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of the tensors, one after another, each with the part of the pages where its bytes lie."""
        runs = self._pool.runs(pages, nbytes)
        run = next(runs, None)
        found = []
        for tensor in tensors:
            rest = tensor.detach().contiguous().view(-1).view(torch.uint8)
            while len(rest):
                assert run is not None
                size = min(len(rest), len(run))
                found.append((rest[:size], run[:size]))
                rest, run = rest[size:], run[size:]
                if not len(run):
                    run = next(runs, None)
        return found
