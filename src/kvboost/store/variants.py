"""Which of several blocks with the same tokens fits a new place best.

Called by stores for reuse by content. A chunk's keys and values depend on what stood before it when they
were computed; the more of that stands before it now, the less is wrong with them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TypeVar

from kvboost.types import CONTEXT_MARK_BYTES, BlockInfo, KVBlock

AnyBlock = TypeVar("AnyBlock", KVBlock, BlockInfo)

_ENOUGH_CONTEXT = 4  # chunks; how little context a chunk had counts only below this


def best_variant(blocks: Sequence[AnyBlock], *, marks: Set[bytes]) -> AnyBlock | None:
    """The block that shares most of its context with ``marks``; then the one with more context; then the newest."""
    best: AnyBlock | None = None
    best_score = (-1, -1, 0)
    for block in blocks:
        own = {block.context[i : i + CONTEXT_MARK_BYTES] for i in range(0, len(block.context), CONTEXT_MARK_BYTES)}
        score = (len(own & marks), min(len(own), _ENOUGH_CONTEXT), -block.approx_depth)
        if score >= best_score:
            best, best_score = block, score
    return best
