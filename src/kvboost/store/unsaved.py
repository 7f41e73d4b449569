"""Which blocks no tier has taken yet, so that they are tried again.

Used by :class:`kvboost.store.tiered.TieredStore`. Invariants: a block is tried a few times at most; the keys remembered
are bounded; every block that is given up is counted.
"""

from __future__ import annotations

import threading

from kvboost.types import KVBlock

_MAX_TRIES = 3  # of storing one block below
_MAX_KEYS = 100_000


class Unsaved:
    """Blocks that are still in memory only, oldest first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tries: dict[bytes, int] = {}
        self._dropped = 0
        self._lost = 0

    def remember(self, key: bytes, *, tries: int = 0) -> None:
        """A write was dropped, after so many tries."""
        with self._lock:
            self._dropped += 1
            self._tries[key] = tries
            if len(self._tries) > _MAX_KEYS:
                self._tries.pop(next(iter(self._tries)))
                self._lost += 1

    def tried(self, block: KVBlock, kept: bool) -> None:
        """A tier may have been full, busy or out of reach: a few times the block is tried again, at the next flush."""
        with self._lock:
            tries = self._tries.pop(block.key, 0) + 1
            self._lost += not kept and tries >= _MAX_TRIES
        if not kept and tries < _MAX_TRIES:
            self.remember(block.key, tries=tries)

    def forget(self, key: bytes) -> bool:
        """The block leaves the memory. Whether it was unsaved."""
        with self._lock:
            return self._tries.pop(key, None) is not None

    def dropped(self, *, lost: bool) -> None:
        """A block left the memory and no tier took it; ``lost`` if none has it."""
        with self._lock:
            self._dropped += 1
            self._lost += lost

    def keys(self) -> list[bytes]:
        """The keys, oldest first."""
        with self._lock:
            return list(self._tries)

    def clear(self) -> None:
        """Drop every key."""
        with self._lock:
            self._tries.clear()

    def counts(self) -> tuple[int, int]:
        """Writes that were dropped, and blocks that no tier has."""
        with self._lock:
            return self._dropped, self._lost + len(self._tries)
