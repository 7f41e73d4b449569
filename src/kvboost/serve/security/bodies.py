"""Receives and parses request bodies, bounded in bytes, in time and in values, whatever their headers say.

:class:`BodyLimit` runs before the app's routing, :class:`JsonRoute` is the class of its routes, :class:`Tokenizing`
runs what makes tokens of a body. Invariants: a body is whole and small enough before anything reads it; a large one is
counted and parsed in a pool, as no other request and no step of the model runs meanwhile; what Python's JSON parser
takes is taken, and what it refuses is refused in its words; a short prompt never waits for a long one to be tokenised.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.serve.errors import ApiError
from kvboost.serve.security.fair_pool import FairPool
from kvboost.serve.security.limits import Limits, Shares

T = TypeVar("T")
VALUES = b",[{"
CONTAINERS = b"[{"  # each costs its reader as much as many values
_PARSED = "kvboost.parsed"  # a request's large body, in its ASGI scope
_LARGE_BYTES = 16 * 2**10  # a text of as many characters is tokenised in some 10 ms
_SMALL_BYTES = 64 * 2**10  # counted and parsed in a millisecond or two, whatever is in them
_WINDOW = 64 * 2**10  # bytes that are looked at in one call, which lets nobody else run
_STRINGS = re.compile(rb'"[^"]*+"?')
_PAUSE_S = 0.002  # before the next piece of a body (64 KiB or more), for each other body of its tenant that comes
_MAX_PAUSE_S = 0.05
_COMES_S = 1.0  # a body comes as long as its last piece is younger
_CLIENT_GONE = 499  # nobody reads it; it is what logs and metrics show
_limits: ContextVar[Limits | None] = ContextVar("limits of this request's server", default=None)
_request_bytes: ContextVar[int] = ContextVar("bytes of this request", default=0)


def limits_now() -> Limits:
    """Of the server that parses a body now, as pydantic's checks have no other way to know; else the defaults."""
    return _limits.get() or Limits()


def request_bytes_now() -> int:
    """Of the body, and of what is remembered for it. 0 outside of any request."""
    return _request_bytes.get()


def add_remembered_bytes(nbytes: int) -> None:
    """The request that is being answered goes on with so much more than its body."""
    _request_bytes.set(_request_bytes.get() + nbytes)


class ClientGoneError(Exception):
    """Nobody waits for an answer any more."""


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. Call it once the whole body has been received."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns or raises. It is cancelled when the client goes away, which raises ClientGoneError."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
    if working.cancelled():
        raise ClientGoneError
    return working.result()


class _Held:
    """What one request holds of the bytes that all may."""

    def __init__(self, shares: Shares, tenant: str) -> None:
        self._shares, self.tenant, self._bytes = shares, tenant, 0

    def add(self, nbytes: int) -> None:
        """So many more. Raises a 429."""
        self._shares.add(self.tenant, nbytes)
        self._bytes += nbytes

    def release(self) -> None:
        """All of it."""
        self._shares.give_back(self.tenant, self._bytes)


