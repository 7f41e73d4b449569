"""Headers of our own."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

IGNORED = "x-kvboost-ignored"
_MAX_NAMED = 32  # fields; clients take headers of a few kilobytes


def with_ignored(response: Response, fields: Sequence[str]) -> Response:
    """The same response, which names the fields that were accepted and have no effect."""
    if fields:
        response.headers[IGNORED] = ", ".join(fields[:_MAX_NAMED])
    return response
