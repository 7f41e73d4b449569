"""Plain frozen data that every other module passes around.

Nothing here imports torch: planning and bookkeeping must run, and be tested, without it.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from kvboost.results import DeclinedLoad as DeclinedLoad
from kvboost.results import GenerationResult as GenerationResult
from kvboost.results import PrefillResult as PrefillResult
from kvboost.results import ReuseReport as ReuseReport
from kvboost.results import Score as Score
from kvboost.results import StreamPiece as StreamPiece

if TYPE_CHECKING:
    import torch

    from kvboost.streams import Event


class GenerationMode(enum.Enum):
    """How much of the cache a request may use."""

    BASELINE = "baseline"
    """Plain Transformers: nothing is looked up, nothing is kept."""
    PREFIX_CACHE = "prefix_cache"
    """Exact reuse only: the same tokens after the same tokens."""
    CHUNK_KV_REUSE = "chunk_kv_reuse"
    """Exact reuse, and non-prefix reuse with repair where that is faster. Reported as approximate."""


@dataclass(frozen=True)
class Fingerprint:
    """Everything that changes the numbers in a KV cache. Two caches may mix only if all fields agree."""

    weights: str
    config: str
    rope: str
    dtype: str
    attention: str
    adapter: str
    chunker: str
    codec: str
    numerics: str
    tenant: str
    salt: str = field(default="", kw_only=True, repr=False)
    """A secret, if records are protected: without it nobody can tell a key from a text. Only routers are told."""

    def items(self) -> list[tuple[str, str]]:
        """Field names and values in declaration order, without the salt."""
        return [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "salt"]


@dataclass(frozen=True)
class ModelSnapshot:
    """The state of a model at one moment. Taken once per request; equal snapshots mean equal KV."""

    state: object
    """Cheap to compare with the model's current state."""
    fields: Mapping[str, str] = field(compare=False)
    """The model's fingerprint fields, derived from ``state``."""


Where = Literal["memory", "near", "anywhere"]
"""Which tiers are asked for a block: none, those that answer without a round trip, or all."""

TOKEN_BYTES = 4
"""Bytes of a token id where tokens are stored."""


class Break(enum.IntEnum):
    """What ends with a token, as far as its text tells."""

    NONE = 0
    SENTENCE = 1
    LINE = 2
    """A line that has text."""
    NEWLINE = 3
    """A line, by a token without text. Right behind the end of another line it is a blank line: a paragraph ends."""
    PARAGRAPH = 4
    SPECIAL = 5
    """A token that is no text, such as the end of a chat message."""


class Chunk(NamedTuple):
    """A run of prompt tokens between two boundaries, with the keys that name its KV.

    A tuple, as a long prompt has thousands: made in a quarter of a frozen dataclass' time.
    """

    start: int
    end: int
    tokens: bytes
    """The token ids as little-endian uint32, compared on every hit."""
    prefix_key: bytes
    """Names these tokens after exactly the chunks before them."""
    parent_key: bytes | None
    """``prefix_key`` of the chunk before; None for the first."""
    content_key: bytes
    """Names these tokens at any position."""
    tenant: str = ""
    """Whose they are. The keys tell tenants apart; this says whose share of a store they count to."""


@dataclass(frozen=True, slots=True)
class KVBlock:
    """The stored keys and values of one chunk. Immutable once made: readers share its tensors."""

    key: bytes
    parent_key: bytes | None
    content_key: bytes
    tokens: bytes
    tensors: tuple[torch.Tensor, ...]
    nbytes: int
    bitwise: bool
    """True if a cold prefill of the same prompt would produce the same bits."""
    start: int = 0
    """Position of the first token when this KV was computed."""
    context: bytes = b""
    """What preceded it then: marks of the nearest chunks, in order (see :data:`CONTEXT_MARK_BYTES`)."""
    approx_depth: int = 0
    """0: computed behind exact KV only. n: behind repositioned KV whose own ``approx_depth`` was n - 1 at most."""
    ready: Event | None = field(default=None, compare=False, repr=False)
    """When the tensors' bytes are there, on a device that computes later than it is told to. None: they are."""
    tenant: str = field(default="", compare=False)
    """As its chunk's."""

    @classmethod
    def of(
        cls, chunk: Chunk, tensors: tuple[torch.Tensor, ...], *, context: bytes, bitwise: bool, key: bytes | None = None
    ) -> KVBlock:
        """The block of a chunk at its own position, under its prefix key unless another ``key`` is given."""
        return cls(
            key=key or chunk.prefix_key,
            parent_key=chunk.parent_key,
            content_key=chunk.content_key,
            tokens=chunk.tokens,
            tensors=tensors,
            nbytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            bitwise=bitwise,
            start=chunk.start,
            context=context,
            tenant=chunk.tenant,
        )


