"""Where a prompt is cut into chunks.

Called by the engine before keys are made. Invariant: a cut after token t depends only on tokens and
boundaries up to t, so equal prefixes have equal cuts and one chunking serves exact and non-prefix reuse.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvboost.errors import ConfigError
from kvboost.extend import Chunker, TokenArray
from kvboost.types import Break

HASH_WINDOW = 8  # tokens; wider windows re-synchronise later after an edit, narrower ones follow common phrases
_ROTATED = 7  # bits for each token further back
_SIZES = (16, 64)  # tokens of a chunk whose size follows from the model
_RECORD_BYTES = (2**18, 2**21)  # of its KV: less is mostly overhead, more is slow to load for the sake of a few tokens

BreakTable = npt.NDArray[np.uint8]
"""The :class:`Break` of every token id. Ids beyond its end are no breaks."""


def chunk_size_for(bytes_per_token: int) -> int:
    """The typical chunk of a model: 32 tokens, unless their KV is very small or large; 16 to 64 in any case."""
    least, most = (max(1, nbytes // bytes_per_token) for nbytes in _RECORD_BYTES)
    shortest, longest = _SIZES
    return min(max(32, least, shortest), max(most, shortest), longest)


def _check_boundaries(boundaries: Sequence[int], length: int) -> list[int]:
    ordered = sorted(set(boundaries))
    if ordered and (ordered[0] < 0 or ordered[-1] > length):
        raise ConfigError(
            f"boundaries must lie in 0..{length} (the prompt's length in tokens), got {ordered[0]}..{ordered[-1]}"
        )
    return [b for b in ordered if b > 0]


def _check_size(size: int) -> None:
    if size < 1:  # cut() would never end
        raise ConfigError(f"a chunker's size must be at least 1 token, got {size}")


@dataclass(frozen=True)
class FixedChunker:
    """A cut every ``size`` tokens, counted from the caller's last boundary."""

    size: int

    def __post_init__(self) -> None:
        _check_size(self.size)

    @property
    def spec(self) -> str:
        """Names the rule and its parameters."""
        return f"fixed:{self.size}"

    @property
    def min_tokens(self) -> int:
        """Every chunk has ``size`` tokens unless a boundary cuts it short."""
        return self.size

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        """Ends of the complete chunks."""
        ends: list[int] = []
        start = 0
        for stop in _check_boundaries(boundaries, len(tokens)):
            ends.extend(range(start + self.size, stop, self.size))
            ends.append(stop)
            start = stop
        ends.extend(range(start + self.size, len(tokens) + 1, self.size))
        return ends


