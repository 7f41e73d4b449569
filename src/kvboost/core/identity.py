"""Cuts prompts into chunks and derives their keys from everything that changes their KV.

Used by the prefiller. Invariant: two prompts share a key only if a cold run of either would compute the same KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvboost.core.keys import chunk_keys, fingerprint_root, token_array
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


class PromptKeys:
    """The chunks of prompts for one model, one chunker and one tenant. Safe to call from any thread."""

    def __init__(
        self, identity: ModelIdentity, *, chunker: Chunker, tenant: str, codec: str, keeps_decoded: bool
    ) -> None:
        self._identity, self._chunker, self._tenant = identity, chunker, tenant
        self._codec = codec
        self._keeps_decoded = keeps_decoded
        self._last: KeySnapshot | None = None

    def for_tenant(self, tenant: str) -> PromptKeys:
        """The same for another tenant."""
        return PromptKeys(
            self._identity, chunker=self._chunker, tenant=tenant, codec=self._codec, keeps_decoded=self._keeps_decoded
        )

    @property
    def conditions(self) -> str:
        """What else affects the quality of non-prefix reuse: codec and chunking."""
        return f"{self._codec}|{self._chunker.spec}"

    def snapshot(self) -> KeySnapshot:
        """The model's current state and the root key derived from it."""
        model, last = self._identity.snapshot(), self._last
        if last is None or last.model is not model:
            # Concurrent threads make equal keys; each returns its own.
            self._last = last = KeySnapshot(self._root(model), model)
        return last

    def namespace(self) -> bytes:
        """The model without its adapter: the namespace of tiers, whichever adapter is in use."""
        return self._root(self._identity.snapshot(), adapter="")

    def is_current(self, snapshot: KeySnapshot) -> bool:
        """Whether KV that the model computes now may be stored under ``snapshot``'s keys."""
        return self._identity.is_current(snapshot.model)

    def chunks(self, root: bytes, tokens: Sequence[int], boundaries: Sequence[int]) -> list[Chunk]:
        """The complete chunks of a prompt, with their keys."""
        ids = token_array(tokens)
        return chunk_keys(root, ids, self._chunker.cut(ids, boundaries))

    def _root(self, model: ModelSnapshot, **instead: str) -> bytes:
        fields = {**model.fields, **instead}
        if self._keeps_decoded:
            # KV of decoded tokens rounds differently: what follows it may not mix with exact chunks.
            fields["numerics"] += "|decoded-rows"
        fingerprint = Fingerprint(**fields, chunker=self._chunker.spec, codec=self._codec, tenant=self._tenant)
        return fingerprint_root(fingerprint)
