"""A small pool of caches, so that a request neither faults in fresh memory nor copies what is still in place.

Used by the reader. A workspace that comes back remembers which chunks it holds; a request that begins
with the same chunks gets it and copies only the rest. Invariants: a workspace has one owner at a time; one that a
tenant used is never another's, as what it held still lies in its rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvboost.capacity import MAX_IDLE, request_bytes, workspace_capacity
from kvboost.hf.cache import KVLayout, SlabCache


class WorkspacePool:
    """Idle caches of one layout, at most ``capacity_bytes`` of them."""

    def __init__(self, layout: KVLayout, *, capacity_bytes: int) -> None:
        self._layout = layout
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._idle: list[tuple[SlabCache, tuple[bytes, ...], WorkspacePool]] = []  # last: most recently used

    def beside(self) -> WorkspacePool:
        """Another tenant's pool: the same room, and nothing in common otherwise."""
        other = WorkspacePool(self._layout, capacity_bytes=self._capacity)
        other._lock, other._idle = self._lock, self._idle
        return other

    @property
    def idle_bytes(self) -> int:
        """Memory held by idle workspaces, of all tenants."""
        with self._lock:
            return self._bytes()

    def bytes_for(self, rows: int) -> int:
        """What a new cache with room for ``rows`` takes."""
        return request_bytes(rows, kv_per_token=self._layout.bytes_per_token)

    def take(self, *, rows: int, chain: Sequence[bytes]) -> tuple[SlabCache, int]:
        """A cache with room for ``rows``, and how many leading chunks of ``chain`` it already holds."""
        with self._lock:
            fitting = [i for i, (cache, _, owner) in enumerate(self._idle) if owner is self and cache.capacity >= rows]
            if fitting:
                best = max(fitting, key=lambda i: (_common(self._idle[i][1], chain), -self._idle[i][0].capacity))
                cache, held, _ = self._idle.pop(best)
                return cache, _common(held, chain)
        return self.make(rows=rows), 0

    def make(self, *, rows: int) -> SlabCache:
        """A new cache with room for ``rows``."""
        return SlabCache(self._layout, capacity=workspace_capacity(rows))

    def give_back(self, cache: SlabCache, *, held: Sequence[bytes]) -> None:
        """Return a cache whose leading rows are exactly the chunks named by ``held``."""
        if not cache.in_slabs or cache.nbytes > self._capacity:
            return
        with self._lock:
            self._idle.append((cache, tuple(held), self))
            while len(self._idle) > MAX_IDLE or self._bytes() > self._capacity:
                self._idle.pop(0)

    def clear(self) -> None:
        """Drop every idle workspace of this tenant."""
        with self._lock:
            self._idle[:] = [kept for kept in self._idle if kept[2] is not self]

    def _bytes(self) -> int:
        return sum(cache.nbytes for cache, _, _ in self._idle)


def _common(held: Sequence[bytes], chain: Sequence[bytes]) -> int:
    count = 0
    for mine, theirs in zip(held, chain, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