CONTEXT_MARK_BYTES = 8
"""A chunk is named in a context by this many bytes of its content key."""
_CONTEXT_CHUNKS = 16  # preceding chunks recorded in a context


def context_mark(content_key: bytes) -> bytes:
    """The few bytes that name a chunk in another chunk's context."""
    return content_key[:CONTEXT_MARK_BYTES]


def context_before(chunks: Sequence[Chunk], index: int) -> bytes:
    """The context of ``chunks[index]``: marks of the nearest chunks before it."""
    return b"".join(context_mark(chunk.content_key) for chunk in chunks[max(0, index - _CONTEXT_CHUNKS) : index])


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A stored block without its tensors and tokens: enough to choose it among others of the same content."""

    key: bytes
    parent_key: bytes | None
    content_key: bytes
    nbytes: int
    bitwise: bool
    start: int
    context: bytes
    approx_depth: int


@dataclass(frozen=True, slots=True)
class Namespace:
    """The model and tenant that blocks belong to. Records of another namespace are foreign."""

    root: bytes
    """32 bytes: the digest of the fingerprint without its adapter. No key can be derived from it."""
    tenant: bytes
    """32 bytes: a digest of the tenant's name, so that all of a tenant's blocks can be counted and purged."""


def tenant_digest(name: str) -> bytes:
    """A tenant's name in namespaces. The engine and ``kvboost cache`` must agree on it."""
    return hashlib.sha256(b"kvboost.tenant.1" + name.encode()).digest()


class PutOutcome(enum.Enum):
    """What a store did with a block it was offered."""

    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"
    """It does not fit, its parent is not stored so that no lookup could reach it, or it has enough variants."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one lookup did with the tiers below the memory."""

    tiers: Mapping[bytes, str] = field(default_factory=dict)
    """The tier of each loaded block, by key. Blocks found in memory are not listed."""
    declined: tuple[DeclinedLoad, ...] = ()
    declined_at: Mapping[int, int] = field(default_factory=dict)
    """Tokens computed instead, by the start of their chunk: two tiers may have the same chunk."""


NOTHING_LOADED = LoadReport()
"""The report of a lookup served from memory, or of a store without tiers."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was loaded into memory for one prompt before it is prefilled."""

    exact: LoadReport = NOTHING_LOADED
    """For its leading chunks."""
    content: LoadReport = NOTHING_LOADED
    """For chunks at other positions."""


@dataclass(frozen=True)
class StoreStats:
    """What a store holds and has done since it was made."""

    tier: str
    chunks: int
    bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    rejected: int
    """Blocks found under the right key whose tokens did not match: treated as misses."""
    evictions: int
    refused: int
    """Blocks that did not fit or whose parent was gone."""
    leased: int
    content_hits: int = 0
    """Chunks found by content alone and handed out."""
    below: tuple[StoreStats, ...] = ()
    """Statistics of the tiers below, fastest first."""
    loads_declined: int = 0
    """Chunks of a tier that were computed, because loading them was expected to take longer."""
    writes_dropped: int = 0
    """Blocks not written to the tiers below because the queue was full. They are offered again later."""
    waiting_bytes: int = 0
    """Bytes of blocks queued for the tiers below."""
    unsaved: int = 0
    """Blocks that a tier below should have and did not keep. Those still in memory are offered again at a flush."""
    available: bool = True
    """Whether the tier answered when it was last used."""
    errors: int = 0
    """Failures of the tier that were treated as misses, over all tenants that share it."""


@dataclass(frozen=True, slots=True)
class HotChunk:
    """How often a stored chunk was used."""

    key: bytes
    uses: int
    start: int
    """Position of its first token when its KV was computed."""
    tokens: int
    nbytes: int


class NonPrefixReuseStats(TypedDict):
    """Status of non-prefix reuse, in :class:`CacheStats`."""

    allowed: bool
    reason: str | None
    """Why it is off."""
    checked: int
    """Requests answered both ways by the shadow check: since it was allowed or, on trial, with this repair."""
    differing: int
    differing_at_most: float
    """Upper bound of the share of requests whose first tokens differ: 95 % confidence at any time, stable traffic."""


class CacheStats(TypedDict):
    """What :meth:`KVBoost.cache_stats` returns."""

    hot_chunks: int
    hot_memory_mb: float
    cache_hits: int
    approximate_hits: int
    cache_misses: int
    hit_rate: float
    exact_hit_rate: float
    evictions: int
    store_errors: int
    """Failures of the store and of its tiers that were treated as misses. A tier's own count for all its tenants."""
    bytes_by_tier: dict[str, int]
    non_prefix_reuse: NonPrefixReuseStats
    workspace_bytes: int
    leased_chunks: int
    """Chunks held against eviction: zero when no request runs and nothing is pinned."""
    unsaved_chunks: int
    """Chunks that a directory or server should have and did not keep."""
