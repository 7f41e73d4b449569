"""What the endpoints share: who asks, the header about fields without effect, and server-sent events.

Used by all of them. Invariants: an answer that is streamed ends at once when its client goes away, also while it waits
for its first token; what is refused before the first event is refused with a status.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvboost.failures import log_failure
from kvboost.serve.errors import ApiError
from kvboost.serve.generation.prompts import ChatPrompts
from kvboost.serve.generation.service import Service
from kvboost.serve.security.auth import Caller
from kvboost.serve.security.bodies import ClientGoneError, while_connected

_log = logging.getLogger("kvboost.serve")
DONE = "[DONE]"
IGNORED = "x-kvboost-ignored"
_MAX_NAMED = 32  # fields; clients take headers of a few kilobytes


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _caller(request: Request) -> Caller:
    caller: Caller = request.scope["state"]["caller"]
    return caller


AppService = Annotated[Service, Depends(_service)]
AppCaller = Annotated[Caller, Depends(_caller)]
"""Whom the gate let through; None where no key was given and none is needed."""


def with_ignored(response: Response, fields: Sequence[str]) -> Response:
    """The same response, which names the fields that were accepted and have no effect."""
    if fields:
        response.headers[IGNORED] = ", ".join(fields[:_MAX_NAMED])
    return response


def unread(chats: ChatPrompts, fields: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The fields without effect. ``fields`` maps each to the variables it sets; the template must read one of them."""
    return [name for name, variables in fields.items() if variables and not any(map(chats.reads, variables))]


class _EventStream(Response):
    """Sends what ``events`` yields: objects as JSON, a pair as (event name, object), None as a comment.

    ``failure`` makes the last event of a stream that fails.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], failure: Callable[[ApiError], Any]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._failure = events, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or until the client is gone."""
        with suppress(ClientGoneError, OSError):  # there is nobody to tell
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        failed: ApiError | None = None
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    await send({"type": "http.response.body", "body": _written(event), "more_body": True})
        except ApiError as error:  # too late for a status
            failed = error
        except Exception as error:  # noqa: BLE001 - logged; the headers are gone, so the stream itself has to say it
            log_failure(_log, error, "a stream failed")
            failed = ApiError(500, "the server failed; its log says why")
        if failed is not None:
            await send({"type": "http.response.body", "body": _written(self._failure(failed)), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def streamed(events: AsyncIterator[Any], *, failure: Callable[[ApiError], Any] = ApiError.body) -> Response:
    """A stream of these events. The first is made now, so that what is refused is refused with a status."""
    first = await anext(events)

    async def all_of_them() -> AsyncIterator[Any]:
        async with aclosing(events):  # type: ignore[type-var]
            yield first
            async for event in events:
                yield event

    return _EventStream(all_of_them(), failure)


def _written(event: Any) -> bytes:
    if event is None:
        return b": taken\n\n"  # a comment: clients skip it
    if event == DONE:
        return b"data: [DONE]\n\n"
    name, value = event if isinstance(event, tuple) else (None, event)
    # In ASCII and compact: no character of an answer can break a line of the stream.
    data = f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
    return (data if name is None else f"event: {name}\n{data}").encode()
