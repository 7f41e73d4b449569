"""What differs between two prompts where their common beginning ends, in words: the line, the values, their kind.

Used by :mod:`kvboost.explain.faults`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvboost.extend import TokenArray

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
