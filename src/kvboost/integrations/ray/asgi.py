"""HTTP requests to an ASGI app in the same process, and what of a request another process can be sent.

Used by :mod:`kvboost.integrations.ray.front` and :mod:`kvboost.integrations.ray.replica`. Invariant: a caller that
stops listening looks to the app like a client that has gone, so the app ends what it began.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message, Scope

_CARRIED = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
)


def plain_scope(scope: Scope) -> dict[str, Any]:
    """A request without the objects of the server that received it."""
    return {"asgi": {"version": "3.0"}, "root_path": "", **{name: scope[name] for name in _CARRIED if name in scope}}


class LocalApp:
    """An ASGI app that is asked in its own event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._ending: set[asyncio.Task[None]] = set()  # asyncio itself keeps no task alive

    async def exchange(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """The app's answer: each time all messages that are there."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if request:
                return request.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(dict(scope), receive, messages.put)
            finally:
                messages.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            last: Message | None = await messages.get()
            while last is not None:
                together: list[Message] = []
                while last is not None:
                    together.append(last)
                    if messages.empty():
                        break
                    last = messages.get_nowait()
                yield together
                last = await messages.get() if last is not None else None
            await running
        finally:
            gone.set()
            if not running.done():  # it sees the disconnect, and ends by itself
                self._ending.add(running)
                running.add_done_callback(self._ending.discard)

    async def ask(self, method: str, path: str) -> int:
        """The status of a request without a body, from this machine."""
        scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode()}
        scope |= {"headers": [(b"host", b"localhost")], "query_string": b"", "scheme": "http"}
        status = 500
        async for messages in self.exchange(plain_scope(scope), b""):
            status = next((m["status"] for m in messages if m["type"] == "http.response.start"), status)
        return status
