"""Turns chunks and what is stored of them into a plan: exact up to a position, then repositioned or computed.

Called by the prefiller once it is known how far the stored KV reaches.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvboost.types import Chunk

_KINDS = ("exact", "moved", "recomputed", "fresh")


class SegmentKind(enum.Enum):
    """Where a segment of the prompt gets its KV from."""

    APPROX = "approx"
    FRESH = "fresh"


class Segment(NamedTuple):
    """Tokens ``[start, end)`` of the prompt."""

    kind: SegmentKind
    start: int
    end: int
    chunk: Chunk | None
    """Behind the first repositioned chunk, the chunk of this segment."""


@dataclass(frozen=True)
class ReusePlan:
    """How a prompt will be prefilled: ``[0, exact_tokens)`` is reused, the segments tile the rest."""

    prompt_tokens: int
    exact_tokens: int
    """How many prompt tokens come from the cache exactly."""
    segments: tuple[Segment, ...]
    """FRESH and APPROX ones; the last is FRESH, as the last token's logits are needed."""

    def __post_init__(self) -> None:
        position = self.exact_tokens
        for segment in self.segments:
            if segment.start != position or segment.end <= segment.start:
                raise ValueError(f"segments do not tile the prompt: {segment} at position {position}")
            position = segment.end
        if position != self.prompt_tokens:
            raise ValueError(f"segments cover {position} of {self.prompt_tokens} tokens")
        if self.segments[-1].kind is not SegmentKind.FRESH:
            raise ValueError("the last token must be fresh: its logits are needed")

    @cached_property
    def moved(self) -> tuple[Segment, ...]:
        """The APPROX segments, in order."""
        return tuple(s for s in self.segments if s.kind is SegmentKind.APPROX)

    @cached_property
    def fresh(self) -> tuple[Segment, ...]:
        """The FRESH segments, in order."""
        return tuple(s for s in self.segments if s.kind is SegmentKind.FRESH)

    @cached_property
    def approx_start(self) -> int:
        """Where the first APPROX segment begins: what comes before it can be exact, what follows cannot."""
        return self.moved[0].start if self.moved else self.prompt_tokens

    def runs(self, *, recomputed: Sequence[int] = ()) -> tuple[tuple[str, int], ...]:
        """Neighbours of one kind together, from the prompt's beginning, as kind and number of tokens.

        Kinds are ``exact``, ``moved``, ``recomputed`` (moved, and in ``recomputed``) and ``fresh``.
        """
        kinds = np.zeros(self.prompt_tokens, dtype=np.int8)  # exact
        for segment in self.segments:
            kinds[segment.start : segment.end] = 1 if segment.kind is SegmentKind.APPROX else 3
        again = np.zeros(self.prompt_tokens, dtype=bool)
        again[np.asarray(recomputed, dtype=np.int64)] = True
        kinds[again & (kinds == 1)] = 2
        ends = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), self.prompt_tokens]
        return tuple((_KINDS[kinds[start]], end - start) for start, end in zip([0, *ends], ends, strict=False))

    @cached_property
    def moved_tokens(self) -> int:
        """How many prompt tokens are repositioned from another position."""
        return sum(s.end - s.start for s in self.moved)


def reusable_chunks(chunks: Sequence[Chunk], *, prompt_tokens: int) -> Sequence[Chunk]:
    """The chunks that may be repositioned: all that end before the last token."""
    count = len(chunks)
    while count and chunks[count - 1].end >= prompt_tokens:
        count -= 1
    return chunks[:count]


def plan_reuse(
    chunks: Sequence[Chunk], *, prompt_tokens: int, exact_tokens: int, approx: Collection[int] = ()
) -> ReusePlan:
    """Reuse the first ``exact_tokens`` as they are, reposition the chunks indexed by ``approx``, compute the rest."""
    if not 0 <= exact_tokens < prompt_tokens:
        raise ValueError(f"{exact_tokens} of {prompt_tokens} tokens cannot be reused: the last one is computed")
    if not approx:
        return ReusePlan(prompt_tokens, exact_tokens, (Segment(SegmentKind.FRESH, exact_tokens, prompt_tokens, None),))
    first, usable = min(approx), len(reusable_chunks(chunks, prompt_tokens=prompt_tokens))
    if chunks[first].start < exact_tokens or max(approx) >= usable:
        raise ValueError("only chunks behind the exact tokens and before the last token can be repositioned")
    segments = []
    if exact_tokens < chunks[first].start:
        segments.append(Segment(SegmentKind.FRESH, exact_tokens, chunks[first].start, None))
    segments += [
        Segment(SegmentKind.APPROX if i in approx else SegmentKind.FRESH, chunk.start, chunk.end, chunk)
        for i, chunk in enumerate(chunks[first:], first)
    ]
    if chunks[-1].end < prompt_tokens:
        segments.append(Segment(SegmentKind.FRESH, chunks[-1].end, prompt_tokens, None))
    return ReusePlan(prompt_tokens, exact_tokens, tuple(segments))
