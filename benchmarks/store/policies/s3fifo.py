"""S3-FIFO: a small queue on trial, a main queue with second chances, and ghosts that skip the trial.

After Yang and others (SOSP 2023), in bytes, leaf first. The capacity is what the store holds when it asks for a
victim. O(log n) amortised per operation; about 450 bytes per stored key and 100 per ghost, of which there are at most
0.9 per stored key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from benchmarks.store.policies.leaves import Forest, LeafHeap

_TRIAL_SHARE = 0.1
_PASSES = 2  # uses on trial that lead to the main queue
_MAX_USES = 3


class SmallMainGhostFIFO:
    """Drops quickly what is not found again soon. Strong where most chunks come once and some come for ever."""

    def __init__(self) -> None:
        self._forest = Forest()
        self._trial, self._main = LeafHeap(), LeafHeap()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._clock = 0
        self._chosen: bytes | None = None

    def inserted(
        self, key: bytes, *, parent: bytes | None = None, nbytes: int = 1, content: bytes | None = None
    ) -> None:
        """A new key is on trial, unless it was dropped from there not long ago."""
        node = self._forest.add(key, parent=parent, nbytes=nbytes)
        known = key in self._ghosts
        if known:
            del self._ghosts[key]
        self._clock += 1
        (self._main if known else self._trial).put(node, self._clock)

    def found(self, chain: Sequence[bytes]) -> None:
        """Note that these were found; nothing moves until they come up."""
        for key in chain:
            node = self._forest.nodes.get(key)
            if node is not None:
                node.uses = min(node.uses + 1, _MAX_USES)

    def used(self, chain: Sequence[bytes]) -> None:
        """Nothing: the order is that of insertion."""

    def removed(self, key: bytes) -> None:
        """Forget ``key``, or keep it as a ghost if it failed its trial."""
        node = self._forest.nodes.get(key)
        if node is None:
            return
        if key == self._chosen and node.where is self._trial:
            self._ghosts[key] = None
            while len(self._ghosts) > (1 - _TRIAL_SHARE) * len(self._forest.nodes):
                self._ghosts.popitem(last=False)
        self._chosen = None
        self._forest.remove(key)

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """The oldest leaf on trial that was not found twice, or the oldest of the main queue without a chance left."""
        on_trial = self._trial.nbytes > _TRIAL_SHARE * (self._trial.nbytes + self._main.nbytes)
        for queue in (self._trial, self._main) if on_trial else (self._main, self._trial):
            enough = _PASSES if queue is self._trial else 1
            while (node := queue.lowest(evictable)) is not None:
                if node.uses < enough:
                    self._chosen = node.key
                    return node.key
                node.uses = 0 if queue is self._trial else node.uses - 1
                self._clock += 1
                self._main.put(node, self._clock)
        return None

    def admits(
        self, key: bytes, *, parent: bytes | None, nbytes: int, victim: bytes, content: bytes | None = None
    ) -> bool:
        """Always: what is new is on trial first."""
        return True
