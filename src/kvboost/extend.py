"""Every Protocol an extension may implement.

Implementations are passed to the engine as objects; there is no registry: a Chunker as ``chunking=``, a
RepairStrategy as ``recompute_strategy=``, a ChunkStore as ``store=``. A Tier and an EvictionPolicy reach it in a
store: ``store=TieredStore(MemoryStore(n, policy=...), [tier])``. Chunkers, stores, tiers and policies have a
conformance suite in ``tests/contracts`` of the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvboost.types import BlockInfo, Chunk, KVBlock, LoadReport, PutOutcome, StoreStats

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
TokenArray = npt.NDArray[np.uint32]


@runtime_checkable
class Chunker(Protocol):
    """Decides where a prompt is cut. Pure: no state between calls, no side effects."""

    @property
    def spec(self) -> str:
        """Names the rule and all its parameters. Part of the fingerprint: equal specs make equal cuts."""
        ...

    @property
    def min_tokens(self) -> int:
        """The shortest chunk this rule makes (a caller's boundary may make a shorter one)."""
        ...

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        """Ends of the complete chunks, ascending, each at most ``len(tokens)``.

        Whether there is an end after token t may depend only on tokens and boundaries up to t, so equal prefixes have
        equal cuts. Every boundary in ``1..len(tokens)`` is an end. Tokens after the last end are an incomplete chunk
        and are not reported.
        """
        ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """Orders the keys of one store for eviction. Not thread-safe: the store holds its lock.

    For one prompt the store calls :meth:`found` at lookup, :meth:`inserted` for each chunk it stores, and :meth:`used`
    at the end. If a new chunk does not fit, the store calls :meth:`victim` until enough space is free, and
    :meth:`admits` after the first victim.
    """

    def inserted(
        self, key: bytes, *, parent: bytes | None = None, nbytes: int = 1, content: bytes | None = None
    ) -> None:
        """A block of ``nbytes`` was stored under ``key``. ``parent``, if stored, may not be evicted before it.

        ``content`` is the same for the same text at any position, and None without non-prefix reuse.
        """
        ...

    def found(self, chain: Sequence[bytes]) -> None:
        """A lookup found these keys, first chunk first. Also called with none."""
        ...

    def used(self, chain: Sequence[bytes]) -> None:
        """These keys, found and new ones, served one prompt, first chunk first. Not a second use of the found ones."""
        ...

    def removed(self, key: bytes) -> None:
        """The block under ``key`` was evicted or otherwise removed."""
        ...

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """The next key to evict among those that ``evictable`` allows; None if there is none. Removes nothing."""
        ...

    def admits(
        self, key: bytes, *, parent: bytes | None, nbytes: int, victim: bytes, content: bytes | None = None
    ) -> bool:
        """Whether to evict ``victim`` for a new block. If not, the block is not stored and ``victim`` stays.

        The chunks after it in its prompt are not stored either. A policy without admission control returns True.
        """
        ...


class _Held(Protocol):
    """Something that is held until released."""

    def release(self) -> None:
        """Release the blocks."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lease(_Held, Protocol):
    """Holds blocks against eviction until released. A context manager; releasing twice is harmless.

    A store with slower tiers may report where the blocks came from in an optional attribute ``loads``, a
    :class:`kvboost.types.LoadReport`; without it they count as found in memory.
    """

    @property
    def blocks(self) -> Sequence[KVBlock]:
        """The blocks held, first chunk first. Raises StoreError after release."""
        ...


class ContentLease(_Held, Protocol):
    """Like :class:`Lease`, for chunks that need not be contiguous: None where nothing was found."""

    @property
    def blocks(self) -> Sequence[KVBlock | None]:
        """One entry for each requested chunk. Raises StoreError after release."""
        ...


@runtime_checkable
class ChunkStore(Protocol):
    """Stores blocks. Thread-safe. A block that is absent, incompatible or damaged is a miss, never an error."""

    def lease(self, chunks: Sequence[Chunk]) -> Lease:
        """Hold the longest leading run of ``chunks`` that is stored with exactly these tokens.

        Counts hits and misses, and marks the held blocks as used.
        """
        ...

    def lease_content(self, chunks: Sequence[Chunk], *, after: int) -> ContentLease:
        """Hold, for each of ``chunks[after:]``, a block with exactly these tokens, computed at any position.

        Among several, the one whose context has the most in common with the chunks before it here; the chunks
        before ``after`` are context only. Counts what it finds as non-prefix hits and marks it as used.
        """
        ...

    def put(self, block: KVBlock) -> PutOutcome:
        """Store ``block``; evict others if needed.

        The store takes ownership: the caller must not write to the block's tensors afterwards. A block whose parent is
        not stored is refused, as no lookup could reach it. So is a block with an ``approx_depth`` above 0 whose content
        is already stored several times.
        """
        ...

    def used(self, chain: Sequence[bytes]) -> None:
        """Notify the eviction policy that these keys served one prompt, first chunk first."""
        ...

    def clear(self) -> None:
        """Drop every block. Open leases keep their tensors alive until released."""
        ...

    def stats(self) -> StoreStats:
        """Counters and sizes, consistent with each other."""
        ...

    def close(self) -> None:
        """Release every resource. The store may not be used afterwards."""
        ...


class StoreListener(Protocol):
    """Hears what a store's tiers gain and lose, such as :class:`kvboost.fleet.events.StoreEvents`.

    It is called while the tier is locked: it must be quick, must not call back and must not raise.
    """

    def stored(self, tier: str, block: KVBlock) -> None:
        """``tier`` has this block now. It may hear again of one that it had."""
        ...

    def removed(self, tier: str, keys: Sequence[bytes]) -> None:
        """``tier`` has these blocks no more. It may hear of some that it never had."""
        ...


@runtime_checkable
class LayeredStore(ChunkStore, Protocol):
    """A store with slower tiers below its memory, whose blocks may take time to arrive.

    It may have ``contains(keys, *, where, tenant)`` too, which says which of these keys are stored there: only then are
    the ends of earlier prompts found, and the states of recurrent layers.
    """

    def lease(
        self,
        chunks: Sequence[Chunk],
        *,
        arrived: Callable[[Chunk, KVBlock], None] | None = None,
        fetched: LoadReport | None = None,
    ) -> Lease:
        """As :meth:`ChunkStore.lease`; ``arrived`` is called with each block as soon as it arrives.

        ``fetched`` is what :meth:`fetch` returned for this prompt: then only the memory is looked at, without waiting
        for a tier.
        """
        ...

    def lease_content(self, chunks: Sequence[Chunk], *, after: int, fetched: LoadReport | None = None) -> ContentLease:
        """As :meth:`ChunkStore.lease_content`; after :meth:`fetch_content`, only the memory is looked at."""
        ...

    def fetch(self, chunks: Sequence[Chunk]) -> tuple[LoadReport, int]:
        """Bring the leading chunks up into memory, and return how many of them are there. Holds and counts nothing."""
        ...

    def fetch_content(self, chunks: Sequence[Chunk], *, after: int) -> LoadReport:
        """Bring up what :meth:`lease_content` would hold. Holds and counts nothing."""
        ...

    def in_background(self, work: Callable[[], T], *, tenant: str = "") -> Future[T] | None:
        """Run ``work``, which calls this store for a tenant, on a thread of the store; None if too much waits already.

        Tenants should not wait for each other's work.
        """
        ...

    def leading_run(self, chunks: Sequence[Chunk]) -> int:
        """How many of ``chunks`` a lease would probably hold. Counts nothing."""
        ...

    def contains_content(self, chunks: Sequence[Chunk]) -> Sequence[bool]:
        """Which of these are probably stored somewhere, at whatever position. Loads nothing."""
        ...

    def flush(self) -> None:
        """Return once everything put so far is as durable as the tiers make it."""
        ...


@runtime_checkable
class Tier(Protocol):
    """One level of a tiered store: blocks by key, within a byte budget. Thread-safe.

    A block that is absent, damaged, foreign or unreachable is a miss, never an error. The first failure of a kind is
    logged, the others are counted. A tier opened for one namespace never shows another's blocks.
    """

    @property
    def name(self) -> str:
        """The kind of tier in statistics, such as ``"disk"`` or ``"redis"``."""
        ...

    @property
    def outlives_process(self) -> bool:
        """Whether blocks survive the process. Such a tier is written in the background (write-behind)."""
        ...

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Which of these can probably be loaded. A hint that may be outdated; takes one round trip."""
        ...

    def variants(self, content_keys: Sequence[bytes]) -> Sequence[Sequence[BlockInfo]]:
        """For each content key, a few blocks that probably hold it, newest last. A hint; takes one round trip."""
        ...

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        """The blocks under these keys, in this order, each as soon as it arrives; None for a miss.

        Every block has passed its record's checks and carries the requested key. The caller compares the tokens.
        """
        ...

    def store(self, block: KVBlock) -> PutOutcome:
        """Store ``block``, evicting others to stay within the budget. A parent is evicted after its successors."""
        ...

    def used(self, chain: Sequence[bytes]) -> Sequence[bytes] | None:
        """The keys of one prompt were used, first chunk first. May be recorded later.

        A tier that learns by it which of them it lacks may return those: what is still in memory is stored again.
        """
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Drop these blocks, if stored."""
        ...

    def flush(self) -> None:
        """Return once everything stored so far is as durable as this tier makes it."""
        ...

    def clear(self) -> None:
        """Drop every block of this namespace."""
        ...

    def stats(self) -> StoreStats:
        """Counters and sizes."""
        ...

    def close(self) -> None:
        """Release every resource. The tier may not be used afterwards; what it stored stays."""
        ...


@runtime_checkable
class TellingTier(Protocol):
    """A tier that can tell what it removes. Only such a tier is announced to a :class:`StoreListener`."""

    def on_remove(self, removed: Callable[[bytes], None]) -> None:
        """Call ``removed`` with the key of every block that this process removes from now on, of any namespace.

        As a listener, it is called while the tier is locked.
        """
        ...


@dataclass(frozen=True)
class RepairSituation:
    """What a repair strategy may use to select positions. Every tensor has one entry per position."""

    layer: int
    """The layer the positions are about to enter; 0 is before anything was computed."""
    layer_count: int
    positions: torch.Tensor
    """Positions of the repositioned tokens that are still candidates, ascending."""
    span_starts: torch.Tensor
    """For each position, where its repositioned span begins."""
    span_ends: torch.Tensor
    """For each position, where that span ends."""
    budget: int
    """How many positions the recompute ratio allows. Advice: whether recomputing pays is estimated with that ratio."""
    attention: torch.Tensor | None
    """Attention of the suffix tokens on each position, if the strategy has ``attention_layers``."""
    key_change: torch.Tensor | None
    value_change: torch.Tensor | None
    """Squared relative change of each position's keys and values in the layer before, if it was watched."""


@runtime_checkable
class RepairStrategy(Protocol):
    """Selects which positions of repositioned chunks are recomputed. A frozen dataclass: no state between calls.

    It is not asked at a ``recompute_ratio`` of 0 (none) or 1 (all). Set the ratio to the share that it takes: whether
    chunks are repositioned at all is decided with it. Without ``attention_layers`` there is no error estimate.
    """

    @property
    def name(self) -> str:
        """Reported in every result it was used for."""
        ...

    @property
    def spreads(self) -> bool:
        """Whether the change of the selected positions is spread to their neighbours."""
        ...

    def attention_layers(self, layer_count: int) -> range:
        """The layers whose suffix attention the strategy needs; empty for none."""
        ...

    def decision_layers(self, layer_count: int) -> Sequence[int]:
        """The layers before which :meth:`choose` is called, ascending. 0 is before anything is computed."""
        ...

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """Which positions continue: ascending indices, so that ``situation.positions[result]`` are those positions."""
        ...
