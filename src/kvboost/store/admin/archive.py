"""Many records in one tar file, and on their way between it and a place: ``kvboost cache export`` and ``import``.

One member per record, named ``SPACE/KEY.kv`` in hexadecimal digits, and a last one with their number. Headers are made
and read by :mod:`tarfile`; its reader is not used, as it stops at the first damaged header, takes long names and
extended headers of any length, and knows paths, links and sparse files, none of which are wanted here. Archives can be
joined with ``cat`` and listed with ``tar tf``.

Invariants: nothing is extracted to a path; reading allocates no more than a record's limit, whatever the file says; a
member that is no record is counted and skipped; a damaged record goes neither out nor in. An import writes through a
tier of the place, so its limit holds, and passes over what is there: one that was broken off goes on where it stopped.
"""

from __future__ import annotations

import enum
import os
import tarfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from kvboost.direct_io import page_aligned
from kvboost.errors import ForeignRecordError, PlaceError, RecordError, RecordVersionError
from kvboost.store.admin.base import MAX_RECORD_BYTES, Catalogue, Entry, Finding, KeyRing, Verdict, check
from kvboost.store.record.format import inspect, space_of
from kvboost.store.record.header import PAGE, Buffer, RecordHeader, aligned, header_length
from kvboost.store.tiers.base import RecordTier
from kvboost.types import PutOutcome

_BLOCK = tarfile.BLOCKSIZE
_COUNT = "COUNT"  # the last member
_READ_AT_ONCE = 2**20


class ArchiveWriter:
    """Writes an archive to a file or a pipe."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._count = 0

    def add(self, record: Buffer) -> None:
        """One more whole record."""
        self._add(_name(inspect(record, max_bytes=MAX_RECORD_BYTES)), record)
        self._count += 1

    def finish(self) -> None:
        """Say that this is all: an archive without it was cut short."""
        self._add(_COUNT, b"%d" % self._count)
        self._stream.write(bytes(2 * _BLOCK))

    def _add(self, name: str, data: Buffer) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), 0o600
        self._stream.write(member.tobuf(tarfile.USTAR_FORMAT))
        self._stream.write(data)
        self._stream.write(bytes(-len(data) % _BLOCK))


class ArchiveReader:
    """Reads an archive from a file or a pipe: iterate over the headers, and take those records you want."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._head = b""  # of the present member, what was read to know it
        self._size = 0
        self._left = 0  # bytes of the present member that were not read, with its padding
        self.damaged = 0
        """Places that hold no record: damaged ones, and members that are something else."""
        self.other_version = 0
        self.complete = True
        """Whether every record is there that was written: known at the end."""

    def __iter__(self) -> Iterator[RecordHeader]:
        """The header of each record. Those sealed with a key are not proven by it."""
        count, ended = 0, False
        is_lost = False  # behind damage that was counted already, until the next member
        while block := self._exactly(_BLOCK):
            if not any(block):
                continue  # the end of an archive; another may follow
            ended = False
            member = _member(block)
            if member is None:
                self.damaged += not is_lost
                is_lost = True
                continue
            is_lost = False
            self._size, self._left = member.size, aligned(member.size, _BLOCK)
            try:
                if member.name == _COUNT:
                    self.complete &= self._body(min(self._size, _BLOCK)) == b"%d" % count
                    count, ended = 0, True
                elif not member.isdir():
                    header = self._header(member)
                    count += 1
                    yield header
            except RecordVersionError:
                self.other_version += 1
                count += 1
            except RecordError:
                self.damaged += 1
            self._skip()
        self.complete &= ended

    def record(self) -> memoryview:
        """All of the record whose header came last; shorter if the archive ends in it. To be taken once."""
        record = page_aligned(self._size)
        at = len(self._head)
        record[:at] = self._head
        while at < len(record) and (part := self._body(min(len(record) - at, _READ_AT_ONCE))):
            record[at : at + len(part)] = part
            at += len(part)
        return record[:at]

    def _header(self, member: tarfile.TarInfo) -> RecordHeader:
        """The header of the record that this member is. Raises RecordError if it is none."""
        self._head = self._body(min(PAGE, self._size))
        self._head += self._body(min(header_length(self._head), self._size) - len(self._head))
        header = inspect(self._head, max_bytes=MAX_RECORD_BYTES)
        if (member.name, member.size) != (_name(header), header.record_bytes):
            raise ForeignRecordError("it is the record of another name")
        return header

    def _body(self, length: int) -> bytes:
        """So many bytes of the present member, or all that are left of the archive."""
        data = self._exactly(min(length, self._left))
        self._left -= len(data)
        return data

    def _skip(self) -> None:
        """Pass what was not read of the present member."""
        if self._left and self._stream.seekable():
            self._stream.seek(self._left, os.SEEK_CUR)  # behind the end nothing is read: the archive is incomplete
            self._left = 0
        while self._left and self._body(min(self._left, _READ_AT_ONCE)):
            pass

    def _exactly(self, length: int) -> bytes:
        """So many bytes, or all that are left."""
        parts: list[bytes] = []
        while length > 0 and (part := self._stream.read(length)):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def _name(header: RecordHeader) -> str:
    return f"{space_of(header).hex()}/{header.key.hex()}.kv"


