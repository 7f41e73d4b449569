"""The records of a Redis or Valkey server, or of a cluster, by a scan of their names.

Used by ``kvboost cache``. Invariant: no length that the server or a record names is believed beyond the largest
record's. A Mooncake Store tells no names: it can be imported into and purged, and nothing of it is listed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvboost.errors import ConfigError, PlaceError
from kvboost.store.admin.base import MAX_RECORD_BYTES, Catalogue, Entry, head_of
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.mooncake import giving_nothing
from kvboost.store.tiers.redis.tier import PREFIX, RedisTier, open_values
from kvboost.store.tiers.redis.values import FORMAT, RedisValues
from kvboost.store.tiers.remote import Patience, RefusedError, UnavailableError

_TIMEOUT_S = 30.0
_AT_ONCE = 64

T = TypeVar("T")


class RedisCatalogue(Catalogue):
    """A server that Redis tiers share."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for an URL that cannot work, PlaceError if nobody answers there."""
        self._url = giving_nothing(url)
        self._failures: list[UnavailableError] = []
        patience = Patience(_TIMEOUT_S, min_bytes_per_s=1e6)
        report = self._failures.append
        self._values = open_values(self._url, prefix=PREFIX, patience=patience, ttl_ms=None, report=report, warns=False)
        super().__init__(self._values.place)
        self._values.open()
        if self._failures or not self._values.is_available:
            self.close()
            raise self._failed(self._failures[-1] if self._failures else UnavailableError(None))

    def entries(self) -> Iterator[Entry]:
        """Every record. When one was last used is not known where the server evicts by how often, not when."""
        seen: set[bytes] = set()  # a scan may name one twice
        values = self._listed()
        for names in self._paged(values.records()):
            new = [name for name in names if name not in seen]
            seen.update(new)
            commands = [command for name in new for command in (("OBJECT", "IDLETIME", name), ("STRLEN", name))]
            replies = self._done(partial(values.run, commands))
            for name, size, idle in zip(new, replies[1::2], replies[::2], strict=True):
                with suppress(ValueError):  # another program's name
                    tenant, space, key = (bytes.fromhex(part.decode()) for part in name.split(b":")[2:])
                    if isinstance(size, int) and size:
                        yield Entry(space, key, tenant, size, time.time() - idle if isinstance(idle, int) else None)

    def _head(self, entry: Entry) -> bytes | None:
        return head_of(partial(self._first_bytes, entry)) or None

    def _first_bytes(self, entry: Entry, length: int) -> bytes:
        command = ("GETRANGE", _name(entry), 0, length - 1)
        (reply,) = self._done(lambda: self._listed().run([command]))
        return reply if isinstance(reply, bytes) else b""

    def records(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, memoryview | None]]:
        """Each value. Many are asked for at once."""
        left = iter(entries)
        while batch := list(itertools.islice(left, _AT_ONCE)):
            names = [_name(entry) for entry in batch]
            for entry, value in zip(batch, self._values.load(names, max_bytes=MAX_RECORD_BYTES), strict=True):
                self._raise_failures()
                yield entry, value

    def _record(self, entry: Entry) -> memoryview | None:
        ((_, value),) = self.records([entry])
        return value

    def remove(self, entries: Sequence[Entry]) -> int:
        """Remove these values."""
        self._done(lambda: self._values.remove([_name(entry) for entry in entries]))
        return len(entries)

    def purge(self, tenant: bytes) -> int:
        """Remove every record of a tenant, also in the formats of earlier versions."""
        return self._done(lambda: self._values.purge(tenant.hex()))

    def purge_all(self) -> int:
        """Remove every record, also in the formats of earlier versions."""
        return self._done(lambda: self._values.purge(""))

    def purge_outdated(self) -> int:
        """Remove what earlier versions left: their values, and the ledger that counted them."""
        return self._done(lambda: self._listed().purge("", outdated=True))

    def tier(self, records: RecordFormat, *, capacity_bytes: int | None) -> RedisTier:
        """A Redis tier on this server."""
        if capacity_bytes is not None:
            raise self._own_limit()
        return RedisTier(self._url, records=records, timeout_s=_TIMEOUT_S)

    def limit(self) -> int | None:
        """The server's own."""
        return self._values.capacity_bytes

    def set_limit(self, capacity: int) -> None:
        """Raises ConfigError: the limit is the server's own."""
        raise self._own_limit()

    def _own_limit(self) -> ConfigError:
        return ConfigError(
            f"the limit of {self.place} is its own; set it there (Redis: maxmemory, maxmemory-policy allkeys-lru)"
        )

    def check_writable(self) -> None:
        """Write a value that ends at once: a replica, or a server that is full, refuses it."""
        if isinstance(self._values, RedisValues):
            values, command = self._values, ("SET", f"{PREFIX}:probe", "", "PX", 1)
            self._done(lambda: values.change([command]))

    def close(self) -> None:
        """Close the connections."""
        super().close()
        self._values.close()

    def _listed(self) -> RedisValues:
        if not isinstance(self._values, RedisValues):
            raise PlaceError(f"{self.place} does not tell what it holds; it can be purged, and imported into")
        return self._values

    def _done(self, work: Callable[[], T]) -> T:
        try:
            done = work()
        except UnavailableError as error:
            raise self._failed(error) from error
        self._raise_failures()
        return done

    def _paged(self, pages: Iterator[T]) -> Iterator[T]:
        try:
            yield from pages
        except UnavailableError as error:
            raise self._failed(error) from error

    def _raise_failures(self) -> None:
        last = self._failures[-1:]  # several heads are read at once
        self._failures.clear()
        for error in last:
            raise self._failed(error)

    def _failed(self, error: UnavailableError) -> PlaceError:
        cause = error.cause or "it did not answer before"
        remedy = (
            "look at its rights and limits"
            if isinstance(cause, RefusedError)
            else "check that it runs, and user, password and database"
        )
        return PlaceError(f"{self.place} cannot be used ({cause}); {remedy}")


def _name(entry: Entry) -> str:
    assert entry.tenant is not None  # it is in the record's name
    return f"{PREFIX}:{FORMAT}:{entry.tenant.hex()}:{entry.space.hex()}:{entry.key.hex()}"
