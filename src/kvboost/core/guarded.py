"""Keeps a failing store from failing a request: a cache may only help.

The engine wraps whatever store it is given. A store that raises is a miss (or a block not kept), a
counter and one warning. So is memory that does not suffice for the copy to be stored.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Self

import torch

from kvboost.extend import ChunkStore, ContentLease, LayeredStore, Lease
from kvboost.types import NOTHING_LOADED, Chunk, KVBlock, LoadReport, PutOutcome

_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)

_log = logging.getLogger(__name__)


def loads_of(lease: Lease | ContentLease) -> LoadReport:
    """The lease's report of the tiers its blocks came from; most stores have none."""
    loads = getattr(lease, "loads", None)
    return loads if isinstance(loads, LoadReport) else NOTHING_LOADED


def joined_loads(one: LoadReport, other: LoadReport) -> LoadReport:
    """The report of two lookups for one prompt."""
    return LoadReport(
        {**one.tiers, **other.tiers}, one.declined + other.declined, {**one.declined_at, **other.declined_at}
    )


class EmptyLease:
    """The lease of a lookup that found nothing, or failed."""

    @property
    def blocks(self) -> Sequence[KVBlock]:
        """No blocks."""
        return []

    def release(self) -> None:
        """Nothing to release."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class JoinedLease(EmptyLease):
    """Two leases as one: the leading chunks of a prompt, and a stored tail behind them."""

    def __init__(self, first: Lease, second: Lease) -> None:
        self._leases = (first, second)
        self.loads = joined_loads(loads_of(first), loads_of(second))

    @property
    def blocks(self) -> Sequence[KVBlock]:
        """The blocks of both."""
        return [block for lease in self._leases for block in lease.blocks]

    def release(self) -> None:
        """Release both."""
        for lease in self._leases:
            lease.release()


class ReleasedLease(EmptyLease):
    """A lease whose blocks were copied and are not held any more."""

    def __init__(self, loads: LoadReport) -> None:
        self.loads = loads


class GuardedStore:
    """The part of a store that requests use, with every failure turned into a miss."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.errors = 0
        """Failures of the store, and blocks that were not stored for lack of memory."""
        self._short_of_memory = False

    def lease(
        self,
        chunks: Sequence[Chunk],
        *,
        arrived: Callable[[Chunk, KVBlock], None] | None = None,
        fetched: LoadReport | None = None,
    ) -> Lease:
        """As the store's own; nothing is held if it fails. The other arguments as :class:`LayeredStore` has them."""
        try:
            if isinstance(self._store, LayeredStore):
                return self._store.lease(chunks, arrived=arrived, fetched=fetched)
            return self._store.lease(chunks)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, the request continues
            self._failed(error)
            return EmptyLease()

    def uncounted(self) -> AbstractContextManager[None]:
        """Leases of this thread in this ``with`` block are not counted, if the store can leave them out."""
        uncounted = getattr(self._store, "uncounted", None)
        return uncounted() if uncounted is not None else nullcontext()

    def leading_run(self, chunks: Sequence[Chunk]) -> int:
        """How many of ``chunks`` a lease would probably hold, uncounted; all of them if the store cannot tell."""
        count = getattr(self._store, "leading_run", None)
        if count is None:
            return len(chunks)
        try:
            return int(count(chunks))
        except Exception as error:  # noqa: BLE001 - whatever a store raises, the request continues
            self._failed(error)
            return 0

    def fetch(self, chunks: Sequence[Chunk]) -> tuple[LoadReport, int]:
        """As :class:`LayeredStore` has it; nothing if it fails, or there are no slower tiers."""
        try:
            if isinstance(self._store, LayeredStore):
                return self._store.fetch(chunks)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, the request continues
            self._failed(error)
        return NOTHING_LOADED, 0

    def fetch_content(self, chunks: Sequence[Chunk], *, after: int) -> LoadReport:
        """As :class:`LayeredStore` has it; nothing if it fails, or there are no slower tiers."""
        try:
            if isinstance(self._store, LayeredStore):
                return self._store.fetch_content(chunks, after=after)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, the request continues
            self._failed(error)
        return NOTHING_LOADED

    def first_stored(self, chunks: Sequence[Chunk], *, in_memory: bool = False) -> Chunk | None:
        """The first of ``chunks`` that is stored near by; None if none is, or the store cannot tell."""
        contains = getattr(self._store, "contains", None)
        if contains is None:
            return None
        if chunks and isinstance(self._store, LayeredStore):
            contains = partial(contains, in_memory=in_memory, tenant=chunks[0].tenant)
        try:
            found = contains([chunk.prefix_key for chunk in chunks])
            return next((chunk for chunk, there in zip(chunks, found, strict=True) if there), None)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, the request continues
            self._failed(error)
            return None

    def lease_content(self, chunks: Sequence[Chunk], *, after: int, fetched: LoadReport | None = None) -> ContentLease:
        """As the store's own; nothing is held if it fails. ``fetched`` as :class:`LayeredStore` has it."""
        try:
            if isinstance(self._store, LayeredStore):
                return self._store.lease_content(chunks, after=after, fetched=fetched)
            return self._store.lease_content(chunks, after=after)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, the request continues
            self._failed(error)
            return EmptyLease()

    def put(self, block: KVBlock) -> PutOutcome:
        """As the store's own; REFUSED if it fails."""
        try:
            return self._store.put(block)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, the request continues
            self._failed(error)
            return PutOutcome.REFUSED

    def keep(self, make: Callable[[], KVBlock]) -> PutOutcome:
        """Put the block that ``make`` copies out of a cache; REFUSED if there is no memory for the copy."""
        try:
            block = make()
        except _OUT_OF_MEMORY as error:
            with self._lock:
                self.errors += 1
                first, self._short_of_memory = not self._short_of_memory, True
            if first:
                _log.warning(
                    "KV was not stored, there is no memory for a copy of it: %s; lower cache_bytes or workspace_bytes. "
                    "Further cases are only counted (cache_stats()['store_errors'])",
                    error,
                )
            return PutOutcome.REFUSED
        return self.put(block)

    def used(self, chain: Sequence[bytes]) -> None:
        """As the store's own."""
        try:
            self._store.used(chain)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, the request continues
            self._failed(error)

    def contains_content(self, chunks: Sequence[Chunk]) -> Sequence[bool]:
        """Which of these are probably stored somewhere. Queries slower tiers without loading."""
        if isinstance(self._store, LayeredStore):
            try:
                found = self._store.contains_content(chunks)
                if len(found) != len(chunks):
                    raise ValueError(f"the store answered for {len(found)} of {len(chunks)} chunks")
                return found
            except Exception as error:  # noqa: BLE001 - whatever a store raises, the request continues
                self._failed(error)
                return [False] * len(chunks)
        with self.lease_content(chunks, after=0) as lease:
            found = [block is not None for block in lease.blocks]
            return found + [False] * (len(chunks) - len(found))

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self.errors += 1
            first = self.errors == 1
        if first:
            warnings.warn(
                f"the store failed and is treated as empty for this request: {error!r}; "
                "further failures are only counted (cache_stats()['store_errors'])",
                RuntimeWarning,
                stacklevel=4,
            )
