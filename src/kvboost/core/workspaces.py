"""A small pool of caches, and how stored KV gets into them, each block as it arrives from a slow tier.

Used by the prefiller. A returned workspace remembers which chunks it holds; a request with the same prefix gets it and
copies only the rest, without faulting in fresh pages. Invariants: a workspace has one owner at a time, and never
changes tenants, as its old KV is still in it; the lease decides which blocks count, so a block placed before the lease
returned is placed again unless the lease holds the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvboost.capacity import MAX_IDLE, request_bytes, workspace_capacity
from kvboost.core.backend import Codec, KVCache
from kvboost.types import Chunk, KVBlock

MakeCache = Callable[[int], KVCache]
"""Makes a cache with capacity for the given number of tokens."""


@dataclass
class _Idle:
    """A workspace without a request."""

    cache: KVCache
    held: tuple[bytes, ...]
    """Keys of the leading chunks it holds."""
    owner: WorkspacePool


@dataclass
class _Shelf:
    """The idle workspaces of all tenants of an engine."""

    capacity_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: list[_Idle] = field(default_factory=list)  # last: most recently used

    @property
    def nbytes(self) -> int:
        return sum(workspace.cache.nbytes for workspace in self.idle)


class WorkspacePool:
    """Idle caches of one model and one tenant, at most ``capacity_bytes`` of them over all tenants."""

    def __init__(
        self,
        make: MakeCache,
        *,
        bytes_per_token: int,
        state_bytes: int = 0,
        capacity_bytes: int = 0,
        shelf: _Shelf | None = None,
    ) -> None:
        """A cache takes ``state_bytes`` however short it is."""
        self._make, self._bytes_per_token, self._state_bytes = make, bytes_per_token, state_bytes
        self._shelf = shelf or _Shelf(capacity_bytes)

    def for_tenant(self) -> WorkspacePool:
        """Another tenant's pool: shared capacity, separate workspaces."""
        per_token, fixed = self._bytes_per_token, self._state_bytes
        return WorkspacePool(self._make, bytes_per_token=per_token, state_bytes=fixed, shelf=self._shelf)

    @property
    def idle_bytes(self) -> int:
        """Memory held by idle workspaces, of all tenants."""
        with self._shelf.lock:
            return self._shelf.nbytes

    def bytes_for(self, tokens: int) -> int:
        """Bytes of a new cache with capacity for ``tokens``."""
        return request_bytes(tokens, kv_per_token=self._bytes_per_token) + self._state_bytes

    def take(self, *, tokens: int, chain: Sequence[bytes]) -> tuple[KVCache, int]:
        """A cache with capacity for ``tokens``, and how many leading chunks of ``chain`` it already holds."""
        with self._shelf.lock:
            idle = self._shelf.idle
            fitting = [w for w in idle if w.owner is self and w.cache.capacity >= tokens]
            if fitting:
                best = max(fitting, key=lambda w: (_common(w.held, chain), -w.cache.capacity))
                idle[:] = [workspace for workspace in idle if workspace is not best]
                return best.cache, _common(best.held, chain)
        return self.make(tokens=tokens), 0

    def make(self, *, tokens: int) -> KVCache:
        """A new cache with capacity for ``tokens``."""
        return self._make(workspace_capacity(tokens))

    def give_back(self, cache: KVCache, *, held: Sequence[bytes]) -> None:
        """Return a cache that begins with exactly the chunks named by ``held``."""
        shelf = self._shelf
        if not cache.is_poolable or cache.nbytes > shelf.capacity_bytes:
            return
        with shelf.lock:
            shelf.idle.append(_Idle(cache, tuple(held), self))
            while len(shelf.idle) > MAX_IDLE or shelf.nbytes > shelf.capacity_bytes:
                shelf.idle.pop(0)

    def clear(self) -> None:
        """Drop every idle workspace of this tenant."""
        with self._shelf.lock:
            self._shelf.idle[:] = [workspace for workspace in self._shelf.idle if workspace.owner is not self]


def _common(held: Sequence[bytes], chain: Sequence[bytes]) -> int:
    count = 0
    for mine, theirs in zip(held, chain, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


class KVLoader:
    """Loads the exact chunks of one prompt into a cache, which it takes when the first block arrives."""

    def __init__(self, chunks: Sequence[Chunk], *, tokens: int, codec: Codec, pool: WorkspacePool) -> None:
        """``chunks`` are those that may be reused; the cache gets capacity for ``tokens``."""
        self._chunks, self._tokens = chunks, tokens
        self._codec, self._pool = codec, pool
        self._cache: KVCache | None = None
        self._chain: list[bytes] = []
        self._in_place = 0
        self._placed: dict[bytes, KVBlock] = {}
        self._failed = False

    def arrived(self, chunk: Chunk, block: KVBlock) -> None:
        """Copy a block that arrived before the lease returned."""
        if self._failed or not chunk.tokens:  # a state is placed once it is clear that all before it is there
            return
        try:
            if self._cache is None:
                self._take([chunk.prefix_key for chunk in self._chunks])
            assert self._cache is not None
            if chunk.start >= (self._chunks[self._in_place - 1].end if self._in_place else 0):
                self._codec.place(self._cache, chunk.start, block.tensors)
                self._placed[block.key] = block
        except Exception:  # noqa: BLE001 - finish() places it again and raises then, outside of the store's error handling
            self._failed = True

    def finish(self, blocks: Sequence[KVBlock], chunks: Sequence[Chunk]) -> KVCache:
        """The cache with all of ``blocks`` in place, which are those of the first of ``chunks``."""
        if self._cache is None:
            self._take([block.key for block in blocks])
        assert self._cache is not None
        # The end of another prompt may stand where the chain has a chunk of this one.
        in_place = set(self._chain[: self._in_place])
        missing = [
            (chunk.start, block.tensors)
            for block, chunk in zip(blocks, chunks, strict=False)
            if block.key not in in_place and self._placed.get(block.key) is not block
        ]
        self._codec.place_each(self._cache, missing)
        return self._cache

    def _take(self, chain: list[bytes]) -> None:
        self._chain = chain
        self._cache, self._in_place = self._pool.take(tokens=self._tokens, chain=chain)
