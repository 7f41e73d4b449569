"""Parses bodies with pydantic's JSON parser: it holds the interpreter for less time than Python's own.

Used by the app for all its routes. While a parser runs, no other request and no step of the model does, so large
bodies are parsed in a pool, where they wait for their turn. Invariant: what Python's parser takes is taken, with the
same values, and what it refuses is refused with its message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from kvboost.serve.security.json_size import check_size
from kvboost.serve.security.limits import Limits

PARSED = "kvboost.parsed"  # a request's large body, in its ASGI scope


def parse(body: bytes) -> Any:
    """The values of a JSON text."""
    try:
        return from_json(body)
    except ValueError:
        return json.loads(body)  # takes half a surrogate pair, and its error says where it is


@dataclass(frozen=True)
class Parsed:
    """What a large body holds, or why it is no JSON."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        """The value. Raises the error."""
        if self.error is not None:
            raise self.error
        return self.value


def read_large(body: bytes, limits: Limits) -> Parsed:
    """Count and parse a large body. Raises a 413. For a worker thread."""
    check_size(body, limits, what="the body has")
    try:
        return Parsed(parse(body))
    except (ValueError, RecursionError) as error:
        return Parsed(error=error)


class _JsonRequest(Request):
    async def json(self) -> Any:
        """What the body holds."""
        parsed = self.scope.pop(PARSED, None)
        return parsed.get() if parsed is not None else parse(await self.body())


class JsonRoute(APIRoute):
    """A route whose bodies are parsed by :func:`parse`, or were by :func:`read_large`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's own, over requests that parse differently."""
        handle = super().get_route_handler()

        async def parsed(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return parsed
