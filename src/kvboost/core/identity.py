"""Names the chunks of prompts: cuts them and derives their keys from everything that changes their KV.

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
    """Says what a model is at this moment."""

    def snapshot(self) -> ModelSnapshot:
        """The model now: the same object while nothing changes."""

    def is_current(self, snapshot: ModelSnapshot) -> bool:
        """Whether the model still is what it was."""


@dataclass(frozen=True)
class KeySnapshot:
    """The key that a request's other keys descend from, and the model that it stands for. One per request."""

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
        """What besides the model decides how good moved chunks are: codec and chunks."""
        return f"{self._codec}|{self._chunker.spec}"

    def snapshot(self) -> KeySnapshot:
        """The model as it is now and its root key, both from the same moment."""
        model, last = self._identity.snapshot(), self._last
        if last is None or last.model is not model:
            # Threads that come here together make equal keys; each returns its own.
            self._last = last = KeySnapshot(self._root(model), model)
        return last

    def namespace(self) -> bytes:
        """Names the model without its adapter: what tiers keep together, whichever adapter is in use."""
        return self._root(self._identity.snapshot(), adapter="")

    def is_current(self, snapshot: KeySnapshot) -> bool:
        """Whether KV that the model computes now may be stored under ``snapshot``'s keys."""
        return self._identity.is_current(snapshot.model)

    def chunks(self, root: bytes, tokens: Sequence[int], boundaries: Sequence[int]) -> list[Chunk]:
        """The complete chunks of a prompt, named."""
        ids = token_array(tokens)
        return chunk_keys(root, ids, self._chunker.cut(ids, boundaries))

    def _root(self, model: ModelSnapshot, **instead: str) -> bytes:
        fields = {**model.fields, **instead}
        if self._keeps_decoded:
            # KV of decoded tokens rounds differently: what stands behind it may not mix with exact chunks.
            fields["numerics"] += "|decoded-rows"
        fingerprint = Fingerprint(**fields, chunker=self._chunker.spec, codec=self._codec, tenant=self._tenant)
        return fingerprint_root(fingerprint)
