"""What two prompts have in common behind their common beginning, in the order of both.

Used by :mod:`kvboost.explain.faults`. Invariant: runs do not overlap, and come later in both prompts one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost.extend import TokenArray

_GRAM = 12
"""Tokens that must agree to be taken for the same text."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Run(NamedTuple):
    """Equal tokens in two prompts."""

    here: int
    there: int
    tokens: int


def common_prefix(one: TokenArray, other: TokenArray) -> int:
    """How many leading tokens agree."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def aligned_runs(here: TokenArray, there: TokenArray, *, start: int) -> list[Run]:
    """Runs that agree behind ``start``, each with the smallest gap to the one before."""
    ours, theirs = _gram_hashes(here[start:]), _gram_hashes(there[start:])
    by_hash = np.argsort(theirs, kind="stable")
    hashes = theirs[by_hash]
    shared = np.flatnonzero(np.isin(ours, theirs))
    runs: list[Run] = []
    at = behind = 0  # from start on
    while True:
        nearest: tuple[int, int, int] | None = None
        for found in shared[np.searchsorted(shared, at) :].tolist():
            if nearest is not None and found - at >= nearest[0]:
                break
            low, high = np.searchsorted(hashes, ours[found], "left"), np.searchsorted(hashes, ours[found], "right")
            places = by_hash[low:high]  # ascending
            index = int(np.searchsorted(places, behind))
            if index < len(places):
                place = int(places[index])
                gap = found - at + place - behind
                if nearest is None or gap < nearest[0]:
                    nearest = gap, found, place
        if nearest is None:
            return runs
        _, found, place = nearest
        tokens = common_prefix(here[start + found :], there[start + place :])
        if tokens >= _GRAM:  # equal hashes of other tokens are no run
            runs.append(Run(start + found, start + place, tokens))
        at, behind = found + max(1, tokens), place + max(1, tokens)


def _gram_hashes(tokens: TokenArray) -> npt.NDArray[np.uint64]:
    """A hash of each token and those behind it that make a gram with it."""
    count = max(0, len(tokens) - _GRAM + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for step in range(_GRAM):
        hashes *= _FACTOR
        hashes += tokens[step : step + count].astype(np.uint64) + np.uint64(1)
    return hashes
