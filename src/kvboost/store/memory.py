"""A store in process memory with a byte budget that is never exceeded.

Called by the engine: ``lease`` before a prompt is read, ``put`` after. Invariants: the bytes held never
pass the capacity; a leased block is not evicted; a block with stored successors is not evicted; of several tenants'
stores over one memory none sees another's blocks; while a tenant makes lookups, none with more than it has evicts its
blocks, and nobody once it has no more than an even share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest
from time import monotonic
from types import TracebackType
from typing import Self

from kvboost.errors import StoreError
from kvboost.extend import EvictionPolicy, StoreListener
from kvboost.store.counters import ContentKeys, Counters
from kvboost.store.eviction import LeastExpected
from kvboost.store.variants import best_variant
from kvboost.types import (
    NOTHING_LOADED,
    TOKEN_BYTES,
    Chunk,
    HotChunk,
    KVBlock,
    LoadReport,
    PutOutcome,
    StoreStats,
    context_mark,
)

TIER = "memory"
"""The name of this store in statistics and events."""
MAX_VARIANTS = 4  # of one content that are kept for non-prefix reuse only
_GONE_S = 3600.0  # without a lookup: what such a tenant has is kept from nobody
_MAX_LOOKED_AT = 8  # of one content in a lookup; exact blocks may hold the same text behind any number of beginnings


class _Entry:
    __slots__ = ("block", "leases", "owner", "successors", "uses")

    def __init__(self, block: KVBlock, owner: MemoryStore) -> None:
        self.block = block
        self.owner = owner
        self.leases = 0
        self.successors = 0
        self.uses = 0


class _Memory:
    """What the stores of all tenants share. Its lock guards it and them."""

    def __init__(self, capacity_bytes: int, *, max_chunks: int | None, policy: EvictionPolicy) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_chunks = max_chunks
        self.policy = policy
        self.lock = threading.Lock()
        self.entries: dict[bytes, _Entry] = {}
        self.contents = ContentKeys()
        self.bytes = 0
        self.tenants = 0  # stores that hold a block
        self.found: list[list[bytes]] = []
        """Chains that lookups found and the policy was not told of yet: a lookup is waited for, its end is not."""


class _Held:
    """Entries of a :class:`MemoryStore`, held against eviction until released."""

    def __init__(self, store: MemoryStore, entries: Sequence[_Entry | None]) -> None:
        self._store = store
        self._entries: Sequence[_Entry | None] | None = entries
        self.loads: LoadReport = NOTHING_LOADED
        """What the tiers below did for this lookup; set by the store above them."""

    def _held(self) -> Sequence[_Entry | None]:
        if self._entries is None:
            raise StoreError("this lease was released; take a new one before reading blocks")
        return self._entries

    def release(self) -> None:
        """Let the blocks go. Harmless the second time."""
        entries, self._entries = self._entries, None
        if entries:
            self._store._release([entry for entry in entries if entry is not None])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class MemoryLease(_Held):
    """The blocks of a prompt's beginning."""

    @property
    def blocks(self) -> Sequence[KVBlock]:
        """The blocks held, first chunk first."""
        return [entry.block for entry in self._held() if entry is not None]


class MemoryContentLease(_Held):
    """Blocks found by content, None where there was none."""

    @property
    def blocks(self) -> Sequence[KVBlock | None]:
        """One entry for each chunk asked for."""
        return [entry.block if entry is not None else None for entry in self._held()]


