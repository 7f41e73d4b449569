"""Counts the values of a JSON text without parsing it.

Used by :class:`kvboost.serve.security.bodies.BodyLimit`, in a worker thread. A parser holds the interpreter until it is
done, so a body of a million empty lists stops every other request, whichever thread parses it. Invariant: this takes
time in proportion to the text, and lets others run meanwhile.
"""

from __future__ import annotations

import re

_STRING_OR_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([,\[{])', re.DOTALL)  # possessive: it never goes back


def has_more_values(text: bytes, limit: int) -> bool:
    """Whether there are more than ``limit`` lists, objects and commas outside of strings. Broken JSON is no error."""
    if sum(map(text.count, (b",", b"[", b"{"))) <= limit:
        return False  # most bodies, at once
    count = 0
    for match in _STRING_OR_MARK.finditer(text):
        if match.lastindex is not None:
            count += 1
            if count > limit:
                return True
    return False
