"""Direct I/O: reads that bypass the page cache, into page-aligned memory.

Used by the disk tier and by weight streaming. Invariant: reads do not evict other files from the page cache, and go to
their final memory without a copy; where the file system refuses direct I/O, buffered reads replace it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Self

import numpy as np

PAGE = 4096  # the alignment of addresses, offsets and lengths that O_DIRECT accepts everywhere
DIRECT = getattr(os, "O_DIRECT", 0)


def page_aligned(size: int) -> memoryview:
    """New page-aligned memory, for reads that bypass the page cache."""
    # From malloc, not mmap: freed memory is reused without new page faults.
    whole = np.empty(size + PAGE, dtype=np.uint8)
    begin = -whole.ctypes.data % PAGE
    return memoryview(whole[begin : begin + size])  # type: ignore[arg-type]


def up_to_page(size: int) -> int:
    """``size`` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class DirectFile:
    """A file opened for reading. Several threads may read at once."""

    def __init__(self, path: Path, *, direct: bool = True, flags: int = 0) -> None:
        """``flags`` go to ``os.open`` as well. Raises OSError if the file cannot be opened."""
        self.path, self._flags = path, os.O_RDONLY | flags
        self.direct = direct and bool(DIRECT)
        """Whether reads bypass the page cache; off where the file system refuses."""
        try:
            self._descriptor = os.open(path, self._flags | (DIRECT if self.direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self.direct = False
            self._descriptor = os.open(path, self._flags)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from ``offset`` on; returns the number of bytes read.

        Bypasses the page cache if the buffer, its length and the offset are whole pages (see :func:`page_aligned`).
        """
        done = 0
        while done < len(buffer):
            try:
                count = self._preadv(buffer[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self._fall_back_to_buffered()  # some file systems refuse only here
                continue
            done += count
            if not count or (self.direct and count % PAGE):  # the end
                break
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fall_back_to_buffered(self) -> None:
        replacement = os.open(self.path, self._flags)
        os.dup2(replacement, self._descriptor)  # other threads keep the same descriptor
        os.close(replacement)
        self.direct = False

    def _preadv(self, buffer: memoryview, offset: int) -> int:
        return os.preadv(self._descriptor, [buffer], offset)