class BodyLimit:
    """Hands requests on whose bodies are small and whole; answers the others."""

    def __init__(self, app: ASGIApp, *, limits: Limits, pool: FairPool, under_way: Counter[str]) -> None:
        """``pool`` looks at large bodies. ``under_way`` is told how many requests each tenant has."""
        self._app, self._limits, self._pool, self._under_way = app, limits, pool, under_way
        refusal = f"the requests under way have {limits.max_total_body_bytes} bytes"
        self._bytes = Shares(limits.max_total_body_bytes, refusal=refusal)
        self._coming: defaultdict[str, dict[_Held, float]] = defaultdict(dict)
        """When the last piece of each body came that is being received, by tenant."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive the whole body first: only then is it known to be small enough."""
        # Others have no body that is read, and anybody may send them: nobody waits for it.
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        caller = scope.get("state", {}).get("caller")
        held = _Held(self._bytes, caller.tenant if caller is not None else "")
        self._under_way[held.tenant] += 1
        try:
            await self._answer(scope, receive, send, held)
        finally:
            self._under_way[held.tenant] -= 1
            held.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, held: _Held) -> None:
        try:
            try:
                body = await self._body(scope, receive, held)
            finally:
                self._coming[held.tenant].pop(held, None)
                if not self._coming[held.tenant]:
                    del self._coming[held.tenant]
            if json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
                no_json = "the body is not valid JSON: it is no UTF-8; send a JSON object in UTF-8"
                raise ApiError(400, no_json, code="invalid_json")
            if len(body) > _SMALL_BYTES:
                reading = self._pool.run(held.tenant, _read_large, body, self._limits)
                scope[_PARSED] = await while_connected(receive, reading)
        except (ApiError, TimeoutError) as error:
            late = f"the body took longer than {self._limits.body_seconds:g} seconds"
            refusal = error if isinstance(error, ApiError) else ApiError(408, late, code="too_slow")
            headers = {**refusal.headers, "Connection": "close"}
            await JSONResponse(refusal.body(scope["path"]), refusal.status, headers=headers)(scope, receive, send)
            return
        except ClientGoneError:
            return
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

    async def _body(self, scope: Scope, receive: Receive, held: _Held) -> bytes:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                self._check_bytes(int(value[:19]))
        parts: list[bytes] = []
        size = 0
        now = asyncio.get_running_loop().time
        deadline = now() + self._limits.body_seconds
        while True:
            async with asyncio.timeout_at(deadline):
                message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self._check_bytes(size)
            held.add(len(parts[-1]))
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

    def _check_bytes(self, size: int) -> None:
        if size > (limit := self._limits.max_body_bytes):
            raise ApiError(413, f"the body is larger than {limit} bytes, this server's limit", code="too_large")


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
    """Whether a JSON text has more than ``limit`` of these bytes outside of strings. Broken JSON is no error.

    A parser holds the interpreter until it is done, with a million empty lists for long. This lets others run.
    """
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


def parse(body: bytes) -> Any:
    """The values of a JSON text. Pydantic's parser holds the interpreter for less time than Python's own."""
    try:
        return from_json(body)
    except ValueError:
        return json.loads(body)  # takes half a surrogate pair, and its error says where it is


def _read_large(body: bytes, limits: Limits) -> tuple[Any, Exception | None]:
    """What a large body holds, counted, or why it is no JSON. Raises a 413. For a worker thread."""
    check_size(body, limits, what="the body has")
    try:
        return parse(body), None
    except (ValueError, RecursionError) as error:
        return None, error


class _JsonRequest(Request):
    async def json(self) -> Any:
        """What the body holds. Raises what parsing it raised."""
        if _PARSED not in self.scope:
            return parse(await self.body())
        value, error = self.scope.pop(_PARSED)
        if error is not None:
            raise error
        return value


class JsonRoute(APIRoute):
    """A route whose body is parsed by :func:`parse`, and whose work ends when the client goes away."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's own, over requests that parse differently."""
        handle = super().get_route_handler()

        async def handle_body(request: Request) -> Response:
            asked = _JsonRequest(request.scope, request.receive)
            await asked.body()  # from here on the next that is received is the client's leaving
            try:
                return await while_connected(asked.receive, handle(asked))
            except ClientGoneError:
                return Response(status_code=_CLIENT_GONE)

        return handle if self.body_field is None else handle_body


class Tokenizing:
    """Runs what tokenises. Raises what a :class:`FairPool` raises."""

    def __init__(self, *, max_waiting: int, large: FairPool) -> None:
        """``large`` reads large requests."""
        self._short = FairPool(max_waiting=max_waiting, name="kvboost-tokenize")
        self._long = large

    async def run(self, tenant: str, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """What ``work`` returns or raises. Raises a 429 if too many wait."""
        return await self._pool(request_bytes_now()).run(tenant, work, *arguments, **keywords)

    async def finish(self, tenant: str, size: int, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """The same for the end of an answer to a prompt of ``size`` characters. It is never refused."""
        return await self._pool(size).finish(tenant, work, *arguments, **keywords)

    def _pool(self, size: int) -> FairPool:
        return self._long if size > _LARGE_BYTES else self._short

    def close(self) -> None:
        """Begin nothing more."""
        self._short.close()
