"""Every Protocol an extension may implement: the one file an extender reads.

Each has a conformance suite in :mod:`kvboost.testing`. Implementations are handed to the engine as
objects; there is no registry to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvboost.types import BlockInfo, Chunk, KVBlock, PutOutcome, StoreStats

if TYPE_CHECKING:
    import torch

TokenArray = npt.NDArray[np.uint32]


@runtime_checkable
class Chunker(Protocol):
    """Decides where a prompt is cut. Pure: no state between calls, no side effects."""

    @property
    def spec(self) -> str:
        """Names the rule and every parameter of it. Part of the fingerprint: equal spec, equal cuts."""
        ...

    @property
    def min_tokens(self) -> int:
        """The shortest chunk this rule makes by itself (a caller's boundary may make a shorter one)."""
        ...

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        """Ends of the complete chunks, ascending, each at most ``len(tokens)``.

        Whether there is an end after token t may depend on tokens up to t and on boundaries up to t,
        and on nothing else: so equal prefixes have equal cuts. Every boundary in ``1..len(tokens)``
        is an end. Tokens behind the last end are an incomplete chunk and are not reported.
        """
        ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """Orders the keys of one store by who should go first. Not thread-safe: the store holds its lock.

    Of one prompt a policy hears :meth:`found` when it is looked up, :meth:`inserted` for each chunk stored because of
    it, and :meth:`used` at its end. Before a chunk is stored that others must make room for, :meth:`victim` is asked
    until there is room, and :meth:`admits` after the first of them.
    """

    def inserted(
        self, key: bytes, *, parent: bytes | None = None, nbytes: int = 1, content: bytes | None = None
    ) -> None:
        """A block of ``nbytes`` was stored under ``key``. ``parent``, if it is stored, may not go before it.

        ``content`` is the same for the same text wherever it stands, and None where nothing is ever moved.
        """
        ...

    def found(self, chain: Sequence[bytes]) -> None:
        """A prompt was looked up and these keys were stored, first chunk first. Also called if there are none."""
        ...

    def used(self, chain: Sequence[bytes]) -> None:
        """These keys served one prompt, first chunk first, found and new ones alike. No new use of what was found."""
        ...

    def removed(self, key: bytes) -> None:
        """The block under ``key`` is gone, by eviction or otherwise."""
        ...

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """The key to evict next among those that ``evictable`` allows; None if there is none. Removes nothing."""
        ...

    def admits(
        self, key: bytes, *, parent: bytes | None, nbytes: int, victim: bytes, content: bytes | None = None
    ) -> bool:
        """Whether a block that is not stored is worth the place of ``victim``. If not, neither happens.

        What would follow it in its prompt is not stored either. A policy without an opinion says True.
        """
        ...


class Lease(Protocol):
    """Holds blocks against eviction until released. A context manager; releasing twice is harmless.

    A store with slower tiers may say where the blocks came from in a further attribute ``loads``, a
    :class:`kvboost.types.LoadReport`; without it they count as found in memory.
    """

    @property
    def blocks(self) -> Sequence[KVBlock]:
        """The blocks held, first chunk first. Raises StoreError after release."""
        ...

    def release(self) -> None:
        """Let the blocks go."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ContentLease(Protocol):
    """Like :class:`Lease`, for chunks that need not stand side by side: None where nothing was found."""

    @property
    def blocks(self) -> Sequence[KVBlock | None]:
        """One entry for each chunk asked for. Raises StoreError after release."""
        ...

    def release(self) -> None:
        """Let the blocks go."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class ChunkStore(Protocol):
    """Keeps blocks. Thread-safe. A block that is absent, unfit or damaged is a miss, never an error."""

    def lease(self, chunks: Sequence[Chunk]) -> Lease:
        """Hold the longest leading run of ``chunks`` that is stored with exactly these tokens.

        Counts hits and misses and marks what it holds as used.
        """
        ...

    def lease_content(self, chunks: Sequence[Chunk], *, after: int) -> ContentLease:
        """Hold, for each of ``chunks[after:]``, a block with exactly these tokens, wherever it was computed.

        Of several, the one whose own context shares most with the chunks that stand before it here; the
        ones before ``after`` are context only. Counts what it finds as moved hits and marks it as used.
        """
        ...

    def put(self, block: KVBlock) -> PutOutcome:
        """Keep ``block``; evict others to make room.

        The store takes ownership: the caller must not write to the block's tensors afterwards.
        A block whose parent is not stored is refused, as no lookup could reach it. So is one of a
        approx_depth above 0 if its content is stored several times already.
        """
        ...

    def used(self, chain: Sequence[bytes]) -> None:
        """Tell the eviction policy that these keys served one prompt, first chunk first."""
        ...

    def clear(self) -> None:
        """Forget every block. Leases that are out keep their tensors alive until released."""
        ...

    def stats(self) -> StoreStats:
        """Counters and sizes, consistent with each other."""
        ...

    def close(self) -> None:
        """Release every resource. The store may not be used afterwards."""
        ...


@runtime_checkable
class LayeredStore(ChunkStore, Protocol):
    """A store with slower tiers below its memory: what it is asked for may still be on its way."""

    def lease(self, chunks: Sequence[Chunk], *, arrived: Callable[[Chunk, KVBlock], None] | None = None) -> Lease:
        """As every store's; ``arrived`` is told of each block as soon as it is here, before the lease is."""
        ...

    def leading_run(self, chunks: Sequence[Chunk]) -> int:
        """How many of ``chunks`` a lease would probably hold. Counts nothing."""
        ...

    def knows_content(self, chunks: Sequence[Chunk]) -> bool:
        """Whether all of these are probably stored somewhere. Loads nothing."""
        ...

    def prefetch(self, chunks: Sequence[Chunk]) -> Future[int]:
        """Bring the leading chunks up into memory, in the background. The result is how many tokens came."""
        ...

    def flush(self) -> None:
        """Return once everything put so far is as safe as the tiers make it."""
        ...


@runtime_checkable
class Tier(Protocol):
    """One level of a tiered store: blocks by key, within a byte budget. Thread-safe.

    What is absent, damaged, foreign or out of reach is a miss and never an error; the first trouble of a kind is
    one warning, the others are counted. A tier opened for one namespace never shows another's blocks.
    """

    @property
    def name(self) -> str:
        """Of the kind, in statistics: ``"disk"``, ``"redis"``."""
        ...

    @property
    def outlives_process(self) -> bool:
        """Whether what is stored here is found again by the next process. Such a tier is written to behind a put."""
        ...

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Which of these can probably be loaded. A hint, in one round trip: it may be wrong a moment later."""
        ...

    def variants(self, content_keys: Sequence[bytes]) -> Sequence[Sequence[BlockInfo]]:
        """For each content, blocks that probably hold it, newest last, a few at most. A hint, in one round trip."""
        ...

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        """The blocks under these keys, in this order, each as soon as it is here; None for a miss.

        Every block has passed its record's checks and carries the key asked for. The caller compares the tokens.
        """
        ...

    def store(self, block: KVBlock) -> PutOutcome:
        """Keep ``block``, evicting others to stay within the budget; parents outlast their successors."""
        ...

    def used(self, chain: Sequence[bytes]) -> None:
        """The keys of one prompt were used, first chunk first. May be written down later."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these blocks, if they are here."""
        ...

    def flush(self) -> None:
        """Return once everything stored so far is as safe as this tier makes it."""
        ...

    def clear(self) -> None:
        """Forget every block of this namespace."""
        ...

    def stats(self) -> StoreStats:
        """Counters and sizes."""
        ...

    def close(self) -> None:
        """Release every resource. The tier may not be used afterwards; what it stored stays."""
        ...


@dataclass(frozen=True)
class RepairSituation:
    """What a repair strategy may look at when it chooses rows. Every tensor has one entry per row."""

    layer: int
    """The layer the rows are about to enter; 0 is before anything was computed."""
    layer_count: int
    rows: torch.Tensor
    """Positions, ascending, of the moved rows that are still candidates."""
    starts: torch.Tensor
    """For each row, where the moved stretch it belongs to begins."""
    ends: torch.Tensor
    """For each row, where that stretch ends."""
    budget: int
    """How many rows may be recomputed, after the ratio asked for."""
    attention: torch.Tensor | None
    """How much the live tokens look at each row, if the strategy asked for it."""
    key_change: torch.Tensor | None
    value_change: torch.Tensor | None
    """How far the layer before moved each row's keys and values, squared, if it was watched."""


@runtime_checkable
class RepairStrategy(Protocol):
    """Chooses which rows of moved chunks are computed again. A frozen dataclass: no state between calls."""

    @property
    def name(self) -> str:
        """Named in every result it had a part in."""
        ...

    @property
    def spreads(self) -> bool:
        """Whether what the chosen rows changed is carried over to their neighbours."""
        ...

    def attention_layers(self, layer_count: int) -> range:
        """The layers in which the live tokens' attention is wanted; empty for none."""
        ...

    def decision_layers(self, layer_count: int) -> Sequence[int]:
        """Before which layers :meth:`choose` is called, ascending. 0 is before anything is computed."""
        ...

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The rows that go on: indices into ``situation.rows``, ascending. May be empty."""
        ...


class Streamer(Protocol):
    """What Transformers calls a streamer: ``put`` with the prompt first, then with every new token."""

    def put(self, value: Any) -> None:
        """Take the next token ids, as a tensor."""
        ...

    def end(self) -> None:
        """The generation is over."""
        ...
