"""What a memory store knows of its blocks: whose they are, who holds them, the leases that do, which fits best.

Used by :mod:`kvboost.store.memory`, under its lock; :func:`best_variant` by lookups in tiers too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, Self, TypeVar

from kvboost.errors import StoreError
from kvboost.store.counters import Counters
from kvboost.types import CONTEXT_MARK_BYTES, NOTHING_LOADED, BlockInfo, KVBlock, LoadReport

AnyBlock = TypeVar("AnyBlock", KVBlock, BlockInfo)
Found = TypeVar("Found", KVBlock, KVBlock | None)

_ENOUGH_CONTEXT = 4  # chunks; how little context a chunk had counts only below this


@dataclass(slots=True, eq=False)
class Share:
    """What one tenant holds of the memory, and what was counted of its requests."""

    bytes: int = 0
    chunks: int = 0
    leased: int = 0
    looked: float = field(default_factory=lambda: monotonic())
    counters: Counters = field(default_factory=Counters)


@dataclass(slots=True, eq=False)
class Entry:
    """A stored block, and who needs it."""

    block: KVBlock
    share: Share
    leases: int = 0
    successors: int = 0
    uses: int = 0


class MemoryLease(Generic[Found]):
    """Blocks of a :class:`MemoryStore`, held against eviction until released."""

    loads: LoadReport = NOTHING_LOADED
    """What the tiers below did for this lookup; set by the store above them."""

    def __init__(
        self, entries: Sequence[Entry], blocks: Sequence[Found], *, release: Callable[[Sequence[Entry]], None]
    ) -> None:
        self._entries, self._release = entries, release
        self._blocks: Sequence[Found] | None = blocks

    @property
    def blocks(self) -> Sequence[Found]:
        """First chunk first; of chunks looked for by content, None where there was none."""
        if self._blocks is None:
            raise StoreError("this lease was released; take a new one before reading blocks")
        return self._blocks

    def release(self) -> None:
        """Let the blocks go. Harmless the second time."""
        entries, self._entries, self._blocks = self._entries, (), None
        if entries:
            self._release(entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def best_variant(blocks: Sequence[AnyBlock], *, marks: Set[bytes]) -> AnyBlock | None:
    """The block that shares most of its context with ``marks``; then the one with more context; then the newest.

    A chunk's keys and values depend on what stood before it when they were computed; the more of that stands before it
    now, the less is wrong with them.
    """
    best: AnyBlock | None = None
    best_score = (-1, -1, 0)
    for block in blocks:
        own = {block.context[i : i + CONTEXT_MARK_BYTES] for i in range(0, len(block.context), CONTEXT_MARK_BYTES)}
        score = (len(own & marks), min(len(own), _ENOUGH_CONTEXT), -block.approx_depth)
        if score >= best_score:
            best, best_score = block, score
    return best
