"""What the tiers of records have in common: one namespace over shared connections, counters, health.

Subclassed by the disk and Redis tiers. Invariants: tiers of several namespaces share limits, connections and
health, and nothing else; only records that passed their checks are handed out; two threads never write one record.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Generic, Self, TypeVar

from kvboost.errors import RecordError
from kvboost.failures import Failures
from kvboost.store.counters import Counters
from kvboost.store.record.format import RecordFormat
from kvboost.types import KVBlock, PutOutcome, StoreStats

MAX_VARIANTS = 8
"""Blocks of one content that a lookup gives, as in memory."""
_MAX_UNWRITTEN = 512  # uses and missing blocks remembered before they are written down

Place = tuple[bytes, bytes]
"""Space and key: what names a record."""

T = TypeVar("T")
R = TypeVar("R")


class Backend(ABC):
    """What the tiers of all namespaces of one directory or server share. Thread-safe."""

    def __init__(self, tier: str, *, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        """The place's limit, as far as it is known."""
        self.health = Failures(f"{tier} tier")
        self._writing_lock = threading.Lock()
        self._being_written: set[Place] = set()

    @property
    def is_available(self) -> bool:
        """Whether it answered when it was last used."""
        return True

    @contextmanager
    def writing(self, place: Place) -> Iterator[bool]:
        """Whether the caller may write this record now: False while another thread does."""
        with self._writing_lock:
            is_free = place not in self._being_written
            self._being_written.add(place)
        try:
            yield is_free
        finally:
            if is_free:
                with self._writing_lock:
                    self._being_written.discard(place)

    def is_being_written(self, place: Place) -> bool:
        """Whether a thread of this process writes this record now."""
        return place in self._being_written

    @abstractmethod
    def close(self) -> None:
        """Close connections and threads."""


B = TypeVar("B", bound=Backend)


class RecordTier(ABC, Generic[B]):
    """A :class:`kvboost.extend.Tier` of records that outlive the process. Thread-safe."""

    name: str
    outlives_process = True
    damage_remedy: str
    """What to do about damaged records."""

    def _open(self, backend: B, records: RecordFormat, *, owns_backend: bool) -> None:
        """Set up the state of one namespace; constructors call it with a new backend."""
        self._backend = backend
        self._records = records
        self._owns_backend = owns_backend
        self._lock = threading.Lock()  # of the counters and the subclass's state; never held during I/O
        self._counters = Counters()

    def for_namespace(self, records: RecordFormat) -> Self:
        """A tier for another namespace over the same connections and threads, with the same limits.

        Closing it leaves this one open; closing this one ends both.
        """
        other = type(self).__new__(type(self))
        other._open(self._backend, records, owns_backend=False)
        return other

    @property
    def is_available(self) -> bool:
        """Whether the backend answered when it was last used."""
        return self._backend.is_available

    def health(self) -> dict[str, int]:
        """How often each kind of failure was seen, in all namespaces."""
        return self._backend.health.counts()

    def stats(self) -> StoreStats:
        """Chunks and bytes of this namespace, those being written included; counters of this process."""
        chunks, nbytes = self._totals()
        with self._lock:
            counted = self._counters.stats(
                self.name, chunks=chunks, nbytes=nbytes, capacity_bytes=self._backend.capacity_bytes
            )
        return replace(counted, available=self.is_available, errors=sum(self.health().values()))

    def store(self, block: KVBlock) -> PutOutcome:
        """Write ``block`` within the budget; the class says what is evicted for it."""
        outcome = PutOutcome.REFUSED
        try:
            with self._backend.writing((self._records.space, block.key)) as is_free:
                if is_free:
                    outcome = self._store(block)
        except RecordError as error:
            remedy = "use smaller chunks or another codec"
            self._backend.health.failed("a block cannot be written", error, remedy=remedy)
        with self._lock:
            self._counters.refused += outcome is PutOutcome.REFUSED
        return outcome

    def flush(self) -> None:
        """Return once what was stored is as safe as the place makes it: at once, where it is so from the beginning."""

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these are there."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove these blocks."""

    def clear(self) -> None:
        """Remove every block of this namespace."""
        self._forget(self._records.namespace.tenant, self._records.space)

    def purge(self, tenant: bytes | None) -> None:
        """Remove every block of a tenant, by the digest in its namespace, or of all; of whatever model or codec."""
        self._forget(tenant, None)

    @abstractmethod
    def _forget(self, tenant: bytes | None, space: bytes | None) -> None:
        """Remove every block of a tenant, or of all, and of a space of that tenant's, or of all."""

    def close(self) -> None:
        """Close the connections and threads if they were opened for this tier. What was stored stays."""
        if self._owns_backend:
            self._backend.close()

    @abstractmethod
    def _totals(self) -> tuple[int, int]:
        """Chunks and bytes of this namespace."""

    @abstractmethod
    def _store(self, block: KVBlock) -> PutOutcome:
        """Write a block that nobody else is writing. May raise RecordError."""

    def _discard(self, key: bytes) -> None:
        """Remove a damaged record."""
        self.remove([key])

    def _counted(self, blocks: Iterable[KVBlock | None]) -> Iterator[KVBlock | None]:
        for block in blocks:
            with self._lock:
                self._counters.looked_up(found=block is not None)
            yield block

    def _decoded(self, key: bytes, record: memoryview | None) -> KVBlock | None:
        """The block in a record; None if there is no record or it fails its checks."""
        if record is None:
            return None
        try:
            return self._records.decode(record, key)
        except RecordError as error:
            self._reject(key, error)
            return None

    def _reject(self, key: bytes, error: Exception) -> None:
        with self._lock:
            self._counters.rejected += 1
        self._backend.health.failed("a record was damaged and is removed", error, remedy=self.damage_remedy)
        self._discard(key)


