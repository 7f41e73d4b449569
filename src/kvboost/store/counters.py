"""What the stores and tiers count, and the contents they know by key. Their locks guard both."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvboost.types import StoreStats


@dataclass
class Counters:
    """What one store or tier has done since it was opened."""

    hits: int = 0
    misses: int = 0
    rejected: int = 0
    evictions: int = 0
    refused: int = 0
    content_hits: int = 0

    def looked_up(self, *, found: bool) -> None:
        """One more lookup ended."""
        self.hits += found
        self.misses += not found

    def stats(self, tier: str, *, chunks: int, nbytes: int, capacity_bytes: int, leased: int = 0) -> StoreStats:
        """These counters together with what is held now."""
        return StoreStats(
            tier=tier, chunks=chunks, bytes=nbytes, capacity_bytes=capacity_bytes, leased=leased, **asdict(self)
        )


class ContentKeys:
    """The keys of the stored blocks by their content, oldest first."""

    def __init__(self) -> None:
        self._keys: dict[bytes, tuple[bytes, ...]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def of(self, content: bytes) -> tuple[bytes, ...]:
        """The keys of the blocks that hold this content."""
        return self._keys.get(content, ())

    def add(self, content: bytes, key: bytes) -> None:
        """A block was stored."""
        self._keys[content] = (*self.of(content), key)

    def remove(self, content: bytes, key: bytes) -> None:
        """A block is gone."""
        others = tuple(other for other in self._keys[content] if other != key)
        if others:
            self._keys[content] = others
        else:
            del self._keys[content]
