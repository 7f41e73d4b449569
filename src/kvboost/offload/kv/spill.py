"""Where pages lie that exceed the budget: a file, or the host's memory beside an accelerator.

Used by the pager alone: reads come from its thread, writes to other slots from the model's. Invariant: a slot is
written once and reads back those bits, or raises; nothing is left behind, however the process ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from kvboost.direct_io import DIRECT, PAGE, up_to_page


class Spill(Protocol):
    """Numbered slots for pages of equal size."""

    def frame(self, size: int) -> torch.Tensor:
        """New memory [bytes] to compute with, of the kind :meth:`read` fills."""
        ...

    def write(self, slot: int, frame: torch.Tensor) -> None:
        """Keep the frame's bytes."""
        ...

    def read(self, slots: Sequence[int], pages: torch.Tensor) -> None:
        """Fill ``pages`` [slots, bytes] with what was written to these slots."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class FileSpill:
    """A file without a name, past the page cache where the file system allows it."""

    def __init__(self, directory: Path | None) -> None:
        """Raises OSError if no file can be made there."""
        # Without a name from its first moment on: the kernel frees it with the process, also with a killed one.
        self._file = tempfile.TemporaryFile(dir=directory, prefix="kvboost-kv-", buffering=0)  # noqa: SIM115
        self.direct = bool(DIRECT)
        """Whether reads and writes go past the page cache, which would hold in memory what was to leave it."""
        if self.direct:
            self._set_direct(True)

    def frame(self, size: int) -> torch.Tensor:
        """Memory that begins at a page and takes no byte beside its own: the pager counts what it gives out."""
        return torch.frombuffer(mmap.mmap(-1, up_to_page(size)), dtype=torch.uint8)

    def write(self, slot: int, frame: torch.Tensor) -> None:
        """Raises OSError, for example if the disk is full."""
        self._move(slot * frame.numel(), frame, write=True)

    def read(self, slots: Sequence[int], pages: torch.Tensor) -> None:
        """Slots that lie side by side are read in one call. Raises OSError if the bytes are not there."""
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
    """Pinned host memory beside an accelerator. It has run with the CPU as the device only.

    Copies go through the device's default stream, which orders them with the computing; a stream of their own
    would overlap more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages: dict[int, torch.Tensor] = {}

    def frame(self, size: int) -> torch.Tensor:
        """Memory on the device."""
        return torch.empty(up_to_page(size), dtype=torch.uint8, device=self._device)

    def write(self, slot: int, frame: torch.Tensor) -> None:
        """Returns when the bytes are there."""
        page = torch.empty(frame.shape, dtype=torch.uint8, pin_memory=self._device.type != "cpu")
        self._pages[slot] = page.copy_(frame)

    def read(self, slots: Sequence[int], pages: torch.Tensor) -> None:
        """What the default stream computes afterwards sees the bytes."""
        for slot, page in zip(slots, pages, strict=True):
            page.copy_(self._pages[slot])

    def close(self) -> None:
        """Forget all pages."""
        self._pages.clear()
