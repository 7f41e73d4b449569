"""What a memory store knows of its blocks: whose they are, who holds them, and the leases that do.

Used by :mod:`kvboost.store.memory`, under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, Self, TypeVar

from kvboost.errors import StoreError
from kvboost.store.counters import Counters
from kvboost.types import NOTHING_LOADED, KVBlock, LoadReport

Found = TypeVar("Found", KVBlock, KVBlock | None)


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
