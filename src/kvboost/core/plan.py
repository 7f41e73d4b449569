"""Turns chunks and what is stored of them into a plan whose segments tile the prompt.

Called by the prefiller once the number of stored leading chunks is known. Invariant: every step of
a plan is a chunk (or the tail) of the prompt's own grid, so a warm run executes a subset of the steps
of a cold run, with the same shapes and therefore the same bits.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvboost.types import Chunk


class SegmentKind(enum.Enum):
    """Where a segment of the prompt gets its KV from."""

    EXACT = "exact"
    APPROX = "approx"
    FRESH = "fresh"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``[start, end)`` of the prompt. Before the first APPROX one, a FRESH segment is one forward step."""

    kind: SegmentKind
    start: int
    end: int
    chunk: Chunk | None
    """The chunk of this segment; None for the incomplete tail and for several chunks computed in one step."""


@dataclass(frozen=True)
class ReusePlan:
    """How a prompt will be prefilled. The segments tile ``[0, prompt_tokens)`` and the last one is FRESH."""

    prompt_tokens: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        position = 0
        for segment in self.segments:
            if segment.start != position or segment.end <= segment.start:
                raise ValueError(f"segments do not tile the prompt: {segment} at position {position}")
            position = segment.end
        if position != self.prompt_tokens:
            raise ValueError(f"segments cover {position} of {self.prompt_tokens} tokens")
        if self.segments[-1].kind is not SegmentKind.FRESH:
            raise ValueError("the last token must be fresh: its logits are needed")
        kinds = [s.kind for s in self.segments]
        if SegmentKind.EXACT in kinds[kinds.count(SegmentKind.EXACT) :]:
            raise ValueError("exact segments must come before all others: they need the same tokens before them")

    @cached_property
    def reused(self) -> tuple[Segment, ...]:
        """The EXACT segments, in order."""
        return tuple(s for s in self.segments if s.kind is SegmentKind.EXACT)

    @cached_property
    def moved(self) -> tuple[Segment, ...]:
        """The APPROX segments, in order."""
        return tuple(s for s in self.segments if s.kind is SegmentKind.APPROX)

    @cached_property
    def steps(self) -> tuple[Segment, ...]:
        """The FRESH segments, in order: one forward each where nothing approximate comes before them."""
        return tuple(s for s in self.segments if s.kind is SegmentKind.FRESH)

    @cached_property
    def approx_start(self) -> int:
        """Where the first APPROX segment begins: what comes before it can be exact, what follows cannot."""
        return self.moved[0].start if self.moved else self.prompt_tokens

    @cached_property
    def moved_tokens(self) -> int:
        """How many prompt tokens are repositioned from another position."""
        return sum(s.end - s.start for s in self.moved)

    @cached_property
    def exact_tokens(self) -> int:
        """How many prompt tokens come from the cache exactly."""
        return sum(s.end - s.start for s in self.reused)

    def in_steps_of(self, tokens: int) -> ReusePlan:
        """The same plan with neighbouring steps joined up to this length, except the last one."""
        segments: list[Segment] = []
        for segment in self.segments[:-1]:
            last = segments[-1] if segments else None
            joins = last is not None and SegmentKind.FRESH is last.kind is segment.kind
            if last is not None and joins and segment.end - last.start <= tokens:
                segments[-1] = Segment(SegmentKind.FRESH, last.start, segment.end, None)
            else:
                segments.append(segment)
        return ReusePlan(self.prompt_tokens, (*segments, self.segments[-1]))


def reusable_chunks(chunks: Sequence[Chunk], *, prompt_tokens: int) -> Sequence[Chunk]:
    """The leading chunks to look up: all that end before the last token.

    The step that holds the last token always runs, as its logits are needed and computing them in a
    shorter step would round differently from a cold run.
    """
    count = len(chunks)
    while count and chunks[count - 1].end >= prompt_tokens:
        count -= 1
    return chunks[:count]


def plan_reuse(
    chunks: Sequence[Chunk], *, prompt_tokens: int, available: int, approx: Collection[int] = ()
) -> ReusePlan:
    """Reuse the first ``available`` chunks as they are, reposition those indexed by ``approx``, compute the rest."""
    usable = len(reusable_chunks(chunks, prompt_tokens=prompt_tokens))
    if available > usable or any(not available <= index < usable for index in approx):
        raise ValueError("only chunks behind the exact ones and before the last token can be repositioned or reused")
    segments = [
        Segment(
            SegmentKind.EXACT if i < available else SegmentKind.APPROX if i in approx else SegmentKind.FRESH,
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
