"""A small pool of caches, so that a request neither page-faults on fresh memory nor copies KV that is still in place.

Used by the prefiller. A returned workspace remembers which chunks it holds; a request with the same prefix gets it and
copies only the rest. Invariants: a workspace has one owner at a time; it never changes tenants, as its old KV is still
in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvboost.capacity import MAX_IDLE, request_bytes, workspace_capacity
from kvboost.core.backend import KVCache

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
        self, make: MakeCache, *, bytes_per_token: int, capacity_bytes: int = 0, shelf: _Shelf | None = None
    ) -> None:
        self._make, self._bytes_per_token = make, bytes_per_token
        self._shelf = shelf or _Shelf(capacity_bytes)

    def for_tenant(self) -> WorkspacePool:
        """Another tenant's pool: shared capacity, separate workspaces."""
        return WorkspacePool(self._make, bytes_per_token=self._bytes_per_token, shelf=self._shelf)

    @property
    def idle_bytes(self) -> int:
        """Memory held by idle workspaces, of all tenants."""
        with self._shelf.lock:
            return self._shelf.nbytes

    def bytes_for(self, tokens: int) -> int:
        """Bytes of a new cache with capacity for ``tokens``."""
        return request_bytes(tokens, kv_per_token=self._bytes_per_token)

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
