"""One lookup through slower tiers: what came from where, what was declined, and which lookup loads what.

Used by :class:`kvboost.store.tiered.TieredStore`. Invariants: a key is claimed by one lookup at a time; a lookup that
waits for another's key holds no claim itself, so that nobody waits for ever; a claim ends with its lookup, however
that ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvboost.types import NOTHING_LOADED, Chunk, DeclinedLoad, KVBlock, LoadReport

_FADE = 0.9  # of earlier loads with each new one: the last ten or so count


@dataclass(frozen=True, slots=True)
class LoadRules:
    """When a block of a slower tier is loaded, and how it comes into memory."""

    compute_seconds: Callable[[int], float] | None = None
    """What computing so many tokens would take: loading is declined where that is less."""
    fits: Callable[[KVBlock], bool] = lambda block: True
    """Whether a block that was loaded is one for this model."""
    to_memory: Callable[[KVBlock], KVBlock] = lambda block: block
    """Brings it to where the memory store has its tensors."""
    content_saves: float = 1.0
    """The share of computing that a block found by content saves at best: some of its tokens are recomputed."""


@dataclass
class Speed:
    """What loading from one tier took, lately."""

    seconds: float = 0.0
    bytes: float = 0.0

    def observe(self, *, seconds: float, nbytes: int) -> None:
        """A load took so long."""
        self.seconds = _FADE * self.seconds + seconds
        self.bytes = _FADE * self.bytes + nbytes

    def declined(self) -> None:
        """Bad luck must not decide for ever: with time it is tried again."""
        self.seconds *= _FADE

    def expected(self, nbytes: float) -> float:
        """Seconds; nothing before the first load, so that it is tried."""
        return self.seconds / self.bytes * nbytes if self.bytes else 0.0


@dataclass
class Lookup:
    """What happens while the chunks of one prompt are looked for."""

    arrived: Callable[[Chunk, KVBlock], None] | None = None
    """Told of every block that is in memory now, while the next ones are still on their way."""
    tiers: dict[bytes, str] = field(default_factory=dict)
    tokens: int = 0
    """How many came."""
    _declined: list[tuple[str, Sequence[Chunk], float, float]] = field(default_factory=list)

    def came(self, chunk: Chunk, block: KVBlock, tier: str) -> None:
        """A block came from there and lies in memory."""
        self.tiers[block.key] = tier
        self.tokens += chunk.end - chunk.start
        if self.arrived is not None:
            self.arrived(chunk, block)

    def decline(self, tier: str, chunks: Sequence[Chunk], *, load_seconds: float, compute_seconds: float) -> None:
        """The tier has these, but computing them is faster."""
        self._declined.append((tier, chunks, load_seconds, compute_seconds))

    def report(self, left: Set[int]) -> LoadReport:
        """All of it. Of what was declined only the chunks that start at ``left``: another tier may have been faster."""
        if not self.tiers and not self._declined:
            return NOTHING_LOADED  # most lookups find all or nothing
        declined: list[DeclinedLoad] = []
        starts: dict[int, int] = {}
        for tier, chunks, load, compute in self._declined:
            computed = {chunk.start: chunk.end - chunk.start for chunk in chunks if chunk.start in left}
            if computed:
                declined.append(DeclinedLoad(tier, sum(computed.values()), load, compute))
                starts |= computed
        return LoadReport(self.tiers, tuple(declined), starts)


def left_of(report: LoadReport, left: Set[int]) -> LoadReport:
    """A report of loads of which only chunks that start at ``left`` were not found: others may be in memory now."""
    if not report.declined_at:
        return report
    declined_at = {start: tokens for start, tokens in report.declined_at.items() if start in left}
    return replace(report, declined=report.declined if declined_at else (), declined_at=declined_at)


class Claims:
    """Which keys are being loaded: a second lookup for the same ones waits instead of loading them again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._claimed: set[bytes] = set()

    @contextmanager
    def claim(self, chunks: Sequence[Chunk], known: Callable[[Sequence[Chunk]], int]) -> Iterator[int]:
        """Wait while the first of ``chunks`` that is not ``known`` is another's; claim it and what follows it.

        Gives the number of chunks that are known by then.
        """
        mine: set[bytes] = set()
        with self._changed:
            count = known(chunks)
            while count < len(chunks) and chunks[count].prefix_key in self._claimed:
                self._changed.wait()
                count = known(chunks)
            mine.update(chunk.prefix_key for chunk in chunks[count:])
            mine -= self._claimed
            self._claimed |= mine
        try:
            yield count
        finally:
            if mine:
                with self._changed:
                    self._claimed -= mine
                    self._changed.notify_all()

    def arrived(self, key: bytes) -> None:
        """This one is in memory: lookups that wait for it may go on."""
        with self._changed:
            self._claimed.discard(key)
            self._changed.notify_all()
