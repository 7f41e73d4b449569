"""LRU: the least recently used first, and the end of a prompt before its beginning.

O(1) per operation; about 200 bytes per stored key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class LeafFirstLRU:
    """Least recently used first, and within one prompt the last chunk before the ones it follows.

    A chunk whose successors are stored is useless to evict before them: they could never be reached
    again. The store forbids that through ``evictable``; this policy's order makes such a refusal rare,
    so finding a victim takes constant time on average.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()  # first: the next to go

    def inserted(
        self, key: bytes, *, parent: bytes | None = None, nbytes: int = 1, content: bytes | None = None
    ) -> None:
        """A new key is the most recent one."""
        self._order[key] = None

    def found(self, chain: Sequence[bytes]) -> None:
        """As :meth:`used`."""
        self.used(chain)

    def used(self, chain: Sequence[bytes]) -> None:
        """Refresh a prompt's keys, last chunk first, so that each key is more recent than its successors."""
        for key in reversed(chain):
            if key in self._order:
                self._order.move_to_end(key)

    def removed(self, key: bytes) -> None:
        """Forget ``key``."""
        self._order.pop(key, None)

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """The least recently used key that may go."""
        return next((key for key in self._order if evictable(key)), None)

    def admits(
        self, key: bytes, *, parent: bytes | None, nbytes: int, victim: bytes, content: bytes | None = None
    ) -> bool:
        """Always: what was used last is the most recent."""
        return True
