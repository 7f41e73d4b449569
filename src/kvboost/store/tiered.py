"""A memory store with slower tiers below it: looks through all of them, brings up what pays, writes behind.

Made by the engine where a disk directory or a remote is given; used like any other store. Invariants: requests only
ever get blocks that lie in the memory store, so its ledger and its leases hold for them; what a tier does wrong is a
miss; writing never makes a request wait; what one request is loading, another waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvboost.extend import ContentLease, Lease, StoreListener, TellingTier, Tier
from kvboost.store.counters import Counters, TierCalls, TierWork
from kvboost.store.lookup import Background, Loader, LoadRules, Lookup, left_of
from kvboost.store.memory import MemoryStore
from kvboost.store.write_behind import Unsaved, WriteBehind
from kvboost.streams import BlockingStreams, Streams
from kvboost.types import BlockInfo, Chunk, HotChunk, KVBlock, LoadReport, PutOutcome, StoreStats, Where

T = TypeVar("T")

_LOCAL = ("host", "disk")  # tiers that answer without a round trip
_LOAD_ALWAYS = LoadRules()


class _Tenant:
    """Where one tenant's records lie, and what was counted of them."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        self.lasting = tuple(tier for tier in tiers if tier.outlives_process)
        self.overflow = tuple(tier for tier in tiers if not tier.outlives_process)
        self.background = Background()  # of its own, so that none waits for what another loads
        self.unsaved = Unsaved()
        self.below: tuple[StoreStats, ...] = ()  # as the tiers were last asked
        self.declined = self.rejected = 0


