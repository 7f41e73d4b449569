"""Bounds a request's body in bytes and in time, whatever its headers say. Runs before the app's routing.

While a body is parsed, :func:`limits_now` says what the server takes: pydantic has no other way to know. From then on
:func:`request_bytes_now` says how large it was.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from contextvars import ContextVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.serve.errors import ApiError
from kvboost.serve.security.fair_pool import FairPool
from kvboost.serve.security.json_body import PARSED, read_large
from kvboost.serve.security.json_size import SMALL_BYTES
from kvboost.serve.security.leaving import ClientGoneError, while_connected
from kvboost.serve.security.limits import Limits, Shares

_PAUSE_S = 0.002  # before the next piece of a body (64 KiB or more), for each other body of its tenant that comes
_MAX_PAUSE_S = 0.05
_COMES_S = 1.0  # a body comes as long as its last piece is younger
_limits: ContextVar[Limits | None] = ContextVar("limits of this request's server", default=None)


def limits_now() -> Limits:
    """Of the server that parses a body now; the defaults outside of any."""
    return _limits.get() or Limits()


_request_bytes: ContextVar[int] = ContextVar("bytes of this request", default=0)


def request_bytes_now() -> int:
    """Of the body, and of what is remembered for it. 0 outside of any request."""
    return _request_bytes.get()


def add_remembered_bytes(nbytes: int) -> None:
    """The request that is being answered goes on with so much more than its body."""
    _request_bytes.set(_request_bytes.get() + nbytes)


class _Held:
    """What one request holds of the bytes that all may."""

    def __init__(self, shares: Shares, tenant: str) -> None:
        self._shares, self.tenant, self._bytes = shares, tenant, 0

    def take(self, nbytes: int) -> None:
        """So many more. Raises a 429."""
        self._shares.take(self.tenant, nbytes)
        self._bytes += nbytes

    def release(self) -> None:
        """All of it."""
        self._shares.give_back(self.tenant, self._bytes)


class BodyLimit:
    """Hands requests on whose bodies are small and whole; answers the others."""

    def __init__(self, app: ASGIApp, *, limits: Limits, pool: FairPool) -> None:
        """``pool`` looks at large bodies, and its pace is told who is here."""
        self._app, self._limits, self._pool = app, limits, pool
        refusal = f"the requests under way have {limits.max_total_body_bytes} bytes"
        self._bytes = Shares(limits.max_total_body_bytes, refusal=refusal)
        self._coming: defaultdict[str, dict[_Held, float]] = defaultdict(dict)
        """When the last piece of each body came that is being received, by tenant."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive the whole body first: only then is it known to be small enough."""
        # Others have no body that is read, and anybody may send them: nobody waits for it, or rests for a probe of
        # /health.
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        caller = scope.get("state", {}).get("caller")
        held = _Held(self._bytes, caller.tenant if caller is not None else "")
        try:
            with self._pool.pace.here(held.tenant):
                await self._answer(scope, receive, send, held)
        finally:
            held.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, held: _Held) -> None:
        try:
            try:
                body = await self._body(scope, receive, held)
            finally:
                self._coming[held.tenant].pop(held, None)
                if not self._coming[held.tenant]:
                    del self._coming[held.tenant]
            if body is not None and json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
                no_json = "the body is not valid JSON: it is no UTF-8; send a JSON object in UTF-8"
                raise ApiError(400, no_json, code="invalid_json")
            if body is not None and len(body) > SMALL_BYTES:
                reading = self._pool.run(held.tenant, read_large, body, self._limits)
                scope[PARSED] = await while_connected(receive, reading)
        except (ApiError, TimeoutError) as error:
            late = f"the body took longer than {self._limits.body_seconds:g} seconds"
            refusal = error if isinstance(error, ApiError) else ApiError(408, late, code="too_slow")
            headers = {**refusal.headers, "Connection": "close"}
            await JSONResponse(refusal.body(scope["path"]), refusal.status, headers=headers)(scope, receive, send)
            return
        except ClientGoneError:
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
        _request_bytes.set(len(body))
        await self._app(scope, replay, send)

    async def _body(self, scope: Scope, receive: Receive, held: _Held) -> bytes | None:
        limit = self._limits.max_body_bytes
        refusal = ApiError(413, f"the body is larger than {limit} bytes, this server's limit", code="too_large")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:19]) > limit:
                raise refusal
        parts: list[bytes] = []
        size = 0
        now = asyncio.get_running_loop().time
        deadline = now() + self._limits.body_seconds
        while True:
            async with asyncio.timeout_at(deadline):
                message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise refusal
            held.take(len(parts[-1]))
            if not message.get("more_body", False):
                return b"".join(parts)
            # Receiving a body keeps the event loop busy: one tenant's 64 would come before every other request. What is
            # not asked for stays with the client.
            came = now()
            coming = self._coming[held.tenant]
            coming[held] = came
            others = sum(came - last < _COMES_S for last in coming.values()) - 1
            await asyncio.sleep(min(_MAX_PAUSE_S, _PAUSE_S * others))
            deadline += now() - came  # the client is not late by what the server waited
