"""One lookup through slower tiers: what came from where, what was declined, and which lookup loads what.

Used by :class:`kvboost.store.tiered.TieredStore`. Invariants: a key is claimed by one lookup at a time; a lookup that
waits for another's key holds no claim itself, so that nobody waits for ever; a claim ends with its lookup, however
that ends; what a tier does wrong is a miss.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvboost.extend import Tier
from kvboost.store.counters import TierCalls, TierWork
from kvboost.store.held import best_variant
from kvboost.store.memory import MemoryStore
from kvboost.streams import Streams
from kvboost.types import (
    NOTHING_LOADED,
    TOKEN_BYTES,
    BlockInfo,
    Chunk,
    DeclinedLoad,
    KVBlock,
    LoadReport,
    PutOutcome,
    context_mark,
)

T = TypeVar("T")

_MAX_WAITING = 64  # jobs of one thread that loads ahead, the one under way included
_FADE = 0.9  # of earlier loads with each new one: the last ten or so count


@dataclass(frozen=True, slots=True)
class LoadRules:
    """When a block of a slower tier is loaded, and how it comes into memory."""

    compute_seconds: Callable[[int], float] | None = None
    """What computing so many tokens would take: loading is declined where that is less."""
    fits: Callable[[KVBlock], bool] = lambda block: True
    """Whether a block that was loaded is one for this model."""
    to_memory: Callable[[Iterator[KVBlock | None]], Iterator[KVBlock | None]] = lambda blocks: blocks
    """Brings what a tier gives, in its order, to where the memory store has its tensors."""
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
    rejected: int = 0
    """Blocks that came and were not the chunk's, or not of this model."""
    _declined: list[tuple[str, Sequence[Chunk], float, float]] = field(default_factory=list)

    @property
    def declined(self) -> int:
        """Chunks that a tier has and that are computed instead."""
        return sum(len(chunks) for _, chunks, _, _ in self._declined)

    def came(self, chunk: Chunk, block: KVBlock, tier: str) -> None:
        """A block came from there and lies in memory."""
        self.tiers[block.key] = tier
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


