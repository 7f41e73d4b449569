"""Many records in one file, as ``kvboost cache export`` writes it.

The records themselves one after the other, each padded to whole pages, and a last page with their number. Not a tar: a
record names itself and says how long it is, so an index or names around it could only contradict it; every beginning
of a page is a place to go on after damage, where a tar is lost behind its first broken header; and nothing has to be
guarded against that a tar can say (paths, links, sparse files). Archives can be joined with ``cat``.

Invariant: reading allocates no more than a record's limit, whatever the file says.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

from kvboost.direct_io import page_aligned
from kvboost.errors import DamagedRecordError, RecordError, RecordVersionError
from kvboost.store.admin.base import MAX_RECORD_BYTES
from kvboost.store.record.format import inspect
from kvboost.store.record.header import MAGIC, PAGE, Buffer, RecordHeader, aligned, header_length

_END = b"\x89KVBEND\n"
_LAST_PAGE = struct.Struct("<8sQ")
_READ_AT_ONCE = 2**20


class ArchiveWriter:
    """Writes an archive to a file or a pipe."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._count = 0

    def add(self, record: Buffer) -> None:
        """One more record."""
        self._stream.write(record)
        self._stream.write(bytes(-len(record) % PAGE))
        self._count += 1

    def finish(self) -> None:
        """Say that this is all: an archive without it was cut short."""
        self._stream.write(_LAST_PAGE.pack(_END, self._count).ljust(PAGE, b"\0"))


class ArchiveReader:
    """Reads an archive from a file or a pipe: iterate over the headers, and take those records you want."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._head = b""
        self._record_bytes = 0
        self._again = b""  # read, and to be read again
        self._left = 0  # bytes of the present record that were not read, with its padding
        self._since_end = 0
        self._open = False
        self.position = 0
        """Bytes read so far."""
        self.damaged = 0
        """Stretches that hold no record."""
        self.other_version = 0
        self.complete = True
        """Whether every record is there that was written: known at the end."""

    def __iter__(self) -> Iterator[RecordHeader]:
        """The header of each record. Those sealed with a key are not proven by it."""
        lost = False  # in a stretch that was counted already
        while page := self._exactly(PAGE):
            if page.startswith(_END) and len(page) == PAGE:
                _, count = _LAST_PAGE.unpack_from(page)
                self.complete &= count == self._since_end
                self._since_end, self._open, lost = 0, False, False
                continue
            self._open = True
            try:
                header = self._header(page)
            except RecordVersionError:
                self.other_version += not lost
                self._since_end += not lost
                lost = True  # how long it is, only its own version knows
                continue
            except DamagedRecordError:
                self.damaged += not lost
                lost = True
                continue
            lost = False
            self._since_end += 1
            yield header
            self._skip()
        self.complete &= not self._open

    def record(self) -> memoryview:
        """All of the record whose header came last; shorter if the archive ends in it. To be taken once."""
        record = page_aligned(self._record_bytes)
        at = len(self._head)
        record[:at] = self._head
        while at < len(record) and (part := self._read(min(len(record) - at, _READ_AT_ONCE))):
            record[at : at + len(part)] = part
            at += len(part)
        self._left -= at - len(self._head)
        return record[:at]

    def _header(self, page: bytes) -> RecordHeader:
        if not page.startswith(MAGIC):
            raise DamagedRecordError("no record begins here")
        head = page + self._exactly(max(header_length(page) - len(page), 0))
        try:
            header = inspect(head, max_bytes=MAX_RECORD_BYTES)
        except RecordError:
            self._again = head[PAGE:] + self._again  # there may be records in what looked like a header
            self.position -= len(head[PAGE:])
            raise
        self._head = head
        self._record_bytes = header.record_bytes
        self._left = aligned(header.record_bytes, PAGE) - len(head)
        return header

    def _skip(self) -> None:
        """Pass what was not read of the present record."""
        if self._left and not self._again and self._stream.seekable():
            here = self._stream.tell()
            passed = min(self._left, self._stream.seek(0, os.SEEK_END) - here)
            self._stream.seek(here + passed)
            self._left -= passed
            self.position += passed
        while self._left and (part := self._read(min(self._left, _READ_AT_ONCE))):
            self._left -= len(part)
        self.complete &= not self._left

    def _exactly(self, length: int) -> bytes:
        """So many bytes, or all that are left."""
        parts: list[bytes] = []
        while length and (part := self._read(length)):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _read(self, most: int) -> bytes:
        if self._again:
            part, self._again = self._again[:most], self._again[most:]
        else:
            part = self._stream.read(most)
        self.position += len(part)
        return part