class Unwritten:
    """Uses, and blocks that were not found, until they are written down. Its owner's lock guards it."""

    def __init__(self) -> None:
        self._uses: dict[bytes, int] = {}
        self._missing: set[bytes] = set()
        self._clock = 0

    def stamp(self, count: int = 1) -> int:
        """The last of ``count`` new stamps. Clocks go back, stamps of one process do not."""
        self._clock = max(time.time_ns(), self._clock) + count
        return self._clock

    def follow(self, newest: int) -> None:
        """This stamp is written down already. If it is ahead of the clock, which was set back, ours come after it."""
        if newest > max(time.time_ns(), self._clock):
            self._clock = newest
            self._uses = {key: self.stamp() for key in self._uses}

    def used(self, chain: Sequence[bytes]) -> bool:
        """Note the keys of one prompt, each more recent than its successors; whether it is time to write down."""
        last = self.stamp(len(chain))
        for at in reversed(range(len(chain))):
            self._uses.pop(chain[at], None)
            self._uses[chain[at]] = last - at
        is_due = len(self._uses) >= _MAX_UNWRITTEN
        while len(self._uses) > 2 * _MAX_UNWRITTEN:  # they cannot be written down now
            self._uses.pop(next(iter(self._uses)))
        return is_due

    def missed(self, key: bytes) -> None:
        """Note a block that was not there: the index may say otherwise."""
        if len(self._missing) < _MAX_UNWRITTEN:
            self._missing.add(key)

    def take(self) -> tuple[dict[bytes, int], list[bytes]]:
        """Stamps by key, the most recent last, and the missing keys. They are noted no longer."""
        taken = self._uses, list(self._missing)
        self._uses, self._missing = {}, set()
        return taken


def in_order(
    pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], *, ahead: int
) -> Generator[tuple[T, Future[R]]]:
    """Each item and what ``work`` makes of it, in order. Work begins at once and runs a few items ahead.

    Closed early, it takes back what has not begun.
    """
    left = iter(items)
    waiting = deque((item, pool.submit(work, item)) for item in islice(left, ahead))

    def results() -> Generator[tuple[T, Future[R]]]:
        try:
            while waiting:
                first = waiting.popleft()
                waiting.extend((item, pool.submit(work, item)) for item in islice(left, 1))
                yield first
        finally:
            for _, result in waiting:
                result.cancel()

    return results()