class Background:
    """A thread that loads ahead of requests, in order of arrival; the work that waits is bounded."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvboost-prefetch")
        self._free = threading.Semaphore(_MAX_WAITING)

    def run(self, work: Callable[[], T]) -> Future[T] | None:
        """Run ``work`` later; None if too much waits already, or if the machine has no thread for it."""
        if not self._free.acquire(blocking=False):
            return None
        try:
            future = self._pool.submit(work)
        except RuntimeError:
            self._free.release()
            return None
        future.add_done_callback(lambda _: self._free.release())
        return future

    def close(self) -> None:
        """Drop what waits and return once the rest is done."""
        self._pool.shutdown(cancel_futures=True)


class Loader:
    """Brings chunks up from tiers into the memory store, each from the fastest that has it. Thread-safe."""

    def __init__(
        self,
        memory: MemoryStore,
        calls: TierCalls,
        *,
        rules: LoadRules,
        streams: Streams,
        save: Callable[[KVBlock, Sequence[Tier]], None],
        missing: Callable[[Tier, bytes], None],
    ) -> None:
        """``save`` gets each block with the faster tiers that lacked it; ``missing`` what a tier turned out to lack."""
        self._memory, self._calls, self.rules, self._streams = memory, calls, rules, streams
        self._save, self._missing = save, missing
        self._lock = threading.Lock()
        self.claims = Claims()
        self.speeds: defaultdict[str, Speed] = defaultdict(Speed)
        """What loading took, by the tiers' names."""
        self._token_bytes = 0.0  # of the last block seen

    def leading_run(self, tier: Tier, keys: Sequence[bytes]) -> int:
        """How many of the first of these a tier probably has."""
        there: Sequence[bool] = self._calls.ask(tier, [], tier.contains, keys)
        return next((index for index, found in enumerate(there) if not found), len(there))

    def run(self, tiers: Sequence[Tier], chunks: Sequence[Chunk], lookup: Lookup) -> None:
        """Load as many of ``chunks`` as follow each other without a gap, each from the fastest tier that has it."""
        with self.claims.claim(chunks, self._memory.leading_run) as known:
            chunks = chunks[known:]
            for at, tier in enumerate(tiers):
                if not chunks:
                    return
                keys = [chunk.prefix_key for chunk in chunks]
                run = chunks[: self.leading_run(tier, keys)]
                if run and self._pays(tier, run, lookup):
                    chunks = chunks[self._load(tiers[: at + 1], run, keys[: len(run)], lookup, gaps=False) :]

    def content(self, tiers: Sequence[Tier], chunks: Sequence[Chunk], after: int, lookup: Lookup) -> None:
        """Load for each unknown one of ``chunks[after:]`` the variant that fits best, from the fastest tier."""
        missing = [after + index for index in self._memory.unknown_content(chunks[after:])]
        for at, tier in enumerate(tiers):
            if not missing:
                return
            contents = [chunks[index].content_key for index in missing]
            variants: Sequence[Sequence[BlockInfo]] = self._calls.ask(tier, [], tier.variants, contents)
            wanted: dict[int, BlockInfo] = {}
            for index, found in zip(missing, variants, strict=False):
                marks = {context_mark(chunk.content_key) for chunk in chunks[:index]}
                best = best_variant(found, marks=marks)
                if best is not None:
                    wanted[index] = best
            run = [chunks[index] for index in wanted]
            if run and self._pays(tier, run, lookup, saves=self.rules.content_saves):
                self._load(tiers[: at + 1], run, [info.key for info in wanted.values()], lookup, gaps=True)
                missing = [index for index in missing if self._memory.unknown_content([chunks[index]])]

    def _pays(self, tier: Tier, chunks: Sequence[Chunk], lookup: Lookup, *, saves: float = 1.0) -> bool:
        """Whether loading these is expected to be faster than the computing it ``saves``."""
        if self.rules.compute_seconds is None:
            return True
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        compute = saves * self.rules.compute_seconds(tokens)
        with self._lock:
            load = self.speeds[tier.name].expected(self._token_bytes * tokens)
            if load <= compute:
                return True
            self.speeds[tier.name].declined()
        self._calls.add(tier, TierWork(loads_declined=len(chunks)))
        lookup.decline(tier.name, chunks, load_seconds=load, compute_seconds=compute)
        return False

    def _load(
        self, tiers: Sequence[Tier], chunks: Sequence[Chunk], keys: Sequence[bytes], lookup: Lookup, *, gaps: bool
    ) -> int:
        """Load these blocks from the last of ``tiers``; without ``gaps`` only up to the first miss. How many came."""
        *higher, tier = tiers
        began, nbytes, came, missed = time.perf_counter(), 0, 0, 0
        with closing(self._loaded(tier, keys)) as blocks:
            for chunk, key, loaded in zip(chunks, keys, blocks, strict=False):
                if loaded is None or not self._accepted(loaded, chunk, key):
                    missed += 1
                    if loaded is None:
                        self._missing(tier, key)
                    else:
                        lookup.rejected += 1
                    if gaps:
                        continue
                    break
                nbytes += loaded.nbytes
                block = replace(loaded, tenant=chunk.tenant)
                # Found by content alone, its own beginning need not be here.
                outcome = self._memory.put(replace(block, parent_key=None) if gaps else block)
                if outcome is PutOutcome.REFUSED:
                    break
                came += 1
                self.note_size(block)
                self._save(block, [other for other in higher if other.outlives_process])
                self.claims.arrived(block.key)
                if outcome is PutOutcome.STORED:
                    if lookup.arrived is not None:
                        self._streams.join()  # the caller places it at once
                    lookup.came(chunk, block, tier.name)
        seconds = time.perf_counter() - began
        with self._lock:
            self.speeds[tier.name].observe(seconds=seconds, nbytes=nbytes)
        self._calls.add(tier, TierWork(loads=1, load_seconds=seconds, hits=came, misses=missed))
        return came

    def _loaded(self, tier: Tier, keys: Sequence[bytes]) -> Generator[KVBlock | None]:
        try:
            yield from self.rules.to_memory(tier.load(keys))
        except Exception as error:  # noqa: BLE001 - whatever a tier raises is a miss
            self._calls.failed(tier, error)

    def _accepted(self, block: KVBlock, chunk: Chunk, key: bytes) -> bool:
        named = (block.key, block.tokens, block.content_key) == (key, chunk.tokens, chunk.content_key)
        return named and self.rules.fits(block)

    def note_size(self, block: KVBlock) -> None:
        """A block of the model has so many bytes for each of its tokens."""
        if block.tokens:  # not a state's
            self._token_bytes = block.nbytes / (len(block.tokens) // TOKEN_BYTES)
