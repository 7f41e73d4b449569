"""ARC: two queues by recency, for blocks seen once and seen again, whose shares adapt to what was evicted too early.

After Megiddo and Modha (FAST 2003), in bytes, leaf first. The capacity is what the store holds when it asks for a
victim. O(log n) per operation; about 450 bytes per stored key and 150 per ghost, of which there are at most as many
bytes' worth as are stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from benchmarks.store.policies.leaves import Forest, LeafHeap


class _Ghosts:
    """Keys that were evicted, oldest first, with the bytes they had."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.nbytes = 0

    def add(self, key: bytes, nbytes: int) -> None:
        self._sizes[key] = nbytes
        self.nbytes += nbytes

    def take(self, key: bytes) -> bool:
        nbytes = self._sizes.pop(key, None)
        self.nbytes -= nbytes or 0
        return nbytes is not None

    def shrink(self, nbytes: int) -> None:
        while self.nbytes > nbytes and self._sizes:
            self.nbytes -= self._sizes.popitem(last=False)[1]


class AdaptiveReplacement:
    """Balances recency against frequency by itself. Better than LRU where many prompts come once only."""

    def __init__(self) -> None:
        self._forest = Forest()
        self._once, self._again = LeafHeap(), LeafHeap()
        self._ghosts_once, self._ghosts_again = _Ghosts(), _Ghosts()
        self._share = 0.0  # bytes that blocks seen once should have
        self._clock = 0
        self._chosen: bytes | None = None  # the last victim: only what was evicted becomes a ghost

    def inserted(
        self, key: bytes, *, parent: bytes | None = None, nbytes: int = 1, content: bytes | None = None
    ) -> None:
        """A new key is seen once; one that was evicted not long ago is seen again, and moves the balance."""
        node = self._forest.add(key, parent=parent, nbytes=nbytes)
        once, again = self._ghosts_once.nbytes, self._ghosts_again.nbytes
        queue = self._again
        if self._ghosts_once.take(key):
            self._share += nbytes * max(1.0, again / once)
        elif self._ghosts_again.take(key):
            self._share -= nbytes * max(1.0, once / again)
        else:
            queue = self._once
        self._share = min(max(self._share, 0.0), float(self._once.nbytes + self._again.nbytes + nbytes))
        self._clock += 1
        queue.put(node, self._clock)

    def found(self, chain: Sequence[bytes]) -> None:
        """What is found is seen again; the last chunk is the oldest of them."""
        self._refresh(chain, seen_again=True)

    def used(self, chain: Sequence[bytes]) -> None:
        """Order a prompt's keys: the last chunk goes before those it follows."""
        self._refresh(chain, seen_again=False)

    def _refresh(self, chain: Sequence[bytes], *, seen_again: bool) -> None:
        for key in reversed(chain):
            node = self._forest.nodes.get(key)
            if node is not None and node.where is not None:
                self._clock += 1
                (self._again if seen_again else node.where).put(node, self._clock)

    def removed(self, key: bytes) -> None:
        """Forget ``key``, or keep it as a ghost if it was evicted."""
        node = self._forest.nodes.get(key)
        if node is None:
            return
        ghosts = self._ghosts_once if node.where is self._once else self._ghosts_again
        capacity = self._once.nbytes + self._again.nbytes
        self._forest.remove(key)
        if key == self._chosen:
            ghosts.add(key, node.nbytes)
            self._ghosts_once.shrink(max(0, capacity - self._once.nbytes))
            self._ghosts_again.shrink(max(0, capacity - self._ghosts_once.nbytes))
        self._chosen = None

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """The oldest leaf of the queue that has more than its share, else of the other."""
        queues = (self._once, self._again) if self._once.nbytes > self._share else (self._again, self._once)
        for queue in queues:
            node = queue.lowest(evictable)
            if node is not None:
                self._chosen = node.key
                return node.key
        return None

    def admits(
        self, key: bytes, *, parent: bytes | None, nbytes: int, victim: bytes, content: bytes | None = None
    ) -> bool:
        """Always: what is new has a queue of its own."""
        return True
