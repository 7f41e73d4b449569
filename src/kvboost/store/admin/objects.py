"""The records of a bucket, by listing it.

Used by ``kvboost cache``. Invariant: no object is read beyond the largest record's length. A listing of millions of
objects takes minutes: a thousand names come per request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kvboost.errors import PlaceError
from kvboost.store.admin.base import MAX_RECORD_BYTES, Catalogue, Entry, head_of
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.buckets import CAPACITY, PROBE, open_objects, read_limit, tenants_in
from kvboost.store.tiers.s3 import ObjectTier

_TIMEOUT_S = 60.0
_NAME = re.compile(r"([0-9a-f]{64})/([0-9a-f]{32})/records/([0-9a-f]{64})\.kv")
_AT_ONCE = 1000  # names in one request

T = TypeVar("T")


class ObjectCatalogue(Catalogue):
    """A bucket, or a folder in it, that object tiers share."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for an URL that cannot work. Access is by the environment's ``AWS_*``."""
        super().__init__(url)
        self._objects, self._failures = open_objects(url, timeout_s=_TIMEOUT_S)

    def entries(self) -> Iterator[Entry]:
        """Every object with a record's name."""
        for found in self._listed(None):
            match = _NAME.fullmatch(found["path"])
            if match is not None:
                tenant, space, key = (bytes.fromhex(part) for part in match.groups())
                yield Entry(space, key, tenant, found["size"], found["last_modified"].timestamp())

    def _listed(self, prefix: str | None) -> Iterator[Mapping[str, Any]]:
        try:
            for page in self._objects.list(prefix, chunk_size=_AT_ONCE):
                yield from page
        except (*self._failures.absent, *self._failures.all) as error:  # absent: there is no such bucket
            raise self._failed(error) from error

    def _head(self, entry: Entry) -> bytes | None:
        def read(length: int) -> bytes:
            return bytes(self._objects.get_range(_path(entry), start=0, length=min(length, entry.size)))

        return self._asked(lambda: head_of(read)) if entry.size else b""

    def _record(self, entry: Entry) -> memoryview | None:
        def read() -> memoryview:
            found = self._objects.get(_path(entry))
            return memoryview(found.bytes() if found.meta["size"] <= MAX_RECORD_BYTES else b"")

        return self._asked(read)

    def remove(self, entries: Sequence[Entry]) -> int:
        """Remove these objects. What names them by their content goes when a tier meets it."""
        self._delete([_path(entry) for entry in entries])
        return len(entries)

    def purge(self, tenant: bytes) -> int:
        """Remove every object of a tenant."""
        names = [found["path"] for found in self._listed(tenant.hex())]
        self._delete(names)
        return sum(_NAME.fullmatch(name) is not None for name in names)

    def purge_all(self) -> int:
        """Remove every tenant's objects."""
        tenants = self._asked(lambda: tenants_in(self._objects)) or []
        return sum(self.purge(bytes.fromhex(tenant)) for tenant in tenants)

    def _delete(self, names: Sequence[str]) -> None:
        for begin in range(0, len(names), _AT_ONCE):
            batch = list(names[begin : begin + _AT_ONCE])
            self._asked(partial(self._objects.delete, batch))

    def tier(self, records: RecordFormat, *, capacity_bytes: int | None) -> ObjectTier:
        """An object tier in this bucket."""
        return ObjectTier(self.place, records=records, capacity_bytes=capacity_bytes, timeout_s=_TIMEOUT_S)

    def limit(self) -> int | None:
        """Of one model and tenant."""
        return self._asked(lambda: read_limit(self._objects, self._failures))

    def set_limit(self, capacity: int) -> None:
        """Set it for one model and tenant. Tiers read it when they are opened."""
        self._asked(lambda: self._objects.put(CAPACITY, b"%d" % capacity))

    def check_writable(self) -> None:
        """Write the empty object that tiers look for to see that the store answers."""
        try:
            self._objects.put(PROBE, b"")
        except (*self._failures.absent, *self._failures.all) as error:  # absent: there is no such bucket
            raise self._failed(error) from error

    def _asked(self, work: Callable[[], T]) -> T | None:
        """The store's answer; None for an object that is not there."""
        try:
            return work()
        except self._failures.absent:
            return None
        except self._failures.all as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> PlaceError:
        told = " ".join(str(error).split())[:300]
        return PlaceError(
            f"{self.place} cannot be used ({told}); check the bucket, the network and the AWS_*, GOOGLE_* or AZURE_* "
            "variables"
        )


def _path(entry: Entry) -> str:
    assert entry.tenant is not None  # it is in the entry's name
    return f"{entry.tenant.hex()}/{entry.space.hex()}/records/{entry.key.hex()}.kv"
