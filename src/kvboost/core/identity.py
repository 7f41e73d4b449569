"""Names the chunks of prompts: cuts them and derives their keys from everything that changes their KV.

Used by the reader. Invariant: two readings share a key only if a cold run of either would compute the same KV.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvboost.core.keys import chunk_keys, fingerprint_root, token_array
from kvboost.extend import Chunker
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.types import Chunk, Fingerprint


class PromptKeys:
    """The chunks of prompts for one model, one chunker and one tenant."""

    def __init__(
        self, identity: ModelIdentity, *, chunker: Chunker, tenant: str, codec: str, keeps_decoded: bool
    ) -> None:
        self._identity, self._chunker, self._tenant = identity, chunker, tenant
        self._codec = codec
        self._keeps_decoded = keeps_decoded
        self._lock = threading.Lock()
        self._root: tuple[Any, bytes] | None = None

    def for_tenant(self, tenant: str) -> PromptKeys:
        """The same for another tenant."""
        return PromptKeys(
            self._identity, chunker=self._chunker, tenant=tenant, codec=self._codec, keeps_decoded=self._keeps_decoded
        )

    @property
    def conditions(self) -> str:
        """What besides the model decides how good moved chunks are: codec and chunks."""
        return f"{self._codec}|{self._chunker.spec}"

    def model_state(self) -> Any:
        """What the model's weights are now: equal states, equal weights."""
        return self._identity.state()

    def root(self, state: Any = None) -> bytes:
        """The key all others descend from, for the model as it is now (or was when ``state`` was taken)."""
        state = self._identity.state() if state is None else state
        with self._lock:
            if self._root is None or self._root[0] != state:
                fields = self._identity.fields()
                if self._keeps_decoded:
                    # Decoded rows round differently: what stands behind them may not mix with exact chunks.
                    fields["numerics"] += "|decoded-rows"
                fingerprint = Fingerprint(**fields, chunker=self._chunker.spec, codec=self._codec, tenant=self._tenant)
                self._root = (state, fingerprint_root(fingerprint))
            return self._root[1]

    def chunks(self, root: bytes, tokens: Sequence[int], boundaries: Sequence[int]) -> list[Chunk]:
        """The complete chunks of a prompt, named."""
        ids = token_array(tokens)
        return chunk_keys(root, ids, self._chunker.cut(ids, boundaries))

    def chunks_of_part(self, tokens: Sequence[int]) -> list[Chunk]:
        """The chunks of a text that stands between boundaries, cut on its own."""
        return self.chunks(self.root(), tokens, [len(tokens)])
