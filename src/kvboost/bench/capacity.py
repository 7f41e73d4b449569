"""How much of a workload is found again in a cache that holds so many tokens: a replay that computes nothing.

Used by :mod:`kvboost.bench.mine` and by ``benchmarks/bench``. Chunks and keys are the engine's. The least recently used
chunk goes first, which is simpler than the engine's own policy and a little worse.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from kvboost.config import DEFAULT_CHUNK
from kvboost.core.chunking import BreakTable, NaturalChunker
from kvboost.core.keys import chunk_keys, token_array
from kvboost.types import Chunk

_ROOT = hashlib.sha256(b"kvboost.bench.capacity").digest()
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Capacities that are tried, of all the different tokens there are."""


def hit_rates(
    prompts: Sequence[tuple[Sequence[int], Sequence[int]]], breaks: BreakTable | None, *, anywhere: bool = False
) -> list[tuple[int, float]]:
    """Capacities in tokens, and the share of all prompt tokens that each finds. Prompts come with their boundaries.

    ``anywhere`` also finds text that stood elsewhere, as approximate reuse does.
    """
    chunker = NaturalChunker(DEFAULT_CHUNK, breaks)
    cut: list[list[Chunk]] = []
    for tokens, boundaries in prompts:
        ids = token_array(list(tokens))
        # The last token is always computed, and what is behind the last cut is no chunk.
        ends = [end for end in chunker.cut(ids, boundaries) if end < len(tokens)]
        cut.append(chunk_keys(_ROOT, ids, ends))
    total = sum(len(tokens) for tokens, _ in prompts)
    different = {_key(chunk, anywhere): chunk.end - chunk.start for chunks in cut for chunk in chunks}
    capacities = sorted({max(1, round(share * sum(different.values()))) for share in SHARES})
    return [(capacity, _found(cut, capacity, anywhere) / total) for capacity in capacities]


def _key(chunk: Chunk, anywhere: bool) -> bytes:
    """What a chunk is kept under. One that was moved is not stored again at its new place."""
    return chunk.content_key if anywhere else chunk.prefix_key


def _found(prompts: Sequence[Sequence[Chunk]], capacity: int, anywhere: bool) -> int:
    held: OrderedDict[bytes, int] = OrderedDict()
    used = found = 0
    for chunks in prompts:
        keys = [_key(chunk, anywhere) for chunk in chunks]
        leading = next((n for n, key in enumerate(keys) if key not in held), len(chunks))
        hits = [chunk for chunk, key in zip(chunks, keys, strict=True) if key in held] if anywhere else chunks[:leading]
        found += sum(chunk.end - chunk.start for chunk in hits)
        # Without ``anywhere`` a chunk is no use without those before it, so these go last.
        for key, chunk in zip(reversed(keys), reversed(chunks), strict=True):
            if key not in held:
                used += chunk.end - chunk.start
            held[key] = chunk.end - chunk.start
            held.move_to_end(key)
        while used > capacity:
            used -= held.popitem(last=False)[1]
    return found
