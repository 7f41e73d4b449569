"""A store in process memory with a byte budget that is never exceeded.

Called by the engine: ``lease`` before a prompt is read, ``put`` after. Invariants: the bytes held never pass the
capacity; a leased block is not evicted, nor is one with stored successors; no tenant holds more than its quota; while
a tenant makes lookups, only who holds more than it evicts its blocks, and nobody does once it holds an even share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest
from time import monotonic

from kvboost.config import check_bytes
from kvboost.extend import EvictionPolicy, StoreListener
from kvboost.store.counters import ContentKeys, sum_of
from kvboost.store.eviction import checked_policy
from kvboost.store.held import Entry, MemoryLease, Share, best_variant
from kvboost.types import TOKEN_BYTES, Chunk, HotChunk, KVBlock, PutOutcome, StoreStats, context_mark

TIER = "memory"  # in statistics and events
MAX_VARIANTS = 4  # of one content that are kept for non-prefix reuse only
_GONE_S = 3600.0  # without a lookup: what such a tenant has is kept from nobody
# States of recurrent layers take this part of what is held or, while that is little, of the capacity.
_STATES_OF_HELD, _STATES = 3, 8
_MAX_LOOKED_AT = 8  # of one content in a lookup; exact blocks may hold the same text after any number of beginnings


class MemoryStore:
    """Blocks in process memory, at most ``capacity_bytes`` and ``max_chunks`` of them.

    Tenants have different keys, so none finds another's blocks. Those that were opened have a share of their own. All
    others count to the store's own share, unless the store has an ``owner``: then that is the owner's alone, and of
    tenants that are not open, such as one that was closed, nothing is kept.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        max_chunks: int | None = None,
        policy: EvictionPolicy | None = None,
        quota_bytes: int | None = None,
        owner: str | None = None,
        states_alone: bool = False,
    ) -> None:
        """``quota_bytes`` is what each tenant may have of it. With ``states_alone`` no room is left for KV."""
        self.owner = owner
        self.on_evict: Callable[[KVBlock], None] = lambda block: None
        """Called with every block that is evicted, while the store is locked: it must be quick and not call back."""
        self.selective = True
        """Whether the policy may refuse a block that is worth less than the one it evicts. Not where blocks pass."""
        check_bytes(capacity_bytes, name="capacity_bytes")
        self._capacity, self._max_chunks = capacity_bytes, max_chunks
        self._quota = capacity_bytes if quota_bytes is None else min(capacity_bytes, quota_bytes)
        self._policy = checked_policy(policy)
        self._least_for_states = capacity_bytes if states_alone else capacity_bytes // _STATES
        self._lock = threading.RLock()
        self._entries: dict[bytes, Entry] = {}
        self._contents = ContentKeys()
        self._bytes = 0
        self._states: dict[bytes, int] = {}  # bytes of each, the least recently used first
        self._holders = 0  # tenants that hold a block
        self._own, self._nobodys = Share(), Share()
        self._shares: dict[str, Share] = {}
        self._found: list[list[bytes]] = []  # by lookups; the policy gets them later, as a lookup is waited for
        self._uncounted = threading.local()
        self._listener: StoreListener | None = None

    def open(self, tenant: str) -> None:
        """Count what this tenant holds and does by itself."""
        with self._lock:
            self._shares.setdefault(tenant, Share())

    def _share_of(self, tenant: str | None) -> Share:
        others = self._own if self.owner in (None, tenant) else self._nobodys
        return self._own if tenant is None else self._shares.get(tenant, others)

    def listen(self, listener: StoreListener) -> None:
        """Tell ``listener`` what this store holds, and from now on what it gains and loses, in that order."""
        with self._lock:
            self._listener = listener
            for entry in self._entries.values():  # a block is entered after its parent
                listener.stored(TIER, entry.block)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """In this ``with`` block, this thread's leases are no lookups of a request and do not count as such."""
        self._uncounted.now = True
        try:
            yield
        finally:
            self._uncounted.now = False

    def lease(self, chunks: Sequence[Chunk]) -> MemoryLease[KVBlock]:
        """Hold the longest leading run of ``chunks`` that is stored with exactly these tokens."""
        with self._lock:
            held: list[Entry] = []
            share = self._share_of(chunks[0].tenant if chunks else None)
            for chunk in chunks:
                if (entry := self._entries.get(chunk.prefix_key)) is None:
                    break
                if entry.block.tokens != chunk.tokens:
                    share.counters.rejected += 1
                    break
                held.append(entry)
            if not getattr(self._uncounted, "now", False):
                share.counters.hits += len(held)
                share.counters.misses += len(chunks) - len(held)
            self._hold(held, share)
            return MemoryLease(held, [entry.block for entry in held], release=self._release)

    def lease_content(self, chunks: Sequence[Chunk], *, after: int) -> MemoryLease[KVBlock | None]:
        """Hold, for each of ``chunks[after:]``, the best-fitting block with exactly these tokens."""
        with self._lock:
            share = self._share_of(chunks[0].tenant if chunks else None)
            marks = {context_mark(chunk.content_key) for chunk in chunks[:after]}
            found: list[KVBlock | None] = []
            for chunk in chunks[after:]:
                newest = self._contents.of(chunk.content_key)[-_MAX_LOOKED_AT:]
                candidates = [self._entries[key].block for key in newest]
                matching = [block for block in candidates if block.tokens == chunk.tokens]
                share.counters.rejected += len(candidates) - len(matching)
                found.append(best_variant(matching, marks=marks))
                marks.add(context_mark(chunk.content_key))
            held = [self._entries[block.key] for block in found if block is not None]
            share.counters.content_hits += len(held)
            self._hold(held, share)
            return MemoryLease(held, found, release=self._release)

    def leading_run(self, chunks: Sequence[Chunk]) -> int:
        """How many of ``chunks`` a lease would hold. Counts nothing and marks nothing."""
        with self._lock:
            for index, chunk in enumerate(chunks):
                entry = self._entries.get(chunk.prefix_key)
                if entry is None or entry.block.tokens != chunk.tokens:
                    return index
            return len(chunks)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these are stored. Counts nothing and marks nothing."""
        with self._lock:
            return [key in self._entries for key in keys]

    def unknown_content(self, chunks: Sequence[Chunk]) -> list[int]:
        """Which of ``chunks`` are not stored anywhere, by index. Counts nothing and marks nothing."""
        with self._lock:
            return [index for index, chunk in enumerate(chunks) if not self._contents.of(chunk.content_key)]

    def blocks(self, keys: Sequence[bytes]) -> list[KVBlock]:
        """Those of the blocks under ``keys`` that are stored. They are not held."""
        with self._lock:
            return [entry.block for key in keys if (entry := self._entries.get(key)) is not None]

    def hottest(self, limit: int) -> list[HotChunk]:
        """The blocks that were leased most often, of all tenants. Marks nothing."""
        with self._lock:
            entries = nlargest(limit, self._entries.values(), key=lambda entry: entry.uses)
            return [
                HotChunk(e.block.key, e.uses, e.block.start, len(e.block.tokens) // TOKEN_BYTES, e.block.nbytes)
                for e in entries
            ]

    def held_keys(self, limit: int) -> list[tuple[bytes, bytes]]:
        """Key and content key of the blocks, of all tenants; the most used if there are more."""
        with self._lock:
            entries = nlargest(limit, self._entries.values(), key=lambda entry: entry.uses)
            return [(entry.block.key, entry.block.content_key) for entry in entries]

    def _hold(self, entries: Sequence[Entry], share: Share) -> None:
        for entry in entries:
            entry.leases += 1
            entry.uses += 1
            entry.share.leased += 1
            if not entry.block.tokens:
                self._states[entry.block.key] = self._states.pop(entry.block.key)
        share.looked = monotonic()
        self._found.append([entry.block.key for entry in entries])
        if not entries:
            self._report_found()  # nothing will be released

    def _report_found(self) -> None:
        """Give the policy the lookups since the last call, in their order, before it is asked anything else.

        It keeps a record of its own for every block, in other cache lines: reading them takes longer than the lookup.
        """
        for chain in self._found:
            self._policy.found(chain)
        self._found.clear()

    def put(self, block: KVBlock) -> PutOutcome:
        """Keep ``block``; evict others for it."""
        with self._lock:
            self._report_found()
            share = self._share_of(block.tenant)
            if block.key in self._entries:
                return PutOutcome.PRESENT
            variants = self._contents.of(block.content_key)
            if share is self._nobodys or (block.approx_depth and len(variants) >= MAX_VARIANTS):
                return _refused(share)
            parent = None
            if block.parent_key is not None:
                parent = self._entries.get(block.parent_key)
                if parent is None:
                    return _refused(share)
                parent.successors += 1  # before evicting: the parent itself must not be the victim
            if not (self._within_states(block, share) and self._evict_for(block, share)):
                if parent is not None:
                    parent.successors -= 1
                return _refused(share)
            self._entries[block.key] = Entry(block, share)
            self._contents.add(block.content_key, block.key)
            self._count(block, share, 1)
            if not block.tokens:
                self._states[block.key] = block.nbytes
            self._policy.inserted(block.key, parent=block.parent_key, nbytes=block.nbytes, content=block.content_key)
            if self._listener is not None:
                self._listener.stored(TIER, block)
            return PutOutcome.STORED

    def used(self, chain: Sequence[bytes]) -> None:
        """Tell the eviction policy that these keys served one prompt, first chunk first."""
        with self._lock:
            self._report_found()
            self._policy.used([key for key in chain if key in self._entries])

    def clear(self, tenant: str | None = None) -> None:
        """Forget every block, or those of one tenant."""
        with self._lock:
            self._report_found()
            share = self._share_of(tenant)
            for key, entry in list(self._entries.items()):
                if tenant is None or entry.share is share or entry.block.tenant == tenant:
                    self._drop(key)

    def stats(self, tenant: str | None = None) -> StoreStats:
        """Counters and sizes, consistent with each other; of one tenant, or of all that are open."""
        with self._lock:
            shares = [self._own, *self._shares.values()] if tenant is None else [self._share_of(tenant)]
            return sum_of(share.counters for share in shares).stats(
                TIER,
                chunks=sum(share.chunks for share in shares),
                nbytes=sum(share.bytes for share in shares),
                capacity_bytes=self._quota if tenant is not None else self._capacity,
                leased=sum(share.leased for share in shares),
            )

    @property
    def state_bytes(self) -> int:
        """What of the bytes are states of recurrent layers."""
        with self._lock:
            return sum(self._states.values())

    def close(self, tenant: str | None = None) -> None:
        """Forget every block, or one tenant's and its counters."""
        with self._lock:  # once: nothing of it comes in between
            self.clear(tenant)
            self._shares = {} if tenant is None else {n: share for n, share in self._shares.items() if n != tenant}

    def _count(self, block: KVBlock, share: Share, chunks: int) -> None:
        """One block more, or one less."""
        self._holders += bool(share.chunks + chunks) - bool(share.chunks)
        share.chunks += chunks
        share.bytes += chunks * block.nbytes
        self._bytes += chunks * block.nbytes

    def _within_states(self, block: KVBlock, share: Share) -> bool:
        """Evict states until this block is within their part of the memory, if it is one. False if it cannot be."""
        if block.tokens:
            return True
        held, yields = self.state_bytes + block.nbytes, self._yielding(block.nbytes, share)
        while held > max((self._bytes + block.nbytes) // _STATES_OF_HELD, self._least_for_states):
            oldest = next((key for key in self._states if yields(key)), None)
            if oldest is None:
                return False
            held -= self._states[oldest]
            self._evict(oldest)
        return True

    def _evict_for(self, block: KVBlock, share: Share) -> bool:
        """Evict until ``block`` fits. False if it cannot or is not worth it; the lock is held."""
        nbytes, newcomer = block.nbytes, block if self.selective else None
        if nbytes > self._quota or self._max_chunks == 0:
            return False
        while share.bytes + nbytes > self._quota:  # a tenant evicts its own blocks first
            if not self._evict_one(lambda key: self._entries[key].share is share and self._evictable(key), newcomer):
                return False
            newcomer = None  # once is enough
        while self._bytes + nbytes > self._capacity or (
            self._max_chunks is not None and len(self._entries) >= self._max_chunks
        ):
            if not self._evict_one(self._yielding(nbytes, share), newcomer):
                return False
            newcomer = None
        return True

    def _evict_one(self, evictable: Callable[[bytes], bool], newcomer: KVBlock | None) -> bool:
        """Evict the policy's choice, unless there is none or it is worth more than ``newcomer``."""
        key = self._policy.victim(evictable)
        if key is None:
            return False
        if newcomer is not None and not self._policy.admits(
            newcomer.key, parent=newcomer.parent_key, nbytes=newcomer.nbytes, victim=key, content=newcomer.content_key
        ):
            return False
        self._evict(key)
        return True

    def _evict(self, key: bytes) -> None:
        self._entries[key].share.counters.evictions += 1
        block = self._drop(key)
        if block.parent_key is not None and block.parent_key in self._entries:
            self._entries[block.parent_key].successors -= 1
        self.on_evict(block)

    def _evictable(self, key: bytes) -> bool:
        """Whether nobody holds this block and none of its successors is stored."""
        entry = self._entries[key]
        return entry.leases == 0 and entry.successors == 0

    def _yielding(self, nbytes: int, share: Share) -> Callable[[bytes], bool]:
        """Which blocks may be evicted for ``nbytes`` of this share.

        Its own, and those of tenants that have more than an even share and than this one; else the unique prompts of
        some would evict what all others have.
        """
        gone = monotonic() - _GONE_S
        even = self._bytes / (self._holders + (not share.chunks))
        after = share.bytes + nbytes

        def evictable(key: bytes) -> bool:
            of = self._entries[key].share
            yields = of is share or even < of.bytes >= after or of.looked < gone
            return yields and self._evictable(key)

        return evictable

    def _drop(self, key: bytes) -> KVBlock:
        """Take a block out of the books; the lock is held."""
        entry = self._entries.pop(key)
        block = entry.block
        self._policy.removed(key)
        self._states.pop(key, None)
        self._count(block, entry.share, -1)
        self._contents.remove(block.content_key, key)
        if self._listener is not None:
            self._listener.removed(TIER, [key])
        return block

    def _release(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            self._report_found()
            for entry in entries:
                entry.leases -= 1
                entry.share.leased -= 1


def _refused(share: Share) -> PutOutcome:
    share.counters.refused += 1
    return PutOutcome.REFUSED
