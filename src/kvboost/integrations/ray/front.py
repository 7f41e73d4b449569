"""What takes HTTP requests and hands each to a replica: the ingress of the Serve application.

Made by Ray Serve from :func:`kvboost.integrations.ray.app.build_app`. It loads no model and imports no torch. Which
replica is chosen is up to the router of the handle it calls. Invariants: a request whose replica died before it began
to answer is asked again elsewhere; one that was begun is broken off, never completed by another.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayActorError
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kvboost.integrations.ray.asgi import plain_scope
from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import Limits

_log = logging.getLogger("kvboost.serve")
_ATTEMPTS = 3
_TO_ALL = {("GET", "/metrics"), ("POST", "/v1/cache/clear")}
_PINS = "/v1/cache/pin"


class Front:
    """What Serve makes. ``serve.ingress`` takes no class that can be called, as an ASGI app is."""

    def __init__(self, replicas: Any, *, limits: Limits, root_path: str) -> None:
        """``replicas`` is Serve's handle of them."""
        self._app = FleetApp(replicas, limits=limits, root_path=root_path)

    def __serve_build_asgi_app__(self) -> FleetApp:
        """What ``serve.ingress`` asks for."""
        return self._app


class FleetApp:
    """The ASGI app of the fleet."""

    def __init__(self, replicas: Any, *, limits: Limits, root_path: str = "") -> None:
        self._streamed, self._all = replicas.options(stream=True), replicas
        self._limits, self._root = limits, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        if scope["type"] != "http":
            return  # no websockets here
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await self._body(receive)
        except TimeoutError:
            late = f"the body took longer than {self._limits.body_seconds:g} seconds"
            await _refuse(scope, receive, send, ApiError(408, late, code="too_slow"))
            return
        if body is None:
            return  # the client has gone
        asked = plain_scope(scope)
        if self._root and asked["path"].startswith(self._root + "/"):
            asked["path"] = asked["path"].removeprefix(self._root)  # a replica takes it with and without
        if asked["path"].startswith(_PINS):
            one = "pins are of one process; a fleet has none: keep what must stay in the shared tier (kvboost warm)"
            await _refuse(scope, receive, send, ApiError(501, one, code="not_in_a_fleet"))
        elif (asked["method"], asked["path"]) in _TO_ALL:
            await (await self._from_all(asked, body))(scope, receive, send)
        else:
            await self._from_one(asked, body, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The body, or so much of it that the replica refuses it; None if the client has gone."""
        body = bytearray()
        while len(body) <= self._limits.max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return bytes(body)

    async def _from_one(self, scope: dict[str, Any], body: bytes, send: Send) -> None:
        begun = False
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async for messages in self._streamed.answer.remote(scope, body):
                    for message in messages:
                        begun = True
                        await send(message)
                return
            except RayActorError:
                if begun or attempt == _ATTEMPTS:
                    raise
                _log.warning("a replica died before it answered; the request is asked again")

    async def _from_all(self, scope: dict[str, Any], body: bytes) -> Response:
        """Metrics of all replicas, each with its label; of other requests the worst answer."""
        answers = await self._all.broadcast("answer_whole", scope, body).results_async(return_exceptions=True)
        silent = [answer for answer in answers if isinstance(answer, BaseException)]
        for failed in silent:
            _log.warning("a replica did not answer %s: %s", scope["path"], failed)
        parsed = [(name, *_parts(messages)) for name, messages in (a for a in answers if isinstance(a, tuple))]
        if not parsed or (silent and scope["path"] != "/metrics"):
            of_all = f"{len(silent)} of {len(answers)} replicas did not answer; ask again"
            return JSONResponse(ApiError(503, of_all).body(scope["path"]), 503)
        _, status, headers, text = max(parsed, key=lambda answer: answer[1])
        if status == 200 and scope["path"] == "/metrics":
            return PlainTextResponse(labelled({name: own.decode() for name, _, _, own in parsed}), headers=headers)
        return Response(text, status, headers=headers)


def _parts(messages: list[Message]) -> tuple[int, dict[str, str], bytes]:
    start = next(message for message in messages if message["type"] == "http.response.start")
    body = b"".join(message.get("body", b"") for message in messages)
    headers = {name.decode(): value.decode() for name, value in start["headers"] if name != b"content-length"}
    return int(start["status"]), headers, body


def labelled(texts: dict[str, str]) -> str:
    """The metrics of all replicas as one text in Prometheus' format, with a label ``replica``."""
    families: dict[str, list[str]] = {}  # by the lines before their samples, which must stand together
    for replica, text in texts.items():
        head = ""
        for line in text.splitlines():
            if line.startswith("#"):
                head = f"{head}\n{line}" if head.startswith("# HELP") and line.startswith("# TYPE") else line
                continue
            labels, braces, value = line.rpartition("} ")
            name, _, rest = (labels if braces else line).partition("{" if braces else " ")
            own = f'{rest},replica="{replica}"' if braces else f'replica="{replica}"'
            families.setdefault(head, []).append(f"{name}{{{own}}} {value if braces else rest}")
    return "".join("\n".join([head, *samples]) + "\n" for head, samples in families.items())


async def _refuse(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    await JSONResponse(error.body(scope["path"]), error.status, headers=error.headers)(scope, receive, send)


async def _live(receive: Receive, send: Send) -> None:
    """Nothing to start and nothing to end."""
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})
