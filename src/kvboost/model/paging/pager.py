"""Frames of memory within a budget, and one thread that moves pages between them and the spill.

Used by the paged cache alone, from the thread that runs the model. Invariants: the ledger never exceeds the budget; the
thread works in the order asked, so a page is read as it was last written; a move that failed raises at the next use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import torch

from kvboost.errors import CapacityError, KVBoostError
from kvboost.model.paging.spill import Spill

TRANSIT = 2
"""Frames for pages on their way: one is computed with, the next one is read."""


@dataclass
class PagingLedger:
    """What one pager has taken and moved."""

    limit: int
    """The budget in bytes."""
    used: int = 0
    """Bytes of all frames, whether they hold rows or not."""
    peak: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    waited_seconds: float = 0.0
    """How long the model stood still for a page that was not there yet."""

    def take(self, size: int) -> None:
        """Raises CapacityError if that is more than is left."""
        if self.used + size > self.limit:
            raise CapacityError(
                f"{size} bytes more do not fit a kv_budget of {self.limit}, of which {self.used} are taken"
            )
        self.used += size
        self.peak = max(self.peak, self.used)


@dataclass
class _Coming:
    """A page that is being read."""

    slot: int
    frame: torch.Tensor
    read: Future[None]


class Pager:
    """Gives out frames and moves pages. All its frames together stay within the budget."""

    def __init__(self, spill: Spill, *, frame_bytes: int, budget: int) -> None:
        self.ledger = PagingLedger(budget)
        self._spill, self._frame_bytes = spill, frame_bytes
        self._free: list[torch.Tensor] = []
        self._transit = 0  # frames being read into, computed with, or written from
        self._coming: deque[_Coming] = deque()
        self._going: deque[tuple[torch.Tensor, Future[None]]] = deque()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvboost-pages")
        self._slots = 0
        self._free_slots: list[int] = []
        self._lost = False
        self.closed = False

    def take(self) -> torch.Tensor:
        """A frame [bytes] for rows that stay. Raises CapacityError beyond the budget."""
        self._settle()
        if self._free:
            return self._free.pop()
        self.ledger.take(self._frame_bytes)
        return self._spill.frame(self._frame_bytes)

    def release(self, frame: torch.Tensor) -> None:
        """The frame's rows are not needed any more."""
        self._free.append(frame)

    def write(self, frame: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Send a page out. Returns its slot, and a frame to go on with: another one while this one is written."""
        self._settle()
        slot = self._free_slots.pop() if self._free_slots else self._slots
        self._slots = max(self._slots, slot + 1)
        done = self._worker.submit(self._spill.write, slot, frame)
        self.ledger.written_bytes += self._frame_bytes
        if self._transit >= TRANSIT:
            self._wait(done)
            return slot, frame
        self._transit += 1
        self._going.append((frame, done))
        return slot, self.take()

    def forget(self, slot: int) -> None:
        """The page is not needed any more. Its slot may be written again."""
        self.settle_reads()
        self._free_slots.append(slot)

    def expect(self, slots: Sequence[int]) -> None:
        """Begin to read the first of these, which :meth:`read` will be asked for next."""
        asked = [page.slot for page in self._coming]
        if asked == list(slots[: len(asked)]):
            self._settle()
            self._read_ahead(slots[len(asked) :])

    def read(self, slots: Sequence[int], *, then: Sequence[int] = ()) -> Generator[torch.Tensor]:
        """The pages in these slots, one after another, each valid until the next one is asked for.

        While one is used the next one is read; at the end, the first of ``then``, for the next call.
        """
        plan = [*slots, *then[:TRANSIT]]
        if [page.slot for page in self._coming] != plan[: len(self._coming)]:
            self.settle_reads()  # another page was expected
        asked = len(self._coming)
        for _ in slots:
            asked += self._read_ahead(plan[asked:])
            if not self._coming:  # every frame is being written from
                while self._going:
                    self._end_write()
                asked += self._read_ahead(plan[asked:])
            page = self._coming.popleft()
            try:
                self._wait(page.read)
                self._settle()  # a page whose writing failed was read before that showed
                yield page.frame
            finally:
                self._transit -= 1
                self.release(page.frame)
        self._read_ahead(plan[asked:])

    def settle_reads(self) -> None:
        """Give up what is read ahead."""
        while self._coming:
            page = self._coming.popleft()
            self._transit -= 1
            self.release(page.frame)
            page.read.exception()  # nobody asked for these bytes yet: who does reads them again

    def close(self) -> None:
        """End the thread and remove what was spilled. Frames are given back to the system."""
        if self.closed:
            return
        self.closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._spill.close()
        self._coming.clear()
        self._going.clear()
        self._free.clear()
        self.ledger.used = 0

    def _read_ahead(self, slots: Sequence[int]) -> int:
        """Begin to read as many of these as there are frames for; how many."""
        begun = 0
        for slot in slots:
            if self._transit >= TRANSIT:
                break
            frame = self.take()
            self._transit += 1
            self._coming.append(_Coming(slot, frame, self._worker.submit(self._spill.read, slot, frame)))
            self.ledger.read_bytes += self._frame_bytes
            begun += 1
        return begun

    def _settle(self) -> None:
        """Take back the frames whose writing has ended."""
        if self._lost:
            raise KVBoostError("a page of this sequence could not be moved; make a new cache and read the text again")
        while self._going and self._going[0][1].done():
            self._end_write()

    def _end_write(self) -> None:
        frame, done = self._going.popleft()
        self._transit -= 1
        self.release(frame)
        self._wait(done)

    def _wait(self, move: Future[None]) -> None:
        begun = perf_counter()
        try:
            move.result()
        except OSError:
            self._lost = True
            raise
        self.ledger.waited_seconds += perf_counter() - begun
