"""Names the chunks of prompts: cuts them and derives their keys from everything that changes their KV.

Used by the prefiller. Invariant: two prefills share a key only if a cold run of either would compute the same KV.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvboost.core.keys import chunk_keys, fingerprint_root, token_array
from kvboost.extend import Chunker
from kvboost.types import Chunk, Fingerprint


class IdentitySource(Protocol):
    """Names the state of one model."""

    def state(self) -> Any:
        """A cheap value that changes whenever :meth:`fields` might."""
        ...

    def fields(self) -> dict[str, str]:
        """The fingerprint fields that the model decides."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """The model at one moment, and the root of all keys made from it."""

    state: Any
    root: bytes


class PromptKeys:
    """The chunks of prompts for one model, one chunker and one tenant."""

    def __init__(
        self, identity: IdentitySource, *, chunker: Chunker, tenant: str, codec: str, keeps_decoded: bool
    ) -> None:
        self._identity, self._chunker, self._tenant = identity, chunker, tenant
        self._codec = codec
        self._keeps_decoded = keeps_decoded
        self._lock = threading.Lock()
        self._last: Snapshot | None = None

    def for_tenant(self, tenant: str) -> PromptKeys:
        """The same for another tenant."""
        return PromptKeys(
            self._identity, chunker=self._chunker, tenant=tenant, codec=self._codec, keeps_decoded=self._keeps_decoded
        )

    @property
    def conditions(self) -> str:
        """What besides the model decides how good repositioned chunks are: codec and chunks."""
        return f"{self._codec}|{self._chunker.spec}"

    def snapshot(self) -> Snapshot:
        """The model as it is now."""
        state = self._identity.state()
        with self._lock:
            if self._last is None or self._last.state != state:
                fields = self._identity.fields()
                if self._keeps_decoded:
                    # Decoded KV rounds differently: what stands behind it may not mix with exact chunks.
                    fields["numerics"] += "|decoded-rows"
                fingerprint = Fingerprint(**fields, chunker=self._chunker.spec, codec=self._codec, tenant=self._tenant)
                self._last = Snapshot(state, fingerprint_root(fingerprint))
            return self._last

    def is_current(self, snapshot: Snapshot) -> bool:
        """Whether the model is still what it was."""
        return bool(self._identity.state() == snapshot.state)

    def chunks(self, root: bytes, tokens: Sequence[int], boundaries: Sequence[int]) -> list[Chunk]:
        """The complete chunks of a prompt, named."""
        ids = token_array(tokens)
        return chunk_keys(root, ids, self._chunker.cut(ids, boundaries))
