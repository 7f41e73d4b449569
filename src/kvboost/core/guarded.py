"""Keeps a failing store from failing a request: a cache may only help.

The engine wraps whatever store it is given. Invariant: a store that raises is a miss or a block not kept, a counter
and one warning. So is memory that does not suffice for the copy to be stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Self, TypeVar, cast

import torch

from kvboost.extend import ChunkStore, ContentLease, LayeredStore, Lease
from kvboost.failures import Failures
from kvboost.types import NOTHING_LOADED, Chunk, KVBlock, LoadReport, PutOutcome, Where

T = TypeVar("T")

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

    def __exit__(self, *exception: object) -> None: ...


class JoinedLease(EmptyLease):
    """Two leases as one: the leading chunks of a prompt, and a stored tail after them."""

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
        # By its class: a broken store may raise when it is only looked at.
        self._layered = cast(LayeredStore, store) if issubclass(type(store), LayeredStore) else None
        self._failures = Failures("store")
        self._ask = self._failures.ask

    @property
    def errors(self) -> int:
        """Failures of the store, and blocks that were not stored for lack of memory."""
        return self._failures.total

    def lease(
        self,
        chunks: Sequence[Chunk],
        *,
        arrived: Callable[[Chunk, KVBlock], None] | None = None,
        fetched: LoadReport | None = None,
    ) -> Lease:
        """As the store's own; nothing is held if it fails. The other arguments as :class:`LayeredStore` has them."""
        nothing: Lease = EmptyLease()
        if self._layered is None:
            return self._ask(nothing, lambda: self._store.lease(chunks))
        return self._ask(nothing, self._layered.lease, chunks, arrived=arrived, fetched=fetched)

    def lease_content(self, chunks: Sequence[Chunk], *, after: int, fetched: LoadReport | None = None) -> ContentLease:
        """As the store's own; nothing is held if it fails. ``fetched`` as :class:`LayeredStore` has it."""
        nothing: ContentLease = EmptyLease()
        if self._layered is None:
            return self._ask(nothing, lambda: self._store.lease_content(chunks, after=after))
        return self._ask(nothing, self._layered.lease_content, chunks, after=after, fetched=fetched)

    def uncounted(self) -> AbstractContextManager[None]:
        """Leases of this thread in this ``with`` block are not counted, if the store can leave them out."""
        uncounted = getattr(self._store, "uncounted", None)
        return uncounted() if uncounted is not None else nullcontext()

    def leading_run(self, chunks: Sequence[Chunk]) -> int:
        """How many of ``chunks`` a lease would probably hold, uncounted; all of them if the store cannot tell."""
        count = getattr(self._store, "leading_run", None)
        return len(chunks) if count is None else int(self._ask(0, count, chunks))

    def fetch(self, chunks: Sequence[Chunk]) -> tuple[LoadReport, int]:
        """As :class:`LayeredStore` has it; nothing if it fails, or there are no slower tiers."""
        nothing = NOTHING_LOADED, 0
        return nothing if self._layered is None else self._ask(nothing, self._layered.fetch, chunks)

    def fetch_content(self, chunks: Sequence[Chunk], *, after: int) -> LoadReport:
        """As :class:`LayeredStore` has it; nothing if it fails, or there are no slower tiers."""
        if self._layered is None:
            return NOTHING_LOADED
        return self._ask(NOTHING_LOADED, self._layered.fetch_content, chunks, after=after)

    def in_background(self, work: Callable[[], T], *, tenant: str, nothing: Future[T]) -> Future[T] | None:
        """As :class:`LayeredStore` has it; ``nothing`` if it fails, or there are no slower tiers."""
        if self._layered is None:
            return nothing
        otherwise: Future[T] | None = nothing
        return self._ask(otherwise, self._layered.in_background, work, tenant=tenant)

    def first_stored(self, chunks: Sequence[Chunk], *, where: Where = "near") -> Chunk | None:
        """The first of ``chunks`` that is stored there; None if none is, or the store cannot tell."""
        contains = getattr(self._store, "contains", None)
        if contains is None or not chunks:
            return None
        keys = [chunk.prefix_key for chunk in chunks]
        given = {"where": where, "tenant": chunks[0].tenant} if self._layered is not None else {}
        found = self._ask(None, lambda: _for_each(chunks, contains(keys, **given)))
        return next((chunk for chunk, there in zip(chunks, found or (), strict=False) if there), None)

    def contains_content(self, chunks: Sequence[Chunk]) -> Sequence[bool]:
        """Which of these are probably stored somewhere. Queries slower tiers without loading."""
        layered = self._layered
        if layered is not None:
            return self._ask([False] * len(chunks), lambda: _for_each(chunks, layered.contains_content(chunks)))
        with self.lease_content(chunks, after=0) as lease:
            found = [block is not None for block in lease.blocks]
            return found + [False] * (len(chunks) - len(found))

    def put(self, block: KVBlock) -> PutOutcome:
        """As the store's own; REFUSED if it fails."""
        return self._ask(PutOutcome.REFUSED, lambda: self._store.put(block))

    def keep(self, make: Callable[[], KVBlock]) -> PutOutcome:
        """Put the block that ``make`` copies out of a cache; REFUSED if there is no memory for the copy."""
        block = self.copied(make)
        return PutOutcome.REFUSED if block is None else self.put(block)

    def copied(self, make: Callable[[], T]) -> T | None:
        """What ``make`` copies out of a cache to be stored; None if there is no memory for the copy."""
        try:
            return make()
        except _OUT_OF_MEMORY as error:
            if self._failures.count("no memory for a copy"):
                _log.warning(
                    "KV was not stored, there is no memory for a copy of it: %s; lower cache_bytes or workspace_bytes. "
                    "Further cases are only counted (cache_stats()['store_errors'])",
                    error,
                )
            return None

    def used(self, chain: Sequence[bytes]) -> None:
        """As the store's own."""
        self._ask(None, lambda: self._store.used(chain))


def _for_each(chunks: Sequence[Chunk], found: Sequence[bool]) -> Sequence[bool]:
    if len(found) != len(chunks):
        raise ValueError(f"the store answered for {len(found)} of {len(chunks)} chunks")
    return found
