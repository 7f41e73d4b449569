"""Counts the values, or the lists and objects, of a JSON text without parsing it.

Used for bodies and for JSON in their strings, in worker threads. A parser holds the interpreter until it is
done, so a body of a million empty lists stops every other request, whichever thread parses it. Invariant: this takes
time in proportion to the text, and lets others run meanwhile.
"""

from __future__ import annotations

import re

from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import Limits

_STRINGS = re.compile(rb'"[^"]*+"?')
VALUES = b",[{"
CONTAINERS = b"[{"  # each costs its reader as much as many values
SMALL_BYTES = 64 * 2**10  # counted and parsed in a millisecond or two, whatever is in them
_WINDOW = 64 * 2**10  # bytes that are looked at in one call, which lets nobody else run


def check_size(text: bytes, limits: Limits, *, what: str, status: int = 413, param: str | None = None) -> None:
    """Refuse UTF-8 that takes long to parse. ``what`` begins the refusal: "the body has"."""
    for marks, limit, name, code in (
        (VALUES, limits.max_json_values, "values", "too_many_values"),
        (CONTAINERS, limits.max_json_containers, "lists and objects", "too_many_containers"),
    ):
        if has_more(text, marks, limit):
            message = f"{what} more than {limit} {name}, this server's limit; send fewer"
            raise ApiError(status, message, param=param, code=code)


def has_more(text: bytes, marks: bytes, limit: int) -> bool:
    """Whether there are more than ``limit`` of these bytes outside of strings. Broken JSON is no error."""
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
