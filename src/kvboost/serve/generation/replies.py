"""The ids of replies that were produced here, found again by their text.

A reply that comes back in a chat is text, and its text tokenised need not give the ids that were produced: then none
of their KV would be found. Filled and asked by :class:`kvboost.serve.generation.prompts.ChatPrompts`. Invariant: what
is found belongs to the tenant who asks, and what is kept takes no more memory than ``most_ids`` ids, keys counted.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

_Key = tuple[str, str, bytes]
_IDS_PER_KEY = (
    64  # that take as much memory as a key: otherwise many short replies would take a hundred times the bound
)


class ReplyMemory:
    """Replies by tenant, cache key and text, the least recently used forgotten first. Thread-safe."""

    def __init__(self, most_ids: int = 2_000_000) -> None:
        self._most_ids = most_ids
        self._lock = threading.Lock()
        self._replies: OrderedDict[_Key, array[int]] = OrderedDict()
        self._ids = 0

    def remember(self, *, tenant: str, cache_key: str, before: str, reply: str, ids: Sequence[int]) -> None:
        """Keep the ids of ``reply``, which was produced behind the rendered text ``before``."""
        if not reply or not ids or len(ids) + _IDS_PER_KEY > self._most_ids // 2:
            return
        kept = array("I", ids)
        with self._lock:
            for key in _keys(tenant, cache_key, before, reply):
                old = self._replies.pop(key, None)
                self._ids += _cost(kept) - (_cost(old) if old is not None else 0)
                self._replies[key] = kept
            while self._ids > self._most_ids:
                _, gone = self._replies.popitem(last=False)
                self._ids -= _cost(gone)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._replies.clear()
            self._ids = 0

    def find(self, *, tenant: str, cache_key: str, before: str, reply: str) -> list[int] | None:
        """The ids of ``reply`` behind exactly this text, else behind any other; None if it was not produced here."""
        with self._lock:
            for key in _keys(tenant, cache_key, before, reply):
                if key in self._replies:
                    self._replies.move_to_end(key)
                    return list(self._replies[key])
        return None


def _cost(kept: array[int]) -> int:
    return len(kept) + _IDS_PER_KEY


def _keys(tenant: str, cache_key: str, before: str, reply: str) -> tuple[_Key, _Key]:
    own = hashlib.sha256(reply.encode()).digest()
    behind = hashlib.sha256(before.encode() + b"\0" + own).digest()
    return (tenant, cache_key, behind), (tenant, cache_key, own)
