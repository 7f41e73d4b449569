"""Fixed pages of host memory: allocated once, a slab at a time, and used again for the next record.

Used by the host tier. Pinned memory is slow to allocate and to free, so no record has memory of its own. Invariants: a
page has one owner; a page that a copy may still read is handed out together with the event to wait for. Not
thread-safe: its owner holds a lock.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from kvboost.streams import Event

_SLAB_BYTES = 16 * 2**20  # pinned in a few milliseconds, during which lookups wait

_log = logging.getLogger(__name__)


class PagePool:
    """At most ``capacity_bytes`` in pages of ``page_bytes``."""

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
