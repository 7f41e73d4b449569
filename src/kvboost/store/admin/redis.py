"""The records of a Redis or Valkey server, by the ledger that its tiers keep there.

Used by ``kvboost cache``. Invariant: no length that the server or a record names is believed beyond the largest
record's. What the ledger has lost sight of is not listed; the tiers sweep it away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TypeVar

from kvboost.errors import PlaceError
from kvboost.store.admin.base import MAX_RECORD_BYTES, Entry, ImportTier, head_of
from kvboost.store.record.format import RecordFormat
from kvboost.store.record.header import PAGE
from kvboost.store.tiers.mooncake_url import giving_nothing
from kvboost.store.tiers.redis.ledger import Ledger
from kvboost.store.tiers.redis.loading import OversizedValueError, received
from kvboost.store.tiers.redis.places import open_place
from kvboost.store.tiers.redis.purging import remove_ids, remove_owned
from kvboost.store.tiers.redis.resp import Link, ServerError
from kvboost.store.tiers.redis.server import PREFIX, Patience, UnavailableError
from kvboost.store.tiers.redis.tier import RedisTier

_TIMEOUT_S = 30.0
_PATIENCE = Patience(_TIMEOUT_S, min_bytes_per_s=1e6)
_AT_ONCE = 64  # chunks in one script: others must get their turn
_LOADED_AT_ONCE = 64

T = TypeVar("T")


class RedisCatalogue:
    """A server that Redis tiers share."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for an URL that cannot work, PlaceError if nobody answers there."""
        self._url = url = giving_nothing(url)
        self._failures: list[UnavailableError] = []  # of values that lie elsewhere
        self._place = open_place(url, prefix=PREFIX, patience=_PATIENCE, report=self._failures.append)
        self._server, self._elsewhere = self._place.server, self._place.elsewhere
        self._whole = self._ledger_of(b"", b"")
        try:
            self._with_link(lambda link: link.call([(b"PING",)]))
        except PlaceError:
            self.close()
            raise

    @property
    def place(self) -> str:
        """Its URL without user and password."""
        return self._place.url

    def entries(self) -> Iterator[Entry]:
        """Every chunk in the ledger that is written."""
        cursor = b"0"
        while True:
            cursor, ids = self._with_link(partial(self._whole.ids, owner=b"*", cursor=cursor))
            for begin in range(0, len(ids), _AT_ONCE):
                names = ids[begin : begin + _AT_ONCE]
                described = self._with_link(partial(self._whole.described, ids=names))
                for name, found in zip(names, described, strict=True):
                    entry = _entry(name, found)
                    if entry is not None:
                        yield entry
            if cursor == b"0":
                return

    def heads(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, bytes | None]]:
        """The first bytes of each value."""
        for batch in _batches(entries, _AT_ONCE):
            for entry, first in zip(batch, self._first_bytes(batch, PAGE), strict=True):
                yield entry, self._head(entry, first) or None

    def _head(self, entry: Entry, first: bytes) -> bytes:
        return head_of(lambda length: first if length <= PAGE else self._first_bytes([entry], length)[0])

    def _first_bytes(self, entries: Sequence[Entry], length: int) -> list[bytes]:
        last = b"%d" % (length - 1)
        if self._elsewhere is not None:
            return [bytes(record or b"")[:length] for _, record in self.records(entries)]
        commands = [(b"GETRANGE", self._ledger(entry).value(entry.key), b"0", last) for entry in entries]
        replies = self._with_link(lambda link: link.call(commands))
        return [reply if isinstance(reply, bytes) else b"" for reply in replies]

    def records(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, memoryview | None]]:
        """The pieces of each record, put together."""
        for _, group in itertools.groupby(entries, key=lambda entry: (entry.tenant, entry.space)):
            for batch in _batches(group, _LOADED_AT_ONCE):
                yield from self._loaded(batch)

    def _loaded(self, batch: Sequence[Entry]) -> Iterator[tuple[Entry, memoryview | None]]:
        done = 0
        keys = [entry.key for entry in batch]
        ledger = self._ledger(batch[0])
        if self._elsewhere is not None:
            found = self._elsewhere.load(keys, ledger=ledger, max_bytes=MAX_RECORD_BYTES)
            with closing(found):
                for entry, record in zip(batch, found, strict=True):
                    if found.unavailable is not None:
                        raise self._failed(found.unavailable)
                    yield entry, record
            return
        try:
            with self._server.link(self._server.deadline()) as link:
                for record in received(link, keys, ledger=ledger, max_bytes=MAX_RECORD_BYTES):
                    done += 1
                    yield batch[done - 1], record
        except UnavailableError as error:
            if not isinstance(error.cause, OversizedValueError):
                raise self._failed(error) from error
            if len(batch) == 1:
                yield batch[0], memoryview(b"")
                return
            for entry in batch[done:]:  # one of them is too long; which one, shows alone
                yield from self._loaded([entry])

    def remove(self, entries: Sequence[Entry]) -> int:
        """Remove these chunks and their entries."""
        ids = [self._ledger(entry).id(entry.key) for entry in entries]
        remove_ids(self._with_link, self._whole, ids)
        return len(ids)

    def purge(self, tenant: bytes) -> int:
        """Remove every chunk of a tenant, and what the ledger has lost sight of."""
        return self._purged(tenant.hex().encode())

    def purge_all(self) -> int:
        """Remove every chunk, and what the ledger has lost sight of."""
        return self._purged(b"*")

    def _purged(self, owner: bytes) -> int:
        removed = remove_owned(self._with_link, self._whole, owner)
        self._raise_failures()  # also of what came behind the last script
        return removed

    def tier(self, records: RecordFormat, *, capacity_bytes: int | None) -> ImportTier:
        """A Redis tier on this server."""
        return RedisTier(self._url, capacity_bytes=capacity_bytes, records=records, timeout_s=_TIMEOUT_S)

    def limit(self) -> int | None:
        """The ledger's."""
        return self._with_link(self._whole.capacity)

    def set_limit(self, capacity: int) -> None:
        """Set the ledger's."""
        self._with_link(partial(self._whole.set_capacity, capacity=capacity))

    def trim(self) -> Iterator[int]:
        """Evict some chunks in each script."""
        more = True
        while more:
            more, evicted = self._with_link(self._whole.trim)
            yield evicted

    def check_writable(self) -> None:
        """Write a value that ends at once: a replica, or a server that is full, refuses it."""
        (reply,) = self._with_link(lambda link: link.call([(b"SET", self._whole.prefix + b":probe", b"", b"PX", b"1")]))
        if isinstance(reply, ServerError):
            raise self._failed(UnavailableError(reply))

    def close(self) -> None:
        """Close the connections."""
        self._place.close()

    def _with_link(self, work: Callable[[Link], T]) -> T:
        try:
            with self._server.link(self._server.deadline()) as link:
                done = work(link)
        except UnavailableError as error:
            raise self._failed(error) from error
        self._raise_failures()
        return done

    def _raise_failures(self) -> None:
        if self._failures:
            last = self._failures[-1]
            self._failures.clear()
            raise self._failed(last)

    def _ledger(self, entry: Entry) -> Ledger:
        assert entry.tenant is not None  # it is in the entry's name
        return self._ledger_of(entry.tenant, entry.space)

    def _ledger_of(self, tenant: bytes, space: bytes) -> Ledger:
        return Ledger(self._server.prefix, tenant=tenant, space=space, elsewhere=self._elsewhere)

    def _failed(self, error: UnavailableError) -> PlaceError:
        cause = error.cause or "it did not answer before"
        remedy = "look at its rights and limits" if isinstance(cause, ServerError) else "check that it runs"
        return PlaceError(f"{self._place.url} cannot be used ({cause}); {remedy}")


def _batches(entries: Iterable[Entry], size: int) -> Iterator[list[Entry]]:
    left = iter(entries)
    while batch := list(itertools.islice(left, size)):
        yield batch


def _entry(name: bytes, found: tuple[int, int] | None) -> Entry | None:
    """What the ledger says about a chunk; None for one that is being written, or for another program's."""
    try:
        tenant, space, key = (bytes.fromhex(part.decode("ascii")) for part in name.split(b":"))
    except ValueError:
        return None
    return None if found is None else Entry(space, key, tenant, found[0], float(found[1]))
