"""All chunk records of one directory, server or bucket: what ``kvboost cache`` works with.

A tier sees the blocks of one namespace and hides every failure; a :class:`Catalogue` sees all records of a directory,
server or bucket, without a model, and says what is wrong. Invariants: looking changes nothing; what a name or a header
claims is believed only where :mod:`kvboost.store.admin.check` has proven it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvboost.errors import RecordError
from kvboost.extend import Tier
from kvboost.store.record.format import RecordFormat
from kvboost.store.record.header import PAGE, header_length
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
    """When it was last used (in a bucket: written), in seconds since 1970."""


class ImportTier(Tier, Protocol):
    """A tier that also says what failed."""

    def health(self) -> dict[str, int]:
        """How often each kind of failure was seen."""


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

    @abstractmethod
    def _head(self, entry: Entry) -> bytes | None:
        """One of :meth:`heads`."""

    @abstractmethod
    def _record(self, entry: Entry) -> memoryview | None:
        """One of :meth:`records`."""

    @abstractmethod
    def remove(self, entries: Sequence[Entry]) -> int:
        """Remove these; how many there were."""

    @abstractmethod
    def purge(self, tenant: bytes) -> int:
        """Remove everything of a tenant, of whatever model; how many records there were."""

    @abstractmethod
    def purge_all(self) -> int:
        """Remove everything of every tenant; how many records there were."""

    def purge_outdated(self) -> int:
        """Remove what earlier versions left under names that are read no more; how many there were."""
        return 0

    @abstractmethod
    def tier(self, records: RecordFormat, *, capacity_bytes: int | None) -> ImportTier:
        """A tier of this place to import into. ``capacity_bytes`` is the limit of a place that has none yet."""

    @abstractmethod
    def limit(self) -> int | None:
        """The place's limit in bytes; None if it has none yet."""

    @abstractmethod
    def set_limit(self, capacity: int) -> None:
        """Set the limit for all who use the place."""

    def trim(self) -> Iterator[int]:
        """Evict what is beyond the limit, some records at a time; how many each time. None where others evict."""
        return iter(())

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
