"""Turns chunks and what is stored of them into a plan whose segments tile the prompt.

Called by the engine once the store has said how many leading chunks it holds. Invariant: every step of
a plan is a chunk (or the tail) of the prompt's own grid, so a warm run executes a subset of the steps
of a cold run, with the same shapes and therefore the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvboost.types import Chunk, ReusePlan, Segment, SegmentKind


def reusable_chunks(chunks: Sequence[Chunk], *, prompt_tokens: int) -> Sequence[Chunk]:
    """The leading chunks worth asking the store for: all that end before the last token.

    The step that holds the last token always runs, as its logits are needed and computing them in a
    shorter step would round differently from a cold run.
    """
    count = len(chunks)
    while count and chunks[count - 1].end >= prompt_tokens:
        count -= 1
    return chunks[:count]


def plan_reuse(
    chunks: Sequence[Chunk], *, prompt_tokens: int, available: int, moved: Collection[int] = ()
) -> ReusePlan:
    """Reuse the first ``available`` chunks as they are and move those with an index in ``moved``; compute the rest."""
    usable = len(reusable_chunks(chunks, prompt_tokens=prompt_tokens))
    if available > usable or any(not available <= index < usable for index in moved):
        raise ValueError("only chunks behind the exact ones and before the last token can be moved or reused")
    segments = [
        Segment(
            SegmentKind.EXACT if i < available else SegmentKind.MOVED if i in moved else SegmentKind.FRESH,
            chunk.start,
            chunk.end,
            chunk,
        )
        for i, chunk in enumerate(chunks)
    ]
    covered = chunks[-1].end if chunks else 0
    if covered < prompt_tokens:
        segments.append(Segment(SegmentKind.FRESH, covered, prompt_tokens, None))
    return ReusePlan(prompt_tokens, tuple(segments))
