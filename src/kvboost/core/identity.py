"""Cuts prompts into chunks and derives their keys from everything that changes their KV.

Used by the prefiller. Invariant: two prompts share a key only if a cold run of either would compute the same KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvboost.core.keys import chunk_keys, fingerprint_root, tail_keys, token_array
from kvboost.extend import Chunker
from kvboost.types import Chunk, Fingerprint, ModelSnapshot


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
    """The secret of :func:`kvboost.store.record.protection.key_salt`."""
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
