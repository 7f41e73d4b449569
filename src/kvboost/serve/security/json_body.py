"""Parses bodies with pydantic's JSON parser: it holds the interpreter for less time than Python's own.

Used by the app for all its routes. While a parser runs, no other request and no step of the model does. Invariant: what
Python's parser takes is taken, with the same values, and what it refuses is refused with its message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response


def parse(body: bytes) -> Any:
    """The values of a JSON text."""
    try:
        return from_json(body)
    except ValueError:
        return json.loads(body)  # takes half a surrogate pair, and its error says where it is


class _JsonRequest(Request):
    async def json(self) -> Any:
        """What the body holds."""
        return parse(await self.body())


class JsonRoute(APIRoute):
    """A route whose bodies are parsed by :func:`parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's own, over requests that parse differently."""
        handle = super().get_route_handler()

        async def parsed(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return parsed
