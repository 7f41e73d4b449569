"""Headers of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from kvboost.serve.generation.prompts import ChatPrompts

IGNORED = "x-kvboost-ignored"
_MAX_NAMED = 32  # fields; clients take headers of a few kilobytes


def with_ignored(response: Response, fields: Sequence[str]) -> Response:
    """The same response, which names the fields that were accepted and have no effect."""
    if fields:
        response.headers[IGNORED] = ", ".join(fields[:_MAX_NAMED])
    return response


def unread(chats: ChatPrompts, fields: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of ``fields``, each with the variables it sets, those of which the chat template reads no variable."""
    return [name for name, variables in fields.items() if variables and not any(map(chats.reads, variables))]
