"""The records of a Redis or Valkey server, or of a cluster, by a scan of their names.

Used by ``kvboost cache``. Invariant: no length that the server or a record names is believed beyond the largest
record's. A Mooncake Store tells no names: it can be purged, and nothing of it is listed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

from kvboost.errors import PlaceError
from kvboost.store.admin.base import MAX_RECORD_BYTES, Catalogue, Entry, head_of
from kvboost.store.tiers.mooncake import giving_nothing
from kvboost.store.tiers.redis.tier import PREFIX, open_values
from kvboost.store.tiers.redis.values import FORMAT, RedisValues
from kvboost.store.tiers.remote import Patience, RefusedError, UnavailableError

_TIMEOUT_S = 30.0
_AT_ONCE = 64


class RedisCatalogue(Catalogue):
    """A server that Redis tiers share."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for an URL that cannot work, PlaceError if nobody answers there."""
        self._url = giving_nothing(url)
        patience = Patience(_TIMEOUT_S, min_bytes_per_s=1e6)
        self._values = open_values(
            self._url, prefix=PREFIX, patience=patience, ttl_ms=None, report=self._report, warns=False
        )
        super().__init__(self._values.place)
        try:
            self._values.open()
            if not self._values.is_available:
                self._report(UnavailableError(None))
        except PlaceError:
            self.close()
            raise

    def entries(self) -> Iterator[Entry]:
        """Every record. When one was last used is not known where the server evicts by how often, not when."""
        seen: set[bytes] = set()  # a scan may name one twice
        values = self._listed()
        with self._used():
            for names in values.records():
                new = [name for name in names if name not in seen]
                seen.update(new)
                commands = [command for name in new for command in (("OBJECT", "IDLETIME", name), ("STRLEN", name))]
                replies = values.run(commands)
                for name, size, idle in zip(new, replies[1::2], replies[::2], strict=True):
                    with suppress(ValueError):  # another program's name
                        tenant, space, key = (bytes.fromhex(part.decode()) for part in name.split(b":")[2:])
                        if isinstance(size, int) and size:
                            used_at = time.time() - idle if isinstance(idle, int) else None
                            yield Entry(space, key, tenant, size, used_at)

    def _head(self, entry: Entry) -> bytes | None:
        return head_of(partial(self._first_bytes, entry)) or None

    def _first_bytes(self, entry: Entry, length: int) -> bytes:
        command = ("GETRANGE", _name(entry), 0, length - 1)
        with self._used():
            (reply,) = self._listed().run([command])
        return reply if isinstance(reply, bytes) else b""

    def records(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, memoryview | None]]:
        """Each value. Many are asked for at once."""
        left = iter(entries)
        while batch := list(itertools.islice(left, _AT_ONCE)):
            names = [_name(entry) for entry in batch]
            yield from zip(batch, self._values.load(names, max_bytes=MAX_RECORD_BYTES), strict=True)

    def _record(self, entry: Entry) -> memoryview | None:
        ((_, value),) = self.records([entry])
        return value

    def remove(self, entries: Sequence[Entry]) -> int:
        """Remove these values."""
        self._values.remove([_name(entry) for entry in entries])
        return len(entries)

    def purge(self, tenant: bytes | None) -> int:
        """Remove every record of a tenant, or of all."""
        with self._used():
            return self._values.purge("" if tenant is None else tenant.hex())

    def check_writable(self) -> None:
        """Write a value that ends at once: a replica, or a server that is full, refuses it."""
        if isinstance(self._values, RedisValues):
            self._values.change([("SET", f"{PREFIX}:probe", "", "PX", 1)])

    def close(self) -> None:
        """Close the connections."""
        super().close()
        self._values.close()

    def _listed(self) -> RedisValues:
        if not isinstance(self._values, RedisValues):
            raise PlaceError(f"{self.place} does not tell what it holds; it can only be purged")
        return self._values

    @contextmanager
    def _used(self) -> Iterator[None]:
        """In this ``with`` block, what the server fails with is a PlaceError."""
        try:
            yield
        except UnavailableError as error:
            self._report(error)

    def _report(self, error: UnavailableError) -> NoReturn:
        """Raise what a tier would only count."""
        cause = error.cause or "it did not answer before"
        remedy = (
            "look at its rights and limits"
            if isinstance(cause, RefusedError)
            else "check that it runs, and user, password and database"
        )
        raise PlaceError(f"{self._values.place} cannot be used ({cause}); {remedy}") from error


def _name(entry: Entry) -> str:
    assert entry.tenant is not None  # it is in the record's name
    return f"{PREFIX}:{FORMAT}:{entry.tenant.hex()}:{entry.space.hex()}:{entry.key.hex()}"
