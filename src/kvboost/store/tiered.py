"""A memory store with slower tiers below it: looks through all of them, brings up what pays, writes behind.

Made by the engine where a disk directory or a remote is given; used like any other store. Invariants: requests only
ever get blocks that lie in the memory store, so its ledger and its leases hold for them; what a tier does wrong is a
miss; writing never makes a request wait; what one request is loading, another waits for.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvboost.extend import ContentLease, Lease, RunTier, StoreListener, Tier
from kvboost.store.announce import Announcer
from kvboost.store.background import Background, finished
from kvboost.store.counters import Counters, TierWork
from kvboost.store.lookup import Claims, LoadRules, Lookup, Speed, left_of
from kvboost.store.memory import MemoryStore
from kvboost.store.unsaved import Unsaved
from kvboost.store.variants import best_variant
from kvboost.store.write_behind import WriteBehind
from kvboost.streams import BlockingStreams, Streams
from kvboost.types import (
    TOKEN_BYTES,
    BlockInfo,
    Chunk,
    HotChunk,
    KVBlock,
    LoadReport,
    PutOutcome,
    StoreStats,
    context_mark,
)

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
        self._memory, self._rules = memory, rules
        self._streams = streams if streams is not None else BlockingStreams()
        self._own = _Tenant(tiers)
        self._tenants: dict[str, _Tenant] = {}
        self._announcer = Announcer()
        self._writer = WriteBehind(
            waiting_bytes,
            streams=self._streams,
            failed=self._failed,
            tried=lambda block, kept: self._of(block.tenant).unsaved.tried(block, kept),
            offered=self._was_offered,
        )
        self._lock = threading.Lock()
        self._claims = Claims()
        self._speeds: defaultdict[str, Speed] = defaultdict(Speed)
        self._work = defaultdict(TierWork, {tier.name: TierWork() for tier in tiers})
        self._token_bytes = 0.0  # of the last block seen
        self._warned: set[str] = set()
        memory.on_evict = self._demote
        memory.selective = False  # what is loaded must pass through it, and what is new goes down from it

    def open(self, tenant: str, tiers: Sequence[Tier]) -> None:
        """From now on this tenant's blocks go to ``tiers``, and are counted by themselves."""
        self._memory.open(tenant)
        with self._lock:
            self._tenants[tenant] = _Tenant(tiers)

    def _of(self, tenant: str | None) -> _Tenant:
        return self._own if tenant is None else self._tenants.get(tenant, self._own)

    def _all(self, tenant: str | None) -> list[_Tenant]:
        return [self._own, *list(self._tenants.values())] if tenant is None else [self._of(tenant)]

    def listen(self, listener: StoreListener) -> None:
        """Tell ``listener`` what the memory holds, and from now on what it and the tiers below gain and lose."""
        self._announcer.listen(listener, self._own.tiers)
        self._memory.listen(listener)

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
            self._bring_up_run(chunks, lookup)
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
            self._bring_up_content(chunks, after, lookup)
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
        self._bring_up_run(chunks, lookup)
        known = self._memory.leading_run(chunks)
        return lookup.report({chunk.start for chunk in chunks[known:]}), known

    def fetch_content(self, chunks: Sequence[Chunk], *, after: int) -> LoadReport:
        """Bring up, for each of ``chunks[after:]`` that is nowhere in memory, the best-fitting block."""
        lookup = Lookup()
        self._bring_up_content(chunks, after, lookup)
        return lookup.report({chunk.start for chunk in chunks})

    def in_background(self, work: Callable[[], T], *, tenant: str = "") -> Future[T] | None:
        """Run ``work``, which may wait for a tier, on the thread that loads ahead; None if too much waits already."""
        return self._of(tenant).background.run(work)

    def prefetch(self, chunks: Sequence[Chunk]) -> Future[int]:
        """Bring the longest leading run of ``chunks`` up into memory, in the background.

        Returns at once. The result is how many tokens came up. Where too many wait already, nothing is done.
        """
        return self._of(_tenant(chunks)).background.run(partial(self._prefetched, chunks)) or finished(0)

    def _prefetched(self, chunks: Sequence[Chunk]) -> int:
        lookup = Lookup()
        self._bring_up_run(chunks, lookup)
        return lookup.tokens

    def leading_run(self, chunks: Sequence[Chunk]) -> int:
        """How many of ``chunks`` a lease would probably hold. Loads nothing and counts nothing."""
        known = self._memory.leading_run(chunks)
        for tier in self._of(_tenant(chunks)).tiers:
            if known < len(chunks):
                known += self._leading_run(tier, [chunk.prefix_key for chunk in chunks[known:]])
        return known

    def _leading_run(self, tier: Tier, keys: Sequence[bytes]) -> int:
        if isinstance(tier, RunTier):
            return self._ask(tier, 0, tier.leading_run, keys)
        there: Sequence[bool] = self._ask(tier, [], tier.contains, keys)
        return next((index for index, found in enumerate(there) if not found), len(there))

    def contains(self, keys: Sequence[bytes], *, in_memory: bool = False, tenant: str = "") -> list[bool]:
        """Which of these are in memory or on this machine's disk: one round trip to a server is not worth a guess.

        With ``in_memory`` no tier is asked.
        """
        found = self._memory.contains(keys)
        for tier in self._of(tenant).tiers if not in_memory else ():
            if tier.name in _LOCAL:
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
            self._note_size(block)
            self._save(block, self._of(block.tenant).lasting)
        return outcome

    def used(self, chain: Sequence[bytes]) -> None:
        """Tell every tier that these keys served one prompt; the slower ones after the request."""
        self._memory.used(chain)
        held = self._memory.blocks(chain[:1])
        tenant = held[0].tenant if held else ""
        for tier in self._of(tenant).tiers:
            self._writer.note(tenant, tier, partial(self._note_used, tier, chain))

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
        with self._lock:
            return {name: replace(work) for name, work in self._work.items()}

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

    # Bringing up

    def _bring_up_run(self, chunks: Sequence[Chunk], lookup: Lookup) -> None:
        """Load as many of ``chunks`` as follow each other without a gap, each from the fastest tier that has it."""
        with self._claims.claim(chunks, self._memory.leading_run) as known:
            chunks = chunks[known:]
            for at, tier in enumerate(self._of(_tenant(chunks)).tiers):
                if not chunks:
                    return
                keys = [chunk.prefix_key for chunk in chunks]
                run = chunks[: self._leading_run(tier, keys)]
                if run and self._pays(tier, run, lookup):
                    chunks = chunks[self._load(at, run, keys[: len(run)], lookup, gaps=False) :]

    def _bring_up_content(self, chunks: Sequence[Chunk], after: int, lookup: Lookup) -> None:
        """Load for each unknown one of ``chunks[after:]`` the variant that fits best, from the fastest tier."""
        missing = [after + index for index in self._memory.unknown_content(chunks[after:])]
        for at, tier in enumerate(self._of(_tenant(chunks)).tiers):
            if not missing:
                return
            contents = [chunks[index].content_key for index in missing]
            variants: Sequence[Sequence[BlockInfo]] = self._ask(tier, [], tier.variants, contents)
            wanted: dict[int, BlockInfo] = {}
            for index, found in zip(missing, variants, strict=False):
                marks = {context_mark(chunk.content_key) for chunk in chunks[:index]}
                best = best_variant(found, marks=marks)
                if best is not None:
                    wanted[index] = best
            run = [chunks[index] for index in wanted]
            if run and self._pays(tier, run, lookup, saves=self._rules.content_saves):
                self._load(at, run, [info.key for info in wanted.values()], lookup, gaps=True)
                missing = [index for index in missing if self._memory.unknown_content([chunks[index]])]

    def _pays(self, tier: Tier, chunks: Sequence[Chunk], lookup: Lookup, *, saves: float = 1.0) -> bool:
        """Whether loading these is expected to be faster than the computing it ``saves``."""
        if self._rules.compute_seconds is None:
            return True
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        compute = saves * self._rules.compute_seconds(tokens)
        with self._lock:
            load = self._speeds[tier.name].expected(self._token_bytes * tokens)
            if load <= compute:
                return True
            self._of(_tenant(chunks)).declined += len(chunks)
            self._work[tier.name].loads_declined += len(chunks)
            self._speeds[tier.name].declined()
        lookup.decline(tier.name, chunks, load_seconds=load, compute_seconds=compute)
        return False

    def _load(self, at: int, chunks: Sequence[Chunk], keys: Sequence[bytes], lookup: Lookup, *, gaps: bool) -> int:
        """Load these blocks into memory; without ``gaps`` only up to the first miss. Returns how many came."""
        tiers = self._of(_tenant(chunks)).tiers
        tier = tiers[at]
        began, nbytes, came, missed = time.perf_counter(), 0, 0, 0
        with closing(self._loaded(tier, keys)) as blocks:
            for chunk, key, loaded in zip(chunks, keys, blocks, strict=False):
                if loaded is None or not self._accepted(loaded, chunk, key):
                    missed += 1
                    if loaded is None:
                        self._announcer.missing(tier, key)
                    if gaps:
                        continue
                    break
                nbytes += loaded.nbytes
                block = replace(self._rules.to_memory(loaded), tenant=chunk.tenant)
                # Found by content alone, its own beginning need not be here.
                outcome = self._memory.put(replace(block, parent_key=None) if gaps else block)
                if outcome is PutOutcome.REFUSED:
                    break
                came += 1
                self._note_size(block)
                if at:
                    self._save(block, [higher for higher in tiers[:at] if higher.outlives_process])
                self._claims.arrived(block.key)
                if outcome is PutOutcome.STORED:
                    if lookup.arrived is not None:
                        self._streams.join()  # the caller places it at once
                    lookup.came(chunk, block, tier.name)
        seconds = time.perf_counter() - began
        with self._lock:
            self._speeds[tier.name].observe(seconds=seconds, nbytes=nbytes)
            self._work[tier.name].add(TierWork(loads=1, load_seconds=seconds, hits=came, misses=missed))
        return came

    def _loaded(self, tier: Tier, keys: Sequence[bytes]) -> Generator[KVBlock | None]:
        try:
            yield from tier.load(keys)
        except Exception as error:  # noqa: BLE001 - whatever a tier raises is a miss
            self._failed(tier, error)

    def _accepted(self, block: KVBlock, chunk: Chunk, key: bytes) -> bool:
        named = (block.key, block.tokens, block.content_key) == (key, chunk.tokens, chunk.content_key)
        accepted = named and self._rules.fits(block)
        if not accepted:
            with self._lock:
                self._of(chunk.tenant).rejected += 1
        return accepted

    def _note_size(self, block: KVBlock) -> None:
        self._token_bytes = block.nbytes / max(1, len(block.tokens) // TOKEN_BYTES)

    # Writing down

    def _save(self, block: KVBlock, tiers: Sequence[Tier]) -> None:
        if tiers and not self._offered(block, tiers):
            self._of(block.tenant).unsaved.remember(block.key)

    def _offered(self, block: KVBlock, tiers: Sequence[Tier]) -> bool:
        taken = self._writer.offer(block, tiers)
        with self._lock:
            for tier in tiers:
                self._work[tier.name].writes_dropped += not taken
        return taken

    def _was_offered(self, tier: Tier, block: KVBlock, outcome: PutOutcome) -> None:
        """In the thread that writes: a tier was given a block and said what it did with it."""
        if outcome is not PutOutcome.REFUSED:
            self._announcer.stored(tier, block)
            return
        with self._lock:
            self._work[tier.name].refused += 1

    def _demote(self, block: KVBlock) -> None:
        """A block leaves the memory: tiers that end with the process get it now, the others if they missed it."""
        of = self._of(block.tenant)
        unsaved = of.unsaved.forget(block.key)
        tiers = (*of.overflow, *(of.lasting if unsaved else ()))
        if tiers and not self._offered(block, tiers):
            of.unsaved.dropped(lost=unsaved)

    def _ask(self, tier: Tier, otherwise: T, method: Callable[..., T], *arguments: Any) -> T:
        """What the tier answers, or ``otherwise`` if it fails: a cache may only help."""
        try:
            return method(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a tier raises, the request goes on
            self._failed(tier, error)
            return otherwise

    def _failed(self, tier: Tier, error: BaseException) -> None:
        with self._lock:
            self._work[tier.name].errors += 1
            first = tier.name not in self._warned
            self._warned.add(tier.name)
        if first:
            warnings.warn(
                f"the {tier.name} tier failed and is treated as empty for this request: {error!r}",
                RuntimeWarning,
                stacklevel=4,
            )


def _tenant(chunks: Sequence[Chunk]) -> str:
    """Whose chunks these are: those of one prompt are one tenant's."""
    return chunks[0].tenant if chunks else ""
