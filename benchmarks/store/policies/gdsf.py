"""GDSF: by frequency over size, with an age that rises as blocks are evicted.

After Cherkasova (1998), with a cost of 1 per block, leaf first: the most prompts per byte, which for blocks of one
size is LFU with aging. O(log n) per operation; about 450 bytes per stored key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.store.policies.leaves import Forest, LeafHeap


class GreedyDualSizeFrequency:
    """Small and frequent blocks stay. Kept for comparison: it holds on to old conversations for too long."""

    def __init__(self) -> None:
        self._forest = Forest()
        self._queue = LeafHeap()
        self._age = 0.0
        self._chosen: bytes | None = None

    def inserted(
        self, key: bytes, *, parent: bytes | None = None, nbytes: int = 1, content: bytes | None = None
    ) -> None:
        """A new key counts as used once."""
        node = self._forest.add(key, parent=parent, nbytes=nbytes)
        node.uses = 1
        self._queue.put(node, self._age + 1 / max(1, nbytes))

    def found(self, chain: Sequence[bytes]) -> None:
        """Each key gains by one use, and by the age of today."""
        for key in chain:
            node = self._forest.nodes.get(key)
            if node is not None:
                node.uses += 1
                self._queue.put(node, self._age + node.uses / max(1, node.nbytes))

    def used(self, chain: Sequence[bytes]) -> None:
        """Nothing: only what is found counts."""

    def removed(self, key: bytes) -> None:
        """Forget ``key``; an eviction raises the age to its rank."""
        node = self._forest.remove(key)
        if node is not None and key == self._chosen:
            self._age = max(self._age, node.rank)
        self._chosen = None

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """The leaf of the lowest rank."""
        node = self._queue.lowest(evictable)
        self._chosen = node.key if node is not None else None
        return self._chosen

    def admits(
        self, key: bytes, *, parent: bytes | None, nbytes: int, victim: bytes, content: bytes | None = None
    ) -> bool:
        """Always: the age of today is part of a new rank."""
        return True