class MemoryStore:
    """Blocks in process memory, at most ``capacity_bytes`` and ``max_chunks`` of them."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        max_chunks: int | None = None,
        policy: EvictionPolicy | None = None,
        quota_bytes: int | None = None,
    ) -> None:
        """``quota_bytes`` is what this store may take where others share the memory: see :meth:`for_tenant`."""
        policy = policy if policy is not None else LeastExpected()
        self._open(_Memory(capacity_bytes, max_chunks=max_chunks, policy=policy), quota_bytes)

    def for_tenant(self, *, quota_bytes: int | None = None) -> MemoryStore:
        """Another tenant's store over the same memory and within the same capacity; neither sees the other's blocks.

        The tenant may take ``quota_bytes`` of it. Closing either leaves the other as it is.
        """
        other = MemoryStore.__new__(MemoryStore)
        other._open(self._memory, quota_bytes)
        other._listener = self._listener
        return other

    def _open(self, memory: _Memory, quota_bytes: int | None) -> None:
        self.on_evict: Callable[[KVBlock], None] = lambda block: None
        """Called with every block that is evicted, while the store is locked: it must be quick and not call back."""
        self.selective = True
        """Whether the policy may refuse a block that is not worth another's place. Not where blocks pass through."""
        self._memory = memory
        self._lock = memory.lock
        self._entries, self._contents, self._policy = memory.entries, memory.contents, memory.policy
        self._quota = memory.capacity_bytes if quota_bytes is None else min(memory.capacity_bytes, quota_bytes)
        self._bytes = self._chunks = self._leased = 0
        self._looked = monotonic()
        self._counters = Counters()
        self._uncounted = threading.local()
        self._listener: StoreListener | None = None

    def listen(self, listener: StoreListener) -> None:
        """Tell ``listener`` what this store holds, and from now on what it gains and loses, in that order.

        So do the stores that :meth:`for_tenant` makes afterwards.
        """
        with self._lock:
            self._listener = listener
            for entry in self._entries.values():  # a block is entered behind its parent
                if entry.owner is self:
                    listener.stored(TIER, entry.block)

    def _own(self, key: bytes) -> _Entry | None:
        entry = self._entries.get(key)
        return entry if entry is not None and entry.owner is self else None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """In this ``with`` block, this thread's leases are no lookups of a request and do not count as such."""
        self._uncounted.now = True
        try:
            yield
        finally:
            self._uncounted.now = False

    def lease(self, chunks: Sequence[Chunk]) -> MemoryLease:
        """Hold the longest leading run of ``chunks`` that is stored with exactly these tokens."""
        with self._lock:
            held: list[_Entry] = []
            entries = self._entries
            for chunk in chunks:
                entry = entries.get(chunk.prefix_key)
                if entry is None or entry.owner is not self:
                    break
                if entry.block.tokens != chunk.tokens:
                    self._counters.rejected += 1
                    break
                held.append(entry)
            if not getattr(self._uncounted, "now", False):
                self._counters.hits += len(held)
                self._counters.misses += len(chunks) - len(held)
            self._hold(held)
            return MemoryLease(self, held)

    def lease_content(self, chunks: Sequence[Chunk], *, after: int) -> MemoryContentLease:
        """Hold, for each of ``chunks[after:]``, the best-fitting block with exactly these tokens."""
        with self._lock:
            marks = {context_mark(chunk.content_key) for chunk in chunks[:after]}
            found: list[_Entry | None] = []
            for chunk in chunks[after:]:
                newest = self._contents.of(chunk.content_key)[-_MAX_LOOKED_AT:]
                candidates = [entry for key in newest if (entry := self._own(key)) is not None]
                matching = [entry for entry in candidates if entry.block.tokens == chunk.tokens]
                self._counters.rejected += len(candidates) - len(matching)
                best = best_variant([entry.block for entry in matching], marks=marks)
                found.append(self._entries[best.key] if best is not None else None)
                marks.add(context_mark(chunk.content_key))
            held = [entry for entry in found if entry is not None]
            self._counters.content_hits += len(held)
            self._hold(held)
            return MemoryContentLease(self, found)

    def leading_run(self, chunks: Sequence[Chunk]) -> int:
        """How many of ``chunks`` a lease would hold. Counts nothing and marks nothing."""
        with self._lock:
            for index, chunk in enumerate(chunks):
                entry = self._own(chunk.prefix_key)
                if entry is None or entry.block.tokens != chunk.tokens:
                    return index
            return len(chunks)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these are stored. Counts nothing and marks nothing."""
        with self._lock:
            return [self._own(key) is not None for key in keys]

    def unknown_content(self, chunks: Sequence[Chunk]) -> list[int]:
        """Which of ``chunks`` are not stored anywhere, by index. Counts nothing and marks nothing."""
        with self._lock:
            return [
                index
                for index, chunk in enumerate(chunks)
                if not any(self._own(key) for key in self._contents.of(chunk.content_key))
            ]

    def blocks(self, keys: Sequence[bytes]) -> list[KVBlock]:
        """Those of the blocks under ``keys`` that are stored. They are not held."""
        with self._lock:
            return [entry.block for key in keys if (entry := self._own(key)) is not None]

    def hottest(self, limit: int) -> list[HotChunk]:
        """The blocks in this memory, of all stores over it, that were leased most often. Marks nothing."""
        with self._lock:
            entries = nlargest(limit, self._entries.values(), key=lambda entry: entry.uses)
            return [
                HotChunk(e.block.key, e.uses, e.block.start, len(e.block.tokens) // TOKEN_BYTES, e.block.nbytes)
                for e in entries
            ]

    def held_keys(self, limit: int) -> list[tuple[bytes, bytes]]:
        """Key and content key of the blocks in this memory, of all stores over it; the most used if there are more."""
        with self._lock:
            entries = self._entries.values()
            told = entries if len(entries) <= limit else nlargest(limit, entries, key=lambda entry: entry.uses)
            return [(entry.block.key, entry.block.content_key) for entry in told]

    def _hold(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            entry.leases += 1
            entry.uses += 1
        self._leased += len(entries)
        self._looked = monotonic()
        self._memory.found.append([entry.block.key for entry in entries])
        if not entries:
            self._tell_found()  # nothing will be released

    def _tell_found(self) -> None:
        """Tell the policy of the lookups since the last call, in their order; before it is told or asked anything else.

        Its own record of every block is as far from the CPU as the store's, and takes longer than the lookup itself.
        """
        found = self._memory.found
        for chain in found:
            self._policy.found(chain)
        found.clear()

    def put(self, block: KVBlock) -> PutOutcome:
        """Keep ``block``; evict others for it."""
        with self._lock:
            self._tell_found()
            if block.key in self._entries:
                return PutOutcome.PRESENT if self._own(block.key) else self._refuse()
            if block.approx_depth and len(self._contents.of(block.content_key)) >= MAX_VARIANTS:
                return self._refuse()
            parent = None
            if block.parent_key is not None:
                parent = self._own(block.parent_key)
                if parent is None:
                    return self._refuse()
                parent.successors += 1  # before evicting: the parent itself must not be the victim
            if not self._evict_for(block):
                if parent is not None:
                    parent.successors -= 1
                return self._refuse()
            self._entries[block.key] = _Entry(block, self)
            self._contents.add(block.content_key, block.key)
            self._count(1, block.nbytes)
            self._policy.inserted(block.key, parent=block.parent_key, nbytes=block.nbytes, content=block.content_key)
            if self._listener is not None:
                self._listener.stored(TIER, block)
            return PutOutcome.STORED

    def used(self, chain: Sequence[bytes]) -> None:
        """Tell the eviction policy that these keys served one prompt, first chunk first."""
        with self._lock:
            self._tell_found()
            self._policy.used([key for key in chain if self._own(key) is not None])

    def clear(self) -> None:
        """Forget every block of this store."""
        with self._lock:
            self._tell_found()
            for key in [key for key, entry in self._entries.items() if entry.owner is self]:
                self._drop(key)

    def stats(self) -> StoreStats:
        """Counters and sizes, consistent with each other."""
        with self._lock:
            return self._counters.stats(
                TIER, chunks=self._chunks, nbytes=self._bytes, capacity_bytes=self._quota, leased=self._leased
            )

    @property
    def memory_bytes(self) -> int:
        """What all stores over this memory hold together: never more than the capacity."""
        with self._lock:
            return self._memory.bytes

    def close(self) -> None:
        """Forget every block of this store."""
        self.clear()

    def _refuse(self) -> PutOutcome:
        self._counters.refused += 1
        return PutOutcome.REFUSED

    def _count(self, chunks: int, nbytes: int) -> None:
        self._memory.tenants += bool(self._chunks + chunks) - bool(self._chunks)
        self._chunks += chunks
        self._bytes += nbytes
        self._memory.bytes += nbytes

    def _evict_for(self, block: KVBlock) -> bool:
        """Evict until ``block`` fits. False if it cannot or is not worth it; the lock is held."""
        nbytes, newcomer = block.nbytes, block if self.selective else None
        memory = self._memory
        if nbytes > self._quota or memory.max_chunks == 0:
            return False
        while self._bytes + nbytes > self._quota:  # a tenant evicts its own blocks first
            if not self._evict_one(self._own_evictable, newcomer):
                return False
            newcomer = None  # once is enough
        while memory.bytes + nbytes > memory.capacity_bytes or (
            memory.max_chunks is not None and len(self._entries) >= memory.max_chunks
        ):
            if not self._evict_one(self._yielding(nbytes), newcomer):
                return False
            newcomer = None
        return True

    def _evict_one(self, evictable: Callable[[bytes], bool], newcomer: KVBlock | None) -> bool:
        """Evict the policy's choice, unless there is none or it is worth more than ``newcomer``."""
        key = self._policy.victim(evictable)
        if key is None:
            return False
        if newcomer is not None and not self._policy.admits(
            newcomer.key,
            parent=newcomer.parent_key,
            nbytes=newcomer.nbytes,
            victim=key,
            content=newcomer.content_key,
        ):
            return False
        owner = self._entries[key].owner
        block = self._drop(key)
        owner._counters.evictions += 1
        if block.parent_key is not None and block.parent_key in self._entries:
            self._entries[block.parent_key].successors -= 1
        owner.on_evict(block)
        return True

    def _evictable(self, key: bytes) -> bool:
        """Whether nobody holds this block and nothing is stored behind it."""
        entry = self._entries[key]
        return entry.leases == 0 and entry.successors == 0

    def _own_evictable(self, key: bytes) -> bool:
        return self._own(key) is not None and self._evictable(key)

    def _yielding(self, nbytes: int) -> Callable[[bytes], bool]:
        """Which blocks may be evicted for ``nbytes`` of this tenant.

        Its own, and those of tenants that have more than an even share and than this one; else the unique prompts of
        some would evict what all others have.
        """
        memory, gone = self._memory, monotonic() - _GONE_S
        even = memory.bytes / (memory.tenants + (not self._chunks))
        after = self._bytes + nbytes

        def evictable(key: bytes) -> bool:
            owner = self._entries[key].owner
            yields = owner is self or even < owner._bytes >= after or owner._looked < gone
            return yields and self._evictable(key)

        return evictable

    def _drop(self, key: bytes) -> KVBlock:
        """Take a block out of the books; the lock is held."""
        entry = self._entries.pop(key)
        block = entry.block
        self._policy.removed(key)
        entry.owner._count(-1, -block.nbytes)
        self._contents.remove(block.content_key, key)
        if entry.owner._listener is not None:
            entry.owner._listener.removed(TIER, [key])
        return block

    def _release(self, entries: Sequence[_Entry]) -> None:
        with self._lock:
            self._tell_found()
            for entry in entries:
                entry.leases -= 1
            self._leased -= len(entries)
