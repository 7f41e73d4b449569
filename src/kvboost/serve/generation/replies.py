"""The ids of generated replies, found by their text.

A reply comes back in a chat as text. Tokenising that text need not give the ids that were generated, and then none of
their KV would be found. Used by :class:`kvboost.serve.generation.prompts.ChatPrompts`. Invariant: a tenant finds its
own replies only, and all replies together take a bounded number of bytes, keys counted.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

_Key = tuple[str, str, bytes]
_KEY_BYTES = 450  # a key, its entry and an empty array: most of what a short reply takes


class ReplyMemory:
    """Replies by tenant, cache key and text; evicts the least recently used. Thread-safe."""

    def __init__(self, max_bytes: int = 16 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._replies: OrderedDict[_Key, array[int]] = OrderedDict()
        self._bytes = 0

    def remember(self, *, tenant: str, cache_key: str, before: str, reply: str, ids: Sequence[int]) -> None:
        """Keep the ids of ``reply``, which was generated after the rendered text ``before``."""
        kept = array("I", ids)
        if not reply or not ids or 2 * _cost(kept) > self._max_bytes:
            return
        keys = _keys(tenant, cache_key, before, reply)  # hashed before all others wait
        with self._lock:
            for key in keys:
                old = self._replies.pop(key, None)
                self._bytes += _cost(kept) - (_cost(old) if old is not None else 0)
                self._replies[key] = kept
            while self._bytes > self._max_bytes:
                _, gone = self._replies.popitem(last=False)
                self._bytes -= _cost(gone)

    def forget(self, tenant: str) -> None:
        """Forget those of a tenant."""
        with self._lock:
            for key in [key for key in self._replies if key[0] == tenant]:
                self._bytes -= _cost(self._replies.pop(key))

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._replies.clear()
            self._bytes = 0

    def find(self, *, tenant: str, cache_key: str, before: str | TextBefore, reply: str) -> list[int] | None:
        """The ids of ``reply`` after exactly this text, else after any other; None if it was not generated here."""
        keys = _keys(tenant, cache_key, before, reply)
        with self._lock:
            for key in keys:
                if key in self._replies:
                    self._replies.move_to_end(key)
                    return list(self._replies[key])
        return None


def _cost(kept: array[int]) -> int:
    return _KEY_BYTES + kept.itemsize * len(kept)


class TextBefore:
    """The beginning of a text, which grows: so a chat's turn is hashed once, and not for every turn after it."""

    def __init__(self, text: str) -> None:
        self._text, self._end = text, 0
        self._digest = hashlib.sha256()

    def grow(self, end: int) -> None:
        """It goes up to this character now; a smaller one than before changes nothing."""
        self._digest.update(self._text[self._end : end].encode())
        self._end = max(self._end, end)

    def digest(self, suffix: bytes) -> bytes:
        """Of the text so far and ``suffix``."""
        digest = self._digest.copy()
        digest.update(suffix)
        return digest.digest()


def _keys(tenant: str, cache_key: str, before: str | TextBefore, reply: str) -> tuple[_Key, _Key]:
    own = hashlib.sha256(reply.encode()).digest()
    if isinstance(before, str):
        text, before = before, TextBefore(before)
        before.grow(len(text))
    return (tenant, cache_key, before.digest(b"\0" + own)), (tenant, cache_key, own)
