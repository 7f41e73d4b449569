"""All chunk records of one directory or server: what ``kvboost cache`` works with.

A tier sees the blocks of one namespace and hides every failure; a :class:`Catalogue` sees all records of a directory
or server, without a model, and says what is wrong. Invariants: looking changes nothing; what a name or a header
claims is believed only where :func:`check` has proven it; :attr:`Verdict.WHOLE` is only ever said of a record that a
tier with the same keys would hand out. Without its key a record cannot be told from a forged one; that is
:attr:`Verdict.LOCKED`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvboost.errors import ConfigError, ForeignRecordError, RecordError, RecordVersionError
from kvboost.store.record.format import RecordFormat, inspect, record_format, space_of
from kvboost.store.record.header import PAGE, Buffer, RecordHeader, header_length
from kvboost.store.tiers.base import in_order as submitted_in_order

MAX_RECORD_BYTES = 2**30
"""No larger record is read: its writers stop far below."""

READERS = 4

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Entry:
    """A record by its name: nothing of it has been read."""

    space: bytes
    """Its model, tenant, codec and secrets, as one digest (see :func:`kvboost.store.record.format.space_of`)."""
    key: bytes
    tenant: bytes | None
    """The digest of the tenant's name; None where the place does not tell."""
    size: int
    """The bytes it takes, as this place counts them."""
    used_at: float | None
    """When it was last used, in seconds since 1970."""


class Catalogue(ABC):
    """All records of one place. Every method may raise PlaceError."""

    def __init__(self, place: str) -> None:
        """``place`` is what to call it: never with a password."""
        self.place = place
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="kvboost-admin")

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Every record that is there, spaces one after the other where the place can. Others may write meanwhile."""

    def heads(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, bytes | None]]:
        """The first bytes of each, with its header in them; None for one that is gone."""
        return in_order(self._pool, self._head, entries)

    def records(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, memoryview | None]]:
        """Each whole record, unchecked; None for one that is gone. One that cannot be right comes empty."""
        return in_order(self._pool, self._record, entries)

    def verified(self, entries: Iterable[Entry], *, keys: KeyRing) -> Iterator[tuple[Entry, Finding]]:
        """Each record and what can be said about it."""
        for entry, record in self.records(entries):
            yield entry, check(record, space=entry.space, key=entry.key, keys=keys)

    @abstractmethod
    def _head(self, entry: Entry) -> bytes | None:
        """One of :meth:`heads`."""

    @abstractmethod
    def _record(self, entry: Entry) -> memoryview | None:
        """One of :meth:`records`."""

    @abstractmethod
    def remove(self, entries: Sequence[Entry]) -> int:
        """Remove these; how many there were."""

    def purge(self, tenant: bytes | None) -> int:
        """Remove everything of a tenant, or of all, of whatever model; how many records there were."""
        return self.remove([entry for entry in self.entries() if tenant in (None, entry.tenant)])

    @abstractmethod
    def check_writable(self) -> None:
        """Raise PlaceError if nothing can be written there."""

    def close(self) -> None:
        """Let go of the place."""
        self._pool.shutdown(cancel_futures=True)


def in_order(pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Each item and what ``work`` makes of it, in order; a few are worked on ahead."""
    for item, result in submitted_in_order(pool, work, items, ahead=READERS + 2):
        yield item, result.result()


def head_of(read: Callable[[int], bytes]) -> bytes:
    """The first bytes of a record up to the end of its header; ``read`` gives so many from the beginning."""
    first = read(PAGE)
    try:
        length = header_length(first)
    except RecordError:
        return first  # whoever reads the header says so
    return read(length) if length > PAGE else first


_KEY_BYTES = 32


class Verdict(enum.Enum):
    """What can be said about a record."""

    WHOLE = "whole"
    LOCKED = "locked"
    """It may be whole; the key to tell was not given."""
    OTHER_VERSION = "other version"
    """Of a format that this code does not read."""
    DAMAGED = "damaged"
    MISSING = "missing"
    """It was listed and is not there, or not all of it: evicted, or lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    verdict: Verdict
    reason: str
    """In words; empty for a whole record."""
    header: RecordHeader | None = None


class KeyRing:
    """The secrets at hand. Which of them a record was made with, and for what, the record says itself."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """``keys`` of 32 bytes, such as :func:`kvboost.store.record.format.read_key` gives."""
        if any(len(key) != _KEY_BYTES for key in keys):
            raise ConfigError(f"a key has {_KEY_BYTES} bytes; make one with os.urandom({_KEY_BYTES})")
        self._keys = list(keys)
        self._formats: dict[bytes, RecordFormat | None] = {}

    def format_for(self, header: RecordHeader) -> RecordFormat | None:
        """What reads records like this one; None if a key for it is missing."""
        space = space_of(header)
        if space not in self._formats:
            protection = "encrypt" if header.encrypted else "mac" if header.keyed else "none"
            named = partial(record_format, header.namespace, codec=header.codec, max_bytes=MAX_RECORD_BYTES)
            # An engine seals whatever it encrypts: no key of ours makes an encrypted record without a MAC.
            keys = self._keys if header.keyed else [] if header.encrypted else [None]
            made = (named(protection=protection, key=key) for key in keys)
            self._formats[space] = next((found for found in made if found.space == space), None)
        return self._formats[space]


def examine(head: Buffer, *, space: bytes, key: bytes) -> Finding:
    """A record by its header alone, which is shown to belong under this name: WHOLE says nothing about the rest."""
    try:
        header = inspect(head, max_bytes=MAX_RECORD_BYTES)
        if header.key != key or space_of(header) != space:
            raise ForeignRecordError("it is the record of another name")
    except RecordVersionError as error:
        return Finding(Verdict.OTHER_VERSION, str(error))
    except RecordError as error:
        return Finding(Verdict.DAMAGED, str(error))
    return Finding(Verdict.WHOLE, "", header)


def check(record: Buffer | None, *, space: bytes, key: bytes, keys: KeyRing) -> Finding:
    """Everything that can be checked about a record that lies under this name."""
    if record is None:
        return Finding(Verdict.MISSING, "it is not there any more")
    finding = examine(record, space=space, key=key)
    header = finding.header
    if header is None:
        return finding
    records = keys.format_for(header)
    if records is None:
        if len(record) != header.record_bytes:
            reason = f"{len(record)} bytes of a record of {header.record_bytes}"
            return Finding(Verdict.DAMAGED, reason, header)
        return Finding(Verdict.LOCKED, f"it is {_secured(header)} with a key that was not given", header)
    try:
        records.decode(record, key)
    except RecordError as error:
        return Finding(Verdict.DAMAGED, str(error), header)
    return Finding(Verdict.WHOLE, "", header)


def _secured(header: RecordHeader) -> str:
    ways = [("sealed", header.keyed), ("encrypted", header.encrypted)]
    return " and ".join(way for way, used in ways if used)
