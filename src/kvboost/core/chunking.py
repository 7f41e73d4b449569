"""Where a prompt is cut into chunks.

Called by the engine before keys are made. Invariant: a cut after token t depends only on tokens and
boundaries up to t, so equal prefixes have equal cuts and one chunking serves exact and non-prefix reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvboost.errors import ConfigError
from kvboost.extend import Chunker, TokenArray

_HASH_WINDOW = 8  # tokens; wider windows re-synchronise later after an edit, narrower ones follow common phrases


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
        return f"content:{self.size}:{self.min_tokens}:{self.max_tokens}:w{_HASH_WINDOW}:v1"

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
        candidates = np.flatnonzero(_window_hashes(tokens) < threshold) + 1
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


def make_chunker(chunking: str | Chunker, *, size: int) -> Chunker:
    """The chunker named by ``chunking``, or ``chunking`` itself if it already is one."""
    if isinstance(chunking, str):
        kinds: dict[str, type[FixedChunker] | type[ContentChunker]] = {
            "fixed": FixedChunker,
            "content": ContentChunker,
        }
        if chunking not in kinds:
            raise ConfigError(f"chunking={chunking!r} is not known; use one of {sorted(kinds)} or a Chunker")
        return kinds[chunking](size)
    if not isinstance(chunking, Chunker):
        raise ConfigError(f"chunking must be a name or a Chunker, got {type(chunking).__name__}")
    return chunking


def _window_hashes(tokens: TokenArray) -> npt.NDArray[np.uint64]:
    """A hash of each token and the few before it. The text's start is padded with zeros."""
    mixed = _mix(tokens.astype(np.uint64))
    combined = mixed.copy()
    for back in range(1, min(_HASH_WINDOW, len(tokens))):
        # Rotation makes the hash depend on order; the shift keeps position t blind to tokens after it.
        shift = np.uint64(back * 7)
        rotated = (mixed << shift) | (mixed >> np.uint64(64 - back * 7))
        combined[back:] ^= rotated[:-back]
    return _mix(combined)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
