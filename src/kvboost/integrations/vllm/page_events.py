"""What the worker's store gains and loses, as events about vLLM's pages, which routers know already.

The worker notes chunks (:class:`Changes`), the scheduler's side turns them into pages (:class:`PageEvents`) for vLLM's
own publisher. Invariants: a page is announced in a tier while a chunk in which it ends is stored there; pages of
requests with approximate KV are never announced; what is remembered is bounded.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvboost.types import Chunk, KVBlock

Change = tuple[str, bytes, bool]
"""A tier, the key of a chunk, and whether the tier has it now."""
_MAX_CHUNKS = 2**16


class Changes:
    """A :class:`kvboost.extend.StoreListener` that notes what changes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: list[Change] = []

    def stored(self, tier: str, block: KVBlock) -> None:
        """``tier`` has this block now."""
        with self._lock:
            self._changes.append((tier, block.key, True))

    def removed(self, tier: str, keys: Sequence[bytes]) -> None:
        """``tier`` has these blocks no more."""
        with self._lock:
            self._changes += [(tier, key, False) for key in keys]

    def drain(self) -> list[Change]:
        """What was noted since the last call."""
        with self._lock:
            changes, self._changes = self._changes, []
        return changes


@dataclass(frozen=True)
class PageEvent:
    """Pages that are in a tier now, or no more."""

    tier: str
    hashes: list[bytes]
    is_stored: bool
    parent: bytes | None = None
    tokens: list[int] = field(default_factory=list)
    lora: Any = None
    """vLLM's request for an adapter."""


@dataclass
class _Pages:
    """The pages that end in one chunk."""

    hashes: list[bytes]
    parent: bytes | None
    tokens: array[int]
    lora: Any
    tiers: set[str] = field(default_factory=set)
    """Where the chunk is stored."""


class PageEvents:
    """Turns chunks into pages. Used by the scheduler's one thread."""

    def __init__(self, block_size: int) -> None:
        """``block_size`` is the number of tokens in one of vLLM's pages."""
        self._size = block_size
        self._chunks: dict[bytes, _Pages] = {}
        """By key, oldest first."""
        self._counts: Counter[tuple[str, bytes]] = Counter()
        """Chunks of which a page is part, by tier and page: the end of a prompt may be part of two."""
        self._events: list[PageEvent] = []

    def describe(self, request: Any, chunks: Iterable[Chunk]) -> None:
        """Remember which pages of a request these chunks are, before they are stored or fetched."""
        hashes, size = request.block_hashes, self._size
        if len(hashes) != request.num_tokens // size:
            return  # vLLM names no pages (its prefix cache is off), or names others than these
        for chunk in chunks:
            first, last = chunk.start // size, chunk.end // size
            if first < last and chunk.prefix_key not in self._chunks:
                self._chunks[chunk.prefix_key] = _Pages(
                    list(hashes[first:last]),
                    hashes[first - 1] if first else None,
                    array("I", request.all_token_ids[first * size : last * size]),
                    request.lora_request,
                )
        while len(self._chunks) > _MAX_CHUNKS:
            self._forget(next(iter(self._chunks)))

    def apply(self, changes: Iterable[Change]) -> None:
        """The worker's store has changed. Chunks that were not described are left out."""
        for tier, key, is_stored in changes:
            pages = self._chunks.get(key)
            if pages is not None and is_stored and tier not in pages.tiers:
                self._store(tier, pages)
            elif pages is not None and not is_stored and tier in pages.tiers:
                self._remove(tier, pages)

    def clear(self) -> None:
        """Nothing of what is stored can be found any more."""
        for key in list(self._chunks):
            self._forget(key)

    def drain(self) -> list[PageEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def _store(self, tier: str, pages: _Pages) -> None:
        pages.tiers.add(tier)
        for index, page in enumerate(pages.hashes):
            self._counts[tier, page] += 1
            if self._counts[tier, page] == 1:
                parent = pages.hashes[index - 1] if index else pages.parent
                tokens = pages.tokens[index * self._size : (index + 1) * self._size].tolist()
                self._events.append(PageEvent(tier, [page], True, parent, tokens, pages.lora))

    def _remove(self, tier: str, pages: _Pages) -> None:
        pages.tiers.remove(tier)
        gone = []
        for page in pages.hashes:
            self._counts[tier, page] -= 1
            if not self._counts[tier, page]:
                del self._counts[tier, page]
                gone.append(page)
        if gone:
            self._events.append(PageEvent(tier, gone, False))

    def _forget(self, key: bytes) -> None:
        pages = self._chunks.pop(key)
        for tier in sorted(pages.tiers):
            self._remove(tier, pages)