class TieredStore:
    """Blocks in memory, with ``tiers`` below, fastest first."""

    def __init__(
        self,
        memory: MemoryStore,
        tiers: Sequence[Tier],
        *,
        rules: LoadRules = _LOAD_ALWAYS,
        streams: Streams | None = None,
        waiting_bytes: int = 512 * 2**20,
    ) -> None:
        """Own ``memory`` and ``tiers`` from now on: they are closed with this store.

        At most ``waiting_bytes`` wait to be written. ``streams`` are those of the device that the blocks lie on.
        """
        self._memory = memory
        self._streams = streams if streams is not None else BlockingStreams()
        self._own = _Tenant(tiers)
        self._tenants: dict[str, _Tenant] = {}
        self._closed = _Tenant(())  # what a request of a closed tenant still stores goes to nobody's records
        self._lock = threading.Lock()
        self._calls = TierCalls(tier.name for tier in tiers)
        self._ask = self._calls.ask
        self._listener: StoreListener | None = None
        self._writer = WriteBehind(
            waiting_bytes,
            streams=self._streams,
            failed=self._calls.failed,
            tried=lambda block, kept: self._of(block.tenant).unsaved.tried(block, kept),
            offered=self._was_offered,
        )
        self._loader = Loader(
            memory, self._calls, rules=rules, streams=self._streams, save=self._save, missing=self._missing
        )
        memory.on_evict = self._demote
        memory.selective = False  # what is loaded must pass through it, and what is new goes down from it

    def open(self, tenant: str, tiers: Sequence[Tier]) -> None:
        """From now on this tenant's blocks go to ``tiers``, and are counted by themselves."""
        self._memory.open(tenant)
        with self._lock:
            self._tenants[tenant] = _Tenant(tiers)

    def _of(self, tenant: str | None) -> _Tenant:
        others = self._own if self._memory.owner in (None, tenant) else self._closed
        return self._own if tenant is None else self._tenants.get(tenant, others)

    def _all(self, tenant: str | None) -> list[_Tenant]:
        return [self._own, *list(self._tenants.values())] if tenant is None else [self._of(tenant)]

    def listen(self, listener: StoreListener) -> None:
        """Tell ``listener`` what the memory holds, and from now on what it and the tiers below gain and lose."""
        self._listener = listener
        for tier in self._own.tiers:
            if isinstance(tier, TellingTier):
                tier.on_remove(partial(self._missing, tier))
        self._memory.listen(listener)

    def _listener_of(self, tier: Tier) -> StoreListener | None:
        """Who listens to a tier. One that does not report what it removes would be believed for ever."""
        return self._listener if isinstance(tier, TellingTier) else None

    def _missing(self, tier: Tier, key: bytes) -> None:
        """A tier has this block no more, or said that it has it: another process may have evicted it."""
        if (listener := self._listener_of(tier)) is not None:
            listener.removed(tier.name, [key])

    def uncounted(self) -> AbstractContextManager[None]:
        """As :meth:`MemoryStore.uncounted`; the tiers count their loads all the same."""
        return self._memory.uncounted()

    def lease(
        self,
        chunks: Sequence[Chunk],
        *,
        arrived: Callable[[Chunk, KVBlock], None] | None = None,
        fetched: LoadReport | None = None,
    ) -> Lease:
        """Hold the longest leading run of ``chunks``, wherever it lies, as far as loading it pays.

        ``arrived`` is called with every block that came up from a tier, while the next ones are still on their way.
        Such a block is whole and checked, but only the lease says whether it is held in the end. ``fetched`` is what
        :meth:`fetch` did for these before: then only the memory is looked at, and no tier is waited for.
        """
        lookup = Lookup(arrived)
        if fetched is None:
            self._bring_up(chunks, lookup)
        lease = self._memory.lease(chunks)
        self._streams.join()  # also what was prefetched may still be on its way
        left = {chunk.start for chunk in chunks[len(lease.blocks) :]}
        lease.loads = left_of(fetched, left) if fetched is not None else lookup.report(left)
        return lease

    def lease_content(self, chunks: Sequence[Chunk], *, after: int, fetched: LoadReport | None = None) -> ContentLease:
        """Hold, for each of ``chunks[after:]``, the best-fitting block, wherever it lies.

        ``fetched`` is what :meth:`fetch_content` did for these before: then only the memory is looked at.
        """
        lookup = Lookup()
        if fetched is None:
            self._bring_up(chunks, lookup, after=after)
        lease = self._memory.lease_content(chunks, after=after)
        self._streams.join()
        blocks = zip(chunks[after:], lease.blocks, strict=True)
        left = {chunk.start for chunk, block in blocks if block is None}
        lease.loads = left_of(fetched, left) if fetched is not None else lookup.report(left)
        return lease

    def fetch(self, chunks: Sequence[Chunk]) -> tuple[LoadReport, int]:
        """Bring the longest leading run of ``chunks`` up into memory, and say how many of them are there now.

        Holds and counts nothing: what comes up is the most recent there is, and may be evicted for others.
        """
        lookup = Lookup()
        self._bring_up(chunks, lookup)
        known = self._memory.leading_run(chunks)
        return lookup.report({chunk.start for chunk in chunks[known:]}), known

    def fetch_content(self, chunks: Sequence[Chunk], *, after: int) -> LoadReport:
        """Bring up, for each of ``chunks[after:]`` that is nowhere in memory, the best-fitting block."""
        lookup = Lookup()
        self._bring_up(chunks, lookup, after=after)
        return lookup.report({chunk.start for chunk in chunks})

    def in_background(self, work: Callable[[], T], *, tenant: str = "") -> Future[T] | None:
        """Run ``work``, which may wait for a tier, on the thread that loads ahead; None if too much waits already."""
        return self._of(tenant).background.run(work)

    def leading_run(self, chunks: Sequence[Chunk]) -> int:
        """How many of ``chunks`` a lease would probably hold. Loads nothing and counts nothing."""
        known = self._memory.leading_run(chunks)
        for tier in self._of(_tenant(chunks)).tiers:
            if known < len(chunks):
                known += self._loader.leading_run(tier, [chunk.prefix_key for chunk in chunks[known:]])
        return known

    def contains(self, keys: Sequence[bytes], *, where: Where = "near", tenant: str = "") -> list[bool]:
        """Which of these are there: near is this machine's memory and disk, without a round trip to a server."""
        found = self._memory.contains(keys)
        for tier in self._of(tenant).tiers if where != "memory" else ():
            if where == "anywhere" or tier.name in _LOCAL:
                there: Sequence[bool] = self._ask(tier, [False] * len(keys), tier.contains, keys)
                found = [one or other for one, other in zip(found, there, strict=True)]
        return found

    def contains_content(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Which of these are probably stored in some tier, at whatever position. Loads nothing."""
        missing = {chunks[index].content_key for index in self._memory.unknown_content(chunks)}
        for tier in self._of(_tenant(chunks)).tiers:
            keys = list(missing)
            nothing: Sequence[Sequence[BlockInfo]] = [()] * len(keys)
            found = self._ask(tier, nothing, tier.variants, keys)
            # A list of chunks may outlive them, where it lies on a server.
            newest = {key: variants[-1].key for key, variants in zip(keys, found, strict=True) if variants}
            there: Sequence[bool] = self._ask(tier, [False] * len(newest), tier.contains, list(newest.values()))
            missing -= {key for key, is_there in zip(newest, there, strict=True) if is_there}
        return [chunk.content_key not in missing for chunk in chunks]

    def put(self, block: KVBlock) -> PutOutcome:
        """Keep ``block`` in memory, and write it behind to the tiers that outlive the process."""
        if block.ready is None and (ready := self._streams.event()) is not None:
            block = replace(block, ready=ready)  # it is written down by another thread, maybe when it was evicted
        outcome = self._memory.put(block)
        if outcome is PutOutcome.STORED:
            self._loader.note_size(block)
            self._save(block, self._of(block.tenant).lasting)
        return outcome

    def used(self, chain: Sequence[bytes]) -> None:
        """Tell every tier that these keys served one prompt; the slower ones after the request."""
        self._memory.used(chain)
        # What was found by its content need not have its beginning here.
        held = self._memory.blocks(chain[:1]) or self._memory.blocks(chain)
        for tier in self._of(held[0].tenant).tiers if held else ():
            self._writer.note(held[0].tenant, tier, partial(self._note_used, tier, chain))

    def _note_used(self, tier: Tier, chain: Sequence[bytes]) -> None:
        """In the thread that writes: what the tier has lost meanwhile is written again, others would miss it."""
        lost: Sequence[bytes] | None = self._ask(tier, None, tier.used, chain)
        for block in self._memory.blocks(lost or ()):
            self._save(block, [tier])

    def flush(self, tenant: str | None = None) -> None:
        """Return once everything kept so far, or all of one tenant, is as safe as the tiers make it."""
        self._writer.wait(tenant)
        for each in self._all(tenant):
            # What did not fit into the queue is still in memory, unless it was demoted since.
            for block in self._memory.blocks(each.unsaved.keys()):
                self._writer.wait(tenant)
                self._save(block, each.lasting)
        self._writer.wait(tenant)
        for each in self._all(tenant):
            for tier in each.lasting:
                self._ask(tier, None, tier.flush)

    def hottest(self, limit: int) -> list[HotChunk]:
        """The blocks in memory that were leased most often, first the hottest."""
        return self._memory.hottest(limit)

    def held_keys(self, limit: int) -> list[tuple[bytes, bytes]]:
        """Key and content key of the blocks in memory; the most used if there are more."""
        return self._memory.held_keys(limit)

    def clear(self, tenant: str | None = None) -> None:
        """Forget every block in every tier, or those of one tenant."""
        self._writer.forget(tenant)
        self._memory.clear(tenant)
        for each in self._all(tenant):
            each.unsaved.clear()
            for tier in each.tiers:
                self._ask(tier, None, tier.clear)

    def stats(self, tenant: str | None = None, *, ask_tiers: bool = True) -> StoreStats:
        """The memory store's, and below it the tiers': of one tenant, or of the store's own.

        Without ``ask_tiers`` those as last asked: that does no I/O.
        """
        stats, of = self._memory.stats(tenant), self._of(tenant)
        if ask_tiers:
            of.below = tuple(
                self._ask(tier, Counters().stats(tier.name, chunks=0, nbytes=0, capacity_bytes=0), tier.stats)
                for tier in of.tiers
            )
        dropped, unsaved = of.unsaved.counts()
        return replace(
            stats,
            rejected=stats.rejected + of.rejected,
            below=of.below,
            loads_declined=of.declined,
            writes_dropped=dropped,
            waiting_bytes=self._writer.waiting_bytes(tenant),
            unsaved=unsaved,
        )

    def work(self) -> dict[str, TierWork]:
        """What each tier has done, by its name. Asks no tier."""
        return self._calls.work()

    def close(self, tenant: str | None = None) -> None:
        """Write what waits, then close every tier, or those of one tenant, which was opened."""
        for each in self._all(tenant):
            each.background.close()
        self.flush(tenant)
        if tenant is None:
            self._writer.close()
        for each in reversed(self._all(tenant)):  # the store's own last: theirs are over its connections
            for tier in each.tiers:
                self._ask(tier, None, tier.close)
        self._memory.close(tenant)
        with self._lock:
            self._tenants = {} if tenant is None else {n: each for n, each in self._tenants.items() if n != tenant}

    def _bring_up(self, chunks: Sequence[Chunk], lookup: Lookup, *, after: int | None = None) -> None:
        """Load the leading chunks, or with ``after`` the later ones by their content."""
        of = self._of(_tenant(chunks))
        if after is None:
            self._loader.run(of.tiers, chunks, lookup)
        else:
            self._loader.content(of.tiers, chunks, after, lookup)
        with self._lock:
            of.declined += lookup.declined
            of.rejected += lookup.rejected

    # Writing down

    def _save(self, block: KVBlock, tiers: Sequence[Tier]) -> None:
        if tiers and not self._offered(block, tiers):
            self._of(block.tenant).unsaved.remember(block.key)

    def _offered(self, block: KVBlock, tiers: Sequence[Tier]) -> bool:
        accepted = self._writer.offer(block, tiers)
        for tier in () if accepted else tiers:
            self._calls.add(tier, TierWork(writes_dropped=1))
        return accepted

    def _was_offered(self, tier: Tier, block: KVBlock, outcome: PutOutcome) -> None:
        """In the thread that writes: a tier was given a block and said what it did with it."""
        if outcome is PutOutcome.REFUSED:
            self._calls.add(tier, TierWork(refused=1))
        elif (listener := self._listener_of(tier)) is not None:
            listener.stored(tier.name, block)

    def _demote(self, block: KVBlock) -> None:
        """A block leaves the memory: tiers that end with the process get it now, the others if they missed it."""
        of = self._of(block.tenant)
        unsaved = of.unsaved.forget(block.key)
        tiers = (*of.overflow, *(of.lasting if unsaved else ()))
        if tiers and not self._offered(block, tiers):
            of.unsaved.dropped(lost=unsaved)


def _tenant(chunks: Sequence[Chunk]) -> str:
    """Whose chunks these are: those of one prompt are one tenant's."""
    return chunks[0].tenant if chunks else ""
