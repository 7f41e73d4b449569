"""Places stored KV into a cache, each block as it arrives from a slow tier.

Used by the prefiller. Invariant: the lease decides which blocks count. A block placed before the lease returned is
placed again unless the lease holds the same one, and nothing is visible before the prefiller sets the cache's length.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvboost.core.backend import Codec, KVCache
from kvboost.core.workspaces import WorkspacePool
from kvboost.types import Chunk, KVBlock


class KVLoader:
    """Loads the exact chunks of one prompt into a cache, which it takes when the first block arrives."""

    def __init__(self, chunks: Sequence[Chunk], *, tokens: int, codec: Codec, pool: WorkspacePool) -> None:
        """``chunks`` are those that may be reused; the cache gets capacity for ``tokens``."""
        self._chunks, self._tokens = chunks, tokens
        self._codec, self._pool = codec, pool
        self._cache: KVCache | None = None
        self._chain: list[bytes] = []
        self._in_place = 0
        self._placed: dict[bytes, KVBlock] = {}
        self._failed = False

    def arrived(self, chunk: Chunk, block: KVBlock) -> None:
        """Copy a block that arrived before the lease returned."""
        if self._failed:
            return
        try:
            if self._cache is None:
                self._take([chunk.prefix_key for chunk in self._chunks])
            assert self._cache is not None
            if chunk.start >= (self._chunks[self._in_place - 1].end if self._in_place else 0):
                self._codec.place(self._cache, chunk.start, block.tensors)
                self._placed[block.key] = block
        except Exception:  # noqa: BLE001 - finish() places it again and raises then, outside of the store's error handling
            self._failed = True

    def finish(self, blocks: Sequence[KVBlock], chunks: Sequence[Chunk]) -> KVCache:
        """The cache with all of ``blocks`` in place, which are those of the first of ``chunks``."""
        if self._cache is None:
            self._take([block.key for block in blocks])
        assert self._cache is not None
        # The end of another prompt may stand where the chain has a chunk of this one.
        in_place = set(self._chain[: self._in_place])
        for block, chunk in zip(blocks, chunks, strict=False):
            if block.key not in in_place and self._placed.get(block.key) is not block:
                self._codec.place(self._cache, chunk.start, block.tensors)
        return self._cache

    def _take(self, chain: list[bytes]) -> None:
        self._chain = chain
        self._cache, self._in_place = self._pool.take(tokens=self._tokens, chain=chain)
