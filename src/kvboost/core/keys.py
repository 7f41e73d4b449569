"""Names for KV: the root of a fingerprint, the chained prefix key, the content key; a prompt's chunks with theirs.

Used by the prefiller, by routers and by ``kvboost explain``. SHA-256 over typed, length-prefixed fields, so that no two
different inputs share an encoding and keys are the same in every process. With a salt the root is an HMAC: who knows a
text, but not the salt, cannot tell whether a key is that text's. Invariant: two prompts share a key only if a cold run
of either would compute the same KV.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvboost.errors import ConfigError
from kvboost.extend import Chunker, TokenArray
from kvboost.types import TOKEN_BYTES, Chunk, Fingerprint, ModelSnapshot

_LENGTH = struct.Struct("<Q")
_LITTLE_ENDIAN_IDS = np.dtype("<u4")


def fingerprint_root(fingerprint: Fingerprint) -> bytes:
    """The key every other key of this fingerprint descends from."""
    label, salt = b"kvboost.root.1", fingerprint.salt.encode()
    hasher = hmac.new(salt, label, "sha256") if salt else hashlib.sha256(label)
    for name, value in fingerprint.items():
        for part in (name.encode(), value.encode()):
            hasher.update(_LENGTH.pack(len(part)))
            hasher.update(part)
    return hasher.digest()


def token_array(token_ids: Sequence[int]) -> TokenArray:
    """Token ids as uint32; raises ConfigError for what cannot be a token id."""
    if isinstance(token_ids, list) and not (token_ids and isinstance(token_ids[0], bool)):
        try:
            # Checks every id, in a quarter of numpy's time.
            return np.frombuffer(array("I", token_ids), dtype=np.uint32)
        except (TypeError, OverflowError):
            pass  # said below what is wrong
    wide = np.asarray(token_ids)
    if wide.ndim != 1:
        raise ConfigError(f"token ids must be one flat sequence, got {wide.ndim} dimensions")
    # No int64 conversion above: that would cut 1.5 down to 1, and overflow before the range is checked.
    if wide.size and (wide.dtype.kind not in "iu" or wide.min() < 0 or wide.max() >= 2**32):
        raise ConfigError("token ids must be integers in 0..2**32-1")
    return wide.astype(np.uint32)


def common_prefix(one: TokenArray, other: TokenArray) -> int:
    """How many leading tokens agree. Takes as long as they are many, however long the rest is."""
    count = min(len(one), len(other))
    done, size = 0, 64
    while done < count:
        end = min(done + size, count)
        differing = np.flatnonzero(one[done:end] != other[done:end])
        if len(differing):
            return done + int(differing[0])
        done, size = end, 2 * size
    return count


def chunk_keys(root: bytes, tokens: TokenArray, ends: Sequence[int], *, tenant: str = "") -> list[Chunk]:
    """The chunks that end at ``ends``, with their keys. ``root`` names the model, the settings and the tenant."""
    raw = tokens.astype(_LITTLE_ENDIAN_IDS, copy=False).tobytes()
    keys = _Keys(root, tenant)
    chunks: list[Chunk] = []
    parent: bytes | None = None
    start = 0
    for end in ends:
        chunks.append(keys.chunk(raw[start * TOKEN_BYTES : end * TOKEN_BYTES], start=start, parent=parent))
        start, parent = end, chunks[-1].prefix_key
    return chunks


def key_pairs(root: bytes, tokens: TokenArray, ends: Sequence[int]) -> Iterator[tuple[bytes, bytes]]:
    """The prefix keys and the content keys of these chunks, for who needs nothing else of them."""
    raw = tokens.astype(_LITTLE_ENDIAN_IDS, copy=False).tobytes()
    keys = _Keys(root)
    parent: bytes | None = None
    start = 0
    for end in ends:
        parent, content = keys.pair(raw[start * TOKEN_BYTES : end * TOKEN_BYTES], parent=parent)
        yield parent, content
        start = end


def tail_keys(root: bytes, tokens: TokenArray, behind: Chunk | None, *, tenant: str = "") -> list[Chunk]:
    """The chunks that ``tokens`` could begin with after this chunk: of one token, of two, and so on."""
    raw = tokens.astype(_LITTLE_ENDIAN_IDS, copy=False).tobytes()
    keys = _Keys(root, tenant)
    start, parent = (behind.end, behind.prefix_key) if behind is not None else (0, None)
    ends = range(TOKEN_BYTES, len(raw) + 1, TOKEN_BYTES)
    return [keys.chunk(raw[:end], start=start, parent=parent) for end in ends]


class _Keys:
    """Makes chunks under one root."""

    def __init__(self, root: bytes, tenant: str = "") -> None:
        self._tenant = tenant
        self._first = b"kvboost.first.1" + root
        self._content = hashlib.sha256(b"kvboost.content.1" + root)

    def chunk(self, body: bytes, *, start: int, parent: bytes | None) -> Chunk:
        key, content = self.pair(body, parent=parent)
        return Chunk(start, start + len(body) // TOKEN_BYTES, body, key, parent, content, self._tenant)

    def pair(self, body: bytes, *, parent: bytes | None) -> tuple[bytes, bytes]:
        """The prefix key and the content key of these tokens."""
        # Both parents are 32 bytes and each domain has its own label, so only the tokens need a length.
        sized = _LENGTH.pack(len(body)) + body
        label = self._first if parent is None else b"kvboost.next.1" + parent
        content = self._content.copy()
        content.update(sized)
        return hashlib.sha256(label + sized).digest(), content.digest()


def paged_key(prefix_key: bytes) -> bytes:
    """Names KV of the same tokens after the same prefix that was computed in pages, where sums round differently."""
    return hashlib.sha256(b"kvboost.paged.1" + prefix_key).digest()


def variant_key(content_key: bytes, context: bytes) -> bytes:
    """Names KV that was computed after repositioned KV. Its own label keeps it distinct from every prefix key."""
    return hashlib.sha256(b"kvboost.variant.1" + content_key + context).digest()


class ModelIdentity(Protocol):
    """Identifies the current state of a model."""

    def snapshot(self) -> ModelSnapshot:
        """The model's current state: the same object while nothing changes."""

    def is_current(self, snapshot: ModelSnapshot) -> bool:
        """Whether the model is still in this state."""