def _member(block: bytes) -> tarfile.TarInfo | None:
    """The member that begins with this block; None if none does, or one that cannot be a record or a directory."""
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    fits = member.isreg() and 0 <= member.size <= MAX_RECORD_BYTES
    return member if fits or (member.isdir() and member.size == 0) else None


def verified(catalogue: Catalogue, entries: Iterable[Entry], *, keys: KeyRing) -> Iterator[tuple[Entry, Finding]]:
    """Each record and what can be said about it."""
    return ((entry, _finding(entry, record, keys)) for entry, record in catalogue.records(entries))


def exported(
    catalogue: Catalogue, entries: Iterable[Entry], *, keys: KeyRing, into: ArchiveWriter
) -> Iterator[tuple[Entry, Finding]]:
    """Write what is whole, and what is locked as it stands; say of each record what was found."""
    for entry, record in catalogue.records(entries):
        finding = _finding(entry, record, keys)
        if record is not None and finding.verdict in (Verdict.WHOLE, Verdict.LOCKED):
            into.add(record)
        yield entry, finding
    into.finish()


def _finding(entry: Entry, record: memoryview | None, keys: KeyRing) -> Finding:
    if record is None:
        return Finding(Verdict.MISSING, "it is not there any more")
    return check(record, space=entry.space, key=entry.key, keys=keys)


class Outcome(enum.Enum):
    """What came of a record in an archive."""

    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"
    """Whole, but it does not fit the capacity."""
    LOCKED = "locked"
    DAMAGED = "damaged"


class Importer:
    """Brings the records of an archive into a place. ``capacity_bytes`` is the limit of a place that has none yet."""

    def __init__(self, catalogue: Catalogue, *, keys: KeyRing, capacity_bytes: int | None) -> None:
        self._catalogue = catalogue
        self._keys = keys
        self._capacity = capacity_bytes
        self._space: bytes | None = None
        self._tier: RecordTier[Any] | None = None
        self.evicted = 0
        """Records that were evicted for new ones."""

    def outcomes(self, archive: ArchiveReader) -> Iterator[Outcome]:
        """Import each record; what came of it. Raises PlaceError if the place cannot be used."""
        try:
            for header in archive:
                yield self._outcome(header, archive)
        finally:
            self._close()

    def _outcome(self, header: RecordHeader, archive: ArchiveReader) -> Outcome:
        records = self._keys.format_for(header)
        if records is None:
            return Outcome.LOCKED  # a key it was made with was not given
        tier = self._tier_for(header)
        if tier.contains([header.key])[0]:
            return Outcome.PRESENT
        finding = check(archive.record(), space=space_of(header), key=header.key, keys=self._keys)
        if finding.block is None:
            return Outcome.DAMAGED
        outcome = tier.store(finding.block)
        if outcome is PutOutcome.REFUSED and (failures := tier.health()):
            kinds = ", ".join(failures)
            raise PlaceError(f"{self._catalogue.place} takes no records ({kinds}); repair that and import again")
        return Outcome(outcome.value)

    def _tier_for(self, header: RecordHeader) -> RecordTier[Any]:
        """A tier for the record's space. An export has spaces one after the other: one is open at a time."""
        space = space_of(header)
        if self._tier is None or self._space != space:
            self._close()
            records = self._keys.format_for(header)
            assert records is not None
            self._tier = self._catalogue.tier(records, capacity_bytes=self._capacity)
            self._space = space
        return self._tier

    def _close(self) -> None:
        if self._tier is not None:
            self._tier.flush()
            self.evicted += self._tier.stats().evictions
            self._tier.close()
            self._tier = None
