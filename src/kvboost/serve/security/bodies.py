"""Bounds a request's body in bytes and in time, whatever its headers say. Runs before the app's routing.

While a body is parsed, :func:`limits_now` says what the server takes: pydantic has no other way to know.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import Limits

_limits: ContextVar[Limits | None] = ContextVar("limits of this request's server", default=None)


def limits_now() -> Limits:
    """Of the server that parses a body now; the defaults outside of any."""
    return _limits.get() or Limits()


class BodyLimit:
    """Hands requests on whose bodies are small and whole; answers the others."""

    def __init__(self, app: ASGIApp, *, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive the whole body first: only then is it known to be small enough."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await self._body(scope, receive)
        except (ApiError, TimeoutError) as error:
            late = f"the body took longer than {self._limits.body_seconds:g} seconds"
            refusal = error if isinstance(error, ApiError) else ApiError(408, late, code="too_slow")
            await JSONResponse(refusal.body(), refusal.status, headers={"Connection": "close"})(scope, receive, send)
            return
        if body is None:
            return  # the client has gone
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if not replayed:
                replayed = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        _limits.set(self._limits)
        await self._app(scope, replay, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        limit = self._limits.max_body_bytes
        refusal = ApiError(413, f"the body is larger than {limit} bytes, this server's limit", code="too_large")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:19]) > limit:
                raise refusal
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise refusal
            if not message.get("more_body", False):
                return b"".join(parts)
