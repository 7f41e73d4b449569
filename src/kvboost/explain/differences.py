"""How two prompts differ behind their common beginning: what they have in common there, and what changed, in words.

Used by :mod:`kvboost.explain.faults`. Invariant: runs do not overlap, and come later in both prompts one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost.core.keys import common_prefix
from kvboost.extend import TokenArray

_GRAM = 12
"""Tokens that must agree to be taken for the same text."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Run(NamedTuple):
    """Equal tokens in two prompts."""

    here: int
    there: int
    tokens: int


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
            matches = by_hash[low:high]  # ascending
            index = int(np.searchsorted(matches, behind))
            if index < len(matches):
                match = int(matches[index])
                gap = found - at + match - behind
                if nearest is None or gap < nearest[0]:
                    nearest = gap, found, match
        if nearest is None:
            return runs
        _, found, match = nearest
        tokens = common_prefix(here[start + found :], there[start + match :])
        if tokens >= _GRAM:  # equal hashes of other tokens are no run
            runs.append(Run(start + found, start + match, tokens))
        at, behind = found + max(1, tokens), match + max(1, tokens)


def _gram_hashes(tokens: TokenArray) -> npt.NDArray[np.uint64]:
    """A hash of each token and those behind it that make a gram with it."""
    count = max(0, len(tokens) - _GRAM + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for step in range(_GRAM):
        hashes *= _FACTOR
        hashes += tokens[step : step + count].astype(np.uint64) + np.uint64(1)
    return hashes


_CONTEXT = 96
"""Tokens before and behind a difference that are read to show its line."""
_SHOWN = 60

_NAMES = "january|february|march|april|may|june|july|august|september|october|november|december"
_DAYS = "monday|tuesday|wednesday|thursday|friday|saturday|sunday"
_KINDS = (
    ("a UUID", re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.I)),
    (
        "a date",
        re.compile(
            rf"\d{{4}}-\d\d?-\d\d?([T ]\d\d?:\d\d\S*)?|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}|\b({_DAYS})\b"
            rf"|\b({_NAMES})\b\.? \d{{1,2}}(, \d{{4}})?|\b\d{{1,2}}\.? ({_NAMES})\b( \d{{4}})?",
            re.I,
        ),
    ),
    ("a time", re.compile(r"\d{1,2}:\d{2}(:\d{2})?")),
    ("an id", re.compile(r"(?=\S*\d)(?=\S*[a-z])[0-9a-z_-]{6,}|\d{9,}", re.I)),
    ("a number", re.compile(r"\d[\d.,]*")),
)

_WORD_END, _WORD_BEGIN = re.compile(r"[\w:./+-]*$"), re.compile(r"^[\w:./+-]*")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Slot:
    """One place of a prompt's text whose value differs from an earlier prompt's."""

    line: int
    """Counted from 1 in the prompt's text."""
    before: str
    """The text of that line in front of the value."""
    value: str
    earlier: str
    """What the earlier prompt has there."""
    after: str
    kind: str
    """What the value looks like: "a date", "an id", ..., or "text"."""

    @property
    def group(self) -> str:
        """The same for the same place in other prompts: a date may differ in its day there, in its minutes here."""
        return re.split(r"\d", self.before, maxsplit=1)[0].strip() or f"line {self.line}"


def read_slot(
    decode: Decode, here: TokenArray, there: TokenArray, gap: tuple[int, int], earlier: tuple[int, int]
) -> Slot:
    """The difference between ``here[gap]`` and ``there[earlier]``, widened to the whole word, date or id."""
    start = gap[0]
    front = decode(here[max(0, start - _CONTEXT) : start].tolist()).split("\n")[-1]
    ours, theirs = (
        (decode(tokens[begin:end].tolist()), decode(tokens[end : end + _CONTEXT].tolist()).split("\n")[0])
        for tokens, (begin, end) in ((here, gap), (there, earlier))
    )
    kind, left, right = _widened(front, *ours)
    their_kind, _, their_right = _widened(front, *theirs)
    before, word = front[: len(front) - left], front[len(front) - left :]
    return Slot(
        line=decode(here[:start].tolist()).count("\n") + 1,
        before=before,
        value=word + ours[0] + ours[1][:right],
        earlier=word + theirs[0] + theirs[1][:their_right],
        after=ours[1][right:],
        kind="text" if "text" in (kind, their_kind) else kind,
    )


def _widened(front: str, value: str, back: str) -> tuple[str, int, int]:
    """What a value looks like, and how many characters before and behind it belong to the same word, date or id."""
    left, right = len(_WORD_END.findall(front)[0]), len(_WORD_BEGIN.findall(back)[0])
    line, begin, end = front + value + back, len(front) - left, len(front) + len(value) + right
    for name, pattern in _KINDS:
        for found in pattern.finditer(line):
            if found.start() < end and found.end() > begin:
                return name, max(left, len(front) - found.start()), max(right, found.end() - len(front + value))
    return "text", left, right


def clipped(text: str, *, end: bool = False) -> str:
    """A text in one short line; its beginning, or its end."""
    line = text.replace("\n", "\\n")
    if len(line) <= _SHOWN:
        return line
    return f"...{line[-_SHOWN:]}" if end else f"{line[:_SHOWN]}..."