@dataclass(frozen=True)
class KeySnapshot:
    """The root key of a request, and the model state it was derived from. One per request."""

    root: bytes
    model: ModelSnapshot


@dataclass(kw_only=True, eq=False)
class PromptKeys:
    """The chunks of prompts for one model, one chunker and one tenant. Safe to call from any thread.

    For another tenant, ``dataclasses.replace`` that field: it is part of the root, as vLLM's ``cache_salt`` is.
    """

    identity: ModelIdentity
    chunker: Chunker
    tenant: str
    codec: str
    keeps_decoded: bool
    salt: str = field(default="", repr=False)
    """The secret of :func:`kvboost.store.record.format.key_salt`."""
    _last: KeySnapshot | None = field(default=None, init=False, repr=False)

    @property
    def conditions(self) -> str:
        """What else affects the quality of non-prefix reuse: codec and chunking."""
        return f"{self.codec}|{self.chunker.spec}"

    def snapshot(self, model: ModelSnapshot | None = None) -> KeySnapshot:
        """The model's current state, or the one given, and the root key derived from it."""
        model, last = model or self.identity.snapshot(), self._last
        if last is None or last.model is not model:
            # Concurrent threads make equal keys; each returns its own.
            self._last = last = KeySnapshot(self._root(model), model)
        return last

    def namespace(self) -> bytes:
        """The model without its adapter: the namespace of tiers, whichever adapter is in use.

        It is written in the clear, so it must be the root of no request: keys could be derived from that.
        """
        return self._root(self.identity.snapshot(), adapter="any")

    def is_current(self, snapshot: KeySnapshot) -> bool:
        """Whether KV that the model computes now may be stored under ``snapshot``'s keys."""
        return self.identity.is_current(snapshot.model)

    def chunks(self, root: bytes, tokens: Sequence[int], boundaries: Sequence[int]) -> list[Chunk]:
        """The complete chunks of a prompt, with their keys."""
        ids = token_array(tokens)
        return chunk_keys(root, ids, self.chunker.cut(ids, boundaries), tenant=self.tenant)

    def chunks_and_tail(
        self, root: bytes, tokens: Sequence[int], boundaries: Sequence[int]
    ) -> tuple[list[Chunk], Chunk | None]:
        """The complete chunks, and the tokens after them as one more; None if there are none."""
        ids = token_array(tokens)
        ends = self.chunker.cut(ids, boundaries)
        if len(ids) == (ends[-1] if ends else 0):
            return chunk_keys(root, ids, ends, tenant=self.tenant), None
        *chunks, tail = chunk_keys(root, ids, [*ends, len(ids)], tenant=self.tenant)
        return chunks, tail

    def tails(self, root: bytes, tokens: Sequence[int], *, behind: Chunk | None) -> list[Chunk]:
        """What the end of an earlier prompt could be, after a chunk of this one: longest first.

        It ends before the last token here, and is shorter than a chunk can be.
        """
        start = behind.end if behind is not None else 0
        longest = max(self.chunker.min_tokens, getattr(self.chunker, "max_tokens", 0))
        ids = token_array(tokens[start : min(start + longest, len(tokens) - 1)])
        return tail_keys(root, ids, behind, tenant=self.tenant)[::-1]

    def fingerprint(self, model: ModelSnapshot | None = None, **instead: str) -> Fingerprint:
        """Everything that the keys of this tenant cover, for the model's current state or the one given."""
        fields = {**(model or self.identity.snapshot()).fields, **instead}
        if self.keeps_decoded:
            # KV of decoded tokens rounds differently: what follows it may not mix with exact chunks.
            fields["numerics"] += "|decoded-rows"
        return Fingerprint(**fields, chunker=self.chunker.spec, codec=self.codec, tenant=self.tenant, salt=self.salt)

    def _root(self, model: ModelSnapshot, **instead: str) -> bytes:
        return fingerprint_root(self.fingerprint(model, **instead))
