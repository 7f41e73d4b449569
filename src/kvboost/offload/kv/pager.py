"""Frames of memory within a budget, and pages beyond it: in a file, or in the host's memory beside an accelerator.

Used by the paged cache alone, from the thread that runs the model; one thread of the pager reads spilled pages ahead.
Invariants: the ledger never exceeds the budget; a slot is written once and reads back those bits, or raises, and from
then on every use does; nothing of it is left, however the process ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from kvboost.direct_io import DIRECT, PAGE, up_to_page
from kvboost.errors import CapacityError, KVBoostError
from kvboost.hf.streams import streams_for
from kvboost.streams import Copies, Event


class FileSpill:
    """Numbered slots for pages of equal size, in a file without a name: past the page cache where that is allowed."""

    def __init__(self, directory: Path | None) -> None:
        """Raises OSError if no file can be made there."""
        # Without a name from its first moment on: the kernel frees it with the process, also with a killed one.
        self._file = tempfile.TemporaryFile(dir=directory, prefix="kvboost-kv-", buffering=0)  # noqa: SIM115
        self.direct = bool(DIRECT)
        """Whether reads and writes go past the page cache, which would hold in memory what was to leave it."""
        if self.direct:
            self._set_direct(True)

    def frame(self, size: int) -> torch.Tensor:
        """Memory [bytes] to compute with, from a page on and no byte more: the pager counts what it gives out."""
        return torch.frombuffer(mmap.mmap(-1, up_to_page(size)), dtype=torch.uint8)

    def event(self) -> None:
        """All is computed when it was asked for."""

    def write(self, slot: int, frame: torch.Tensor) -> None:
        """Keep the frame's bytes. Raises OSError, for example if the disk is full."""
        self._move(slot * frame.numel(), frame, write=True)

    def read(self, slots: Sequence[int], pages: torch.Tensor, after: Event | None) -> None:
        """Fill ``pages`` [slots, bytes]. Slots side by side are read in one call. Raises OSError for missing bytes."""
        first = 0
        for index in range(1, len(slots) + 1):
            if index == len(slots) or slots[index] != slots[index - 1] + 1:
                run = pages[first:index]
                self._move(slots[first] * pages.shape[1], run.view(-1), write=False)
                first = index

    def close(self) -> None:
        """The file and its blocks are gone."""
        self._file.close()

    def _move(self, offset: int, memory: torch.Tensor, *, write: bool) -> None:
        buffer = memoryview(memory.numpy())  # type: ignore[arg-type]
        call = os.pwritev if write else os.preadv
        done = 0
        while done < len(buffer):
            try:
                count = call(self._file.fileno(), [buffer[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self._set_direct(False)  # some file systems refuse only here
                continue
            if not count:
                raise OSError(errno.EIO, f"the spilled KV ends after {done} of {len(buffer)} bytes at {offset}")
            done += count
            if self.direct and done % PAGE:
                self._set_direct(False)  # a short transfer: its rest does not begin at a page

    def _set_direct(self, direct: bool) -> None:
        import fcntl  # POSIX only, as O_DIRECT is

        descriptor = self._file.fileno()
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~DIRECT
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (DIRECT if direct else 0))
            self.direct = direct
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False


class HostSpill:
    """The same slots in pinned host memory beside an accelerator, on which it never ran.

    Copies run on streams of their own, beside the computing: a read begins ``after`` what used its pages before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, streams_for([device])
        self._pages: dict[int, torch.Tensor] = {}

    def frame(self, size: int) -> torch.Tensor:
        """Memory on the device."""
        return torch.empty(up_to_page(size), dtype=torch.uint8, device=self._device)

    def event(self) -> Event | None:
        """What the calling thread has asked the device to compute."""
        return self._streams.event()

    def write(self, slot: int, frame: torch.Tensor) -> None:
        """Returns when the bytes are there."""
        self._pages[slot] = page = self._streams.host_memory(frame.numel())
        self._copy([(frame, page)], self.event())

    def read(self, slots: Sequence[int], pages: torch.Tensor, after: Event | None) -> None:
        """Returns when the bytes are there."""
        self._copy([(self._pages[slot], page) for slot, page in zip(slots, pages, strict=True)], after)

    def _copy(self, pairs: Copies, after: Event | None) -> None:
        done = self._streams.copy(pairs, after=after)
        if done is not None:
            done.synchronize()

    def close(self) -> None:
        """Forget all pages."""
        self._pages.clear()


Spill = FileSpill | HostSpill

TRANSIT = 2
"""Buffers for pages on their way: one is computed with, the next one is read."""


@dataclass
class PagingLedger:
    """Memory that one pager holds, and bytes it has moved."""

    limit: int
    """The budget in bytes."""
    used: int = 0
    """Bytes of all frames, whether they hold tokens or not."""
    peak: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    waited_seconds: float = 0.0
    """How long the model waited for a page to be read or written."""

    def reserve(self, size: int) -> None:
        """Raises CapacityError if that is more than is left."""
        if self.used + size > self.limit:
            raise CapacityError(
                f"{size} bytes more do not fit kv_bytes={self.limit}, of which {self.used} are taken; raise kv_bytes"
            )
        self.used += size
        self.peak = max(self.peak, self.used)


@dataclass
class _Coming:
    """Pages that are being read into one buffer."""

    slots: tuple[int, ...]
    buffer: torch.Tensor
    read: Future[None]


class Pager:
    """Gives out frames and moves pages. All its memory together stays within the budget."""

    def __init__(self, spill: Spill, *, frame_bytes: int, budget: int, group: int) -> None:
        """``group`` pages are read at once: the buffers for those on their way take as many frames each."""
        self.ledger = PagingLedger(budget)
        self._spill, self._frame_bytes, self._group = spill, frame_bytes, group
        self._free_buffers: list[torch.Tensor] = []
        self._buffers = 0
        self._coming: deque[_Coming] = deque()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvboost-pages")
        self._slots = 0
        self._free_slots: dict[Hashable, list[int]] = {}
        self._lost = False
        self.closed = False

    def new_frame(self) -> torch.Tensor:
        """A frame [bytes] that stays. Raises CapacityError beyond the budget."""
        self.ledger.reserve(self._frame_bytes)
        return self._spill.frame(self._frame_bytes)

    def write(self, frame: torch.Tensor, *, owner: Hashable) -> int:
        """Spill a page. Returns its slot; the frame can be filled again. Pages of one owner lie side by side."""
        free = self._free_slots.setdefault(owner, [])
        if not free:
            free.extend(reversed(range(self._slots, self._slots + self._group)))
            self._slots += self._group
        self._move(lambda: self._spill.write(free[-1], frame))
        self.ledger.written_bytes += self._frame_bytes
        return free.pop()

    def expect(self, slots: Sequence[int]) -> None:
        """Begin to read the first of these, which :meth:`read` will be asked for next."""
        groups = self._in_groups(slots)
        if self._asked() == groups[: len(self._coming)]:
            self._read_ahead(groups[len(self._coming) :])

    def read(self, slots: Sequence[int], *, then: Sequence[int] = ()) -> Generator[torch.Tensor]:
        """The pages in these slots, a few at a time, [pages, bytes], each valid until the next ones are asked for.

        While some are used the next ones are read; at the end, the first of ``then``, for the next call.
        """
        wanted = self._in_groups(slots)
        groups = [*wanted, *self._in_groups(then)[:TRANSIT]]
        if self._asked() != groups[: len(self._coming)]:
            self._drop_reads()  # another page was expected
        asked = len(self._coming)
        for _ in wanted:
            asked += self._read_ahead(groups[asked:])
            pages = self._coming.popleft()
            try:
                self._move(pages.read.result)
                yield self._part(pages)
            finally:
                self._free_buffers.append(pages.buffer)
        self._read_ahead(groups[asked:])

    def close(self) -> None:
        """End the thread and remove what was spilled. Memory is given back to the system."""
        if self.closed:
            return
        self.closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._spill.close()
        self._coming.clear()
        self._free_buffers.clear()
        self.ledger.used = 0

    def _drop_reads(self) -> None:
        """Drop what is read ahead."""
        while self._coming:
            pages = self._coming.popleft()
            pages.read.exception()  # nobody asked for these bytes yet; whoever does reads them again
            self._free_buffers.append(pages.buffer)

    def _in_groups(self, slots: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(slots[first : first + self._group]) for first in range(0, len(slots), self._group)]

    def _asked(self) -> list[tuple[int, ...]]:
        return [pages.slots for pages in self._coming]

    def _part(self, pages: _Coming) -> torch.Tensor:
        return pages.buffer[: len(pages.slots) * self._frame_bytes].view(len(pages.slots), self._frame_bytes)

    def _read_ahead(self, groups: Sequence[tuple[int, ...]]) -> int:
        """Begin to read as many of these as there are buffers for. Returns how many."""
        begun = 0
        for slots in groups:
            if not self._free_buffers:
                if self._buffers == TRANSIT:
                    break
                self.ledger.reserve(self._frame_bytes * self._group)
                self._free_buffers.append(self._spill.frame(self._frame_bytes * self._group))
                self._buffers += 1
            coming = _Coming(slots, self._free_buffers.pop(), Future())
            coming.read = self._worker.submit(self._spill.read, slots, self._part(coming), self._spill.event())
            self._coming.append(coming)
            self.ledger.read_bytes += self._frame_bytes * len(slots)
            begun += 1
        return begun

    def _move(self, move: Callable[[], None]) -> None:
        """Run a read or write, and count how long it took."""
        if self._lost:
            raise KVBoostError("a page of this sequence could not be moved; make a new cache and prefill it again")
        begun = perf_counter()
        try:
            move()
        except BaseException:  # also an interrupt: the bytes may still be on their way
            self._lost = True
            raise
        self.ledger.waited_seconds += perf_counter() - begun
