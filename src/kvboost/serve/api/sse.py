"""Server-sent events, and answers that stop when nobody waits for them any more.

Used by every endpoint that generates or tokenises. Invariant: when the client goes away, the code that makes the
answer is cancelled at once, also while its prompt waits to be tokenised or it waits for its first token.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvboost.failures import log_failure
from kvboost.serve.errors import ApiError
from kvboost.serve.security import leaving

_log = logging.getLogger("kvboost.serve")
DONE = "[DONE]"
_CLIENT_GONE = 499  # nobody reads it; it is what logs and metrics show


def to_json(value: Any) -> str:
    """Compact JSON in ASCII: no character of an answer can break a line of the stream."""
    return json.dumps(value, separators=(",", ":"))


class EventStream(Response):
    """Sends what ``events`` yields: objects as JSON, a pair as (event name, object), None as a comment.

    ``failure`` makes the last event of a stream that fails.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], *, failure: Callable[[ApiError], Any] = ApiError.body) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._failure = events, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or until the client is gone."""
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(leaving.disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            sending.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
        if not sending.cancelled() and (error := sending.exception()) is not None and not isinstance(error, OSError):
            raise error

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    await send({"type": "http.response.body", "body": _written(event), "more_body": True})
        except ApiError as error:  # too late for a status
            await send({"type": "http.response.body", "body": _written(self._failure(error)), "more_body": True})
        except Exception as error:  # noqa: BLE001 - logged; the headers are gone, so the stream itself has to say it
            log_failure(_log, error, "a stream failed")
            failure = ApiError(500, "the server failed; its log says why")
            await send({"type": "http.response.body", "body": _written(self._failure(failure)), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def chained(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The same events. Those up to the first are made now, so that what is refused is refused with a status."""
    first = await anext(events)

    async def all_of_them() -> AsyncIterator[Any]:
        async with aclosing(events):  # type: ignore[type-var]
            yield first
            async for event in events:
                yield event

    return all_of_them()


def _written(event: Any) -> bytes:
    if event is None:
        return b": taken\n\n"  # a comment: clients skip it
    if event == DONE:
        return b"data: [DONE]\n\n"
    if isinstance(event, tuple):
        name, value = event
        return f"event: {name}\ndata: {to_json(value)}\n\n".encode()
    return f"data: {to_json(event)}\n\n".encode()


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """What ``work`` answers; it is cancelled when the client goes away."""
    try:
        return await leaving.while_connected(request.receive, work)
    except leaving.ClientGoneError:
        return Response(status_code=_CLIENT_GONE)
