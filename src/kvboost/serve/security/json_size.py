"""Counts the values, or the objects, of a JSON text without parsing it.

Used by :class:`kvboost.serve.security.bodies.BodyLimit`, in a worker thread. A parser holds the interpreter until it is
done, so a body of a million empty lists stops every other request, whichever thread parses it. Invariant: this takes
time in proportion to the text, and lets others run meanwhile.
"""

from __future__ import annotations

import re

_STRINGS = re.compile(rb'"[^"]*+"?')
_WINDOW = 64 * 2**10  # bytes that are looked at in one call, which lets nobody else run


def has_more_values(text: bytes, limit: int) -> bool:
    """Whether there are more than ``limit`` lists, objects and commas outside of strings. Broken JSON is no error."""
    return _has_more(text, b",[{", limit)


def has_more_objects(text: bytes, limit: int) -> bool:
    """The same for objects alone: each costs its reader as much as many values."""
    return _has_more(text, b"{", limit)


def _has_more(text: bytes, marks: bytes, limit: int) -> bool:
    if sum(text.count(mark) for mark in marks) <= limit:
        return False  # most bodies, at once
    others = bytes(set(range(256)).difference(marks, b'"'))
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of quotes begins or ends a string
    count, opened = 0, b""
    for begin in range(0, len(text), _WINDOW):
        window = opened + text[begin : begin + _WINDOW].translate(None, others)
        opened = b'"' if window.count(b'"') % 2 else b""
        count += len(_STRINGS.sub(b"", window))
        if count > limit:
            return True
    return False