@dataclass(frozen=True)
class ContentChunker:
    """Cuts where the last few tokens hash below a threshold, as backup tools cut files.

    The same text is cut at the same places whatever precedes it, after at most a few chunks.
    Chunks have ``size`` tokens on average, 3/8 of it at least and twice it at most.
    """

    size: int

    def __post_init__(self) -> None:
        _check_size(self.size)

    @property
    def spec(self) -> str:
        """Names the rule and its parameters."""
        return f"content:{self.size}:{self.min_tokens}:{self.max_tokens}:w{HASH_WINDOW}:v1"

    @property
    def min_tokens(self) -> int:
        """No cut of its own before this many tokens."""
        return max(1, self.size * 3 // 8)

    @property
    def max_tokens(self) -> int:
        """Always a cut after this many tokens."""
        return self.size * 2

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        """Ends of the complete chunks."""
        threshold = np.uint64(2**64 // max(2, self.size - self.min_tokens))
        candidates = np.flatnonzero(window_hashes(tokens) < threshold) + 1
        stops = [*_check_boundaries(boundaries, len(tokens)), len(tokens) + 1]  # the sentinel ends the loop
        ends: list[int] = []
        start = 0
        for stop in stops:
            while True:
                index = int(np.searchsorted(candidates, start + self.min_tokens))
                end = int(candidates[index]) if index < len(candidates) else len(tokens) + 1
                end = min(end, start + self.max_tokens)
                if end >= stop:
                    break
                ends.append(end)
                start = end
            if stop <= len(tokens):
                ends.append(stop)
                start = stop
        return ends


@dataclass(frozen=True, eq=False)
class NaturalChunker:
    """Cuts where something ends: a paragraph or message, a line, a sentence; by content where nothing does.

    The better the place, the shorter the chunk may be. A paragraph or a message ends nearly any chunk, so what
    follows begins a chunk of its own, whatever precedes it. A line or a sentence ends chunks of half ``size`` and more.
    Elsewhere a hash of the last tokens decides, as in :class:`ContentChunker`; twice ``size`` is the longest chunk.
    """

    size: int
    breaks: BreakTable | None = None
    """Made from a tokenizer. None cuts by content alone."""

    def __post_init__(self) -> None:
        _check_size(self.size)

    @cached_property
    def spec(self) -> str:
        """Names the rule and its parameters, the table included: keys depend on it."""
        table = "none" if self.breaks is None else hashlib.sha256(self.breaks.astype(np.uint8).tobytes()).hexdigest()
        return f"natural:{self.size}:{self.min_tokens}:{self.max_tokens}:w{HASH_WINDOW}:{table[:32]}:v1"

    @property
    def min_tokens(self) -> int:
        """No cut of its own before this many tokens, however good the place."""
        return max(1, self.size // 8)

    @property
    def max_tokens(self) -> int:
        """Always a cut after this many tokens."""
        return self.size * 2

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        """Ends of the complete chunks."""
        needed = self._needed(tokens)
        needed[[boundary - 1 for boundary in _check_boundaries(boundaries, len(tokens))]] = 1
        places = np.flatnonzero(needed)
        longest = self.max_tokens
        ends: list[int] = []
        start = 0
        for end, length in zip((places + 1).tolist(), needed[places].tolist(), strict=True):
            while end - start > longest:
                start += longest
                ends.append(start)
            if end - start >= length:
                ends.append(end)
                start = end
        ends.extend(range(start + longest, len(tokens) + 1, longest))
        return ends

    def _needed(self, tokens: TokenArray) -> npt.NDArray[np.uint32]:
        """For each token the length from which on a chunk ends behind it; 0 where only a full chunk does."""
        half = max(1, self.size // 2)
        by_hash = window_hashes(tokens) < np.uint64(2**64 // max(2, half))
        # Natural places are to win where there are any, so the hash begins later than they do.
        needed = by_hash.astype(np.uint32) * np.uint32(half if self.breaks is None else max(1, self.size * 3 // 4))
        if self.breaks is None or not len(self.breaks) or not len(tokens):
            return needed
        kinds = self.breaks[np.minimum(tokens, len(self.breaks) - 1)]
        kinds[tokens >= len(self.breaks)] = Break.NONE
        strong = kinds >= Break.PARAGRAPH
        # Placeholders, as of an image, come in runs of one special token: nothing ends between them.
        strong[1:] &= (kinds[1:] != Break.SPECIAL) | (tokens[1:] != tokens[:-1])
        before = kinds[:-1]
        strong[1:] |= (kinds[1:] == Break.NEWLINE) & (before >= Break.LINE) & (before <= Break.PARAGRAPH)
        needed[(kinds > Break.NONE) & (kinds < Break.PARAGRAPH)] = half
        needed[strong] = self.min_tokens
        return needed


def make_chunker(chunking: str | Chunker, *, size: int, breaks: BreakTable | None = None) -> Chunker:
    """The chunker named by ``chunking``, or ``chunking`` itself if it already is one."""
    if isinstance(chunking, str):
        kinds: dict[str, Callable[[int], Chunker]] = {
            "natural": lambda size: NaturalChunker(size, breaks),
            "fixed": FixedChunker,
            "content": ContentChunker,
        }
        if chunking not in kinds:
            raise ConfigError(f"chunking={chunking!r} is not known; use one of {sorted(kinds)} or a Chunker")
        return kinds[chunking](size)
    if not isinstance(chunking, Chunker):
        raise ConfigError(f"chunking must be a name or a Chunker, got {type(chunking).__name__}")
    return chunking


def window_hashes(tokens: TokenArray) -> npt.NDArray[np.uint64]:
    """A hash of each token and the few before it. The text's start is padded with zeros."""
    combined = tokens.astype(np.uint64)
    scratch = np.empty_like(combined)  # fresh memory for every step would take longer than the arithmetic
    _mix(combined, scratch)
    back = 1
    while back < min(HASH_WINDOW, len(tokens)):
        # Each round doubles the window. Rotation makes the hash depend on order; the shift keeps position t blind to
        # tokens after it.
        np.left_shift(combined, np.uint64(back * _ROTATED), out=scratch)
        scratch |= combined >> np.uint64(64 - back * _ROTATED)
        combined[back:] ^= scratch[:-back]
        back *= 2
    _mix(combined, scratch)
    return combined


def _mix(values: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64]) -> None:
    """The splitmix64 finaliser, in place: every input bit reaches every output bit."""
    values += np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        values ^= np.right_shift(values, np.uint64(shift), out=scratch)
        values *= np.uint64(factor)
