"""What the stores and tiers count, what was asked of each tier, and the contents they know by key.

Used by the stores and tiers, whose locks guard it unless it says otherwise. Invariant: reading it asks no tier.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from kvboost.extend import Tier
from kvboost.failures import Failures
from kvboost.types import StoreStats

T = TypeVar("T")


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


def sum_of(several: Iterable[Counters]) -> Counters:
    """What several have counted together."""
    counted = [asdict(each) for each in several]
    return Counters(**{field.name: sum(each[field.name] for each in counted) for field in fields(Counters)})


class ContentKeys:
    """The keys of the stored blocks by their content, oldest first."""

    def __init__(self) -> None:
        self._keys: dict[bytes, tuple[bytes, ...]] = {}

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


@dataclass
class TierWork:
    """What one tier has done since the store was opened, for all tenants."""

    loads: int = 0
    """Loads, of one or more chunks each."""
    load_seconds: float = 0.0
    """All loads together."""
    hits: int = 0
    """Chunks that came."""
    misses: int = 0
    """Chunks that were expected there and did not come."""
    loads_declined: int = 0
    """Chunks that were computed, because loading them was expected to take longer."""
    writes_dropped: int = 0
    """Blocks that were not written, because too much waited to be written already."""
    refused: int = 0
    """Blocks that it did not take: it was full, out of reach, or the beginning of the prompt was gone."""
    errors: int = 0
    """Calls that raised."""

    def add(self, other: TierWork) -> None:
        """Count this as well."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class TierCalls:
    """Asks tiers, and counts by their names what each did. What a tier raises is a miss. Thread-safe."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._work = defaultdict(TierWork, {name: TierWork() for name in names})
        self._failures: dict[str, Failures] = {}

    def ask(self, tier: Tier, otherwise: T, method: Callable[..., T], *arguments: Any) -> T:
        """What the tier answers, or ``otherwise`` if it raises."""
        return self._failures_of(tier.name).ask(otherwise, method, *arguments)

    def failed(self, tier: Tier, error: BaseException) -> None:
        """A tier raised this."""
        self._failures_of(tier.name).raised(error)

    def add(self, tier: Tier, work: TierWork) -> None:
        """A tier did this as well."""
        with self._lock:
            self._work[tier.name].add(work)

    def work(self) -> dict[str, TierWork]:
        """What each tier has done."""
        with self._lock:
            return {n: replace(work, errors=self._failures_of(n).total) for n, work in self._work.items()}

    def _failures_of(self, name: str) -> Failures:
        return self._failures.get(name) or self._failures.setdefault(name, Failures(f"{name} tier"))
