"""The routes, each with who may call it, and the app made of them.

Made by :func:`kvboost.serve.run.serve` and by tests. Invariant: :data:`ACCESS` is the whole of the server; the gate
denies a route that is not in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvboost.engine import KVBoost
from kvboost.errors import ConfigError
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve.api import messages, rank, status, tokens
from kvboost.serve.api.chat import chat_completions
from kvboost.serve.api.common import IGNORED
from kvboost.serve.api.completions import completions
from kvboost.serve.api.responses import responses
from kvboost.serve.errors import ApiError, from_validation, speaks_anthropic
from kvboost.serve.generation.service import Service
from kvboost.serve.observability.requests import RequestLog
from kvboost.serve.security.auth import Access, Gate, Keys, RateLimit
from kvboost.serve.security.bodies import BodyLimit, JsonRoute
from kvboost.serve.security.limits import Limits


@dataclass(frozen=True)
class Route:
    """Who may call a route, and what answers."""

    access: Access
    handler: Callable[..., Awaitable[Response]]


ROUTES: Mapping[tuple[str, str], Route] = {
    ("GET", "/"): Route(Access.OPEN, status.page),  # without any numbers; they come from the routes below
    ("GET", "/health"): Route(Access.OPEN, status.health),
    ("GET", "/ready"): Route(Access.OPEN, status.ready),
    ("POST", "/v1/chat/completions"): Route(Access.USER, chat_completions),
    ("POST", "/v1/completions"): Route(Access.USER, completions),
    ("POST", "/v1/responses"): Route(Access.USER, responses),
    ("POST", "/v1/messages"): Route(Access.USER, messages.messages),
    ("POST", "/v1/messages/count_tokens"): Route(Access.USER, messages.count_tokens),
    ("GET", "/v1/models"): Route(Access.USER, status.models),
    ("GET", "/v1/models/{model:path}"): Route(Access.USER, status.model),
    ("POST", "/tokenize"): Route(Access.USER, tokens.tokenize),
    ("POST", "/detokenize"): Route(Access.USER, tokens.detokenize),
    ("POST", "/v1/arrange"): Route(Access.USER, tokens.arrange),
    **{("POST", path): Route(Access.USER, rank.score) for path in ("/score", "/v1/score")},
    **{("POST", path): Route(Access.USER, rank.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    ("GET", "/metrics"): Route(Access.ADMIN, status.metrics),
    ("GET", "/v1/cache"): Route(Access.ADMIN, status.show_cache),
    ("POST", "/v1/cache/warm"): Route(Access.ADMIN, status.warm),
    ("POST", "/v1/cache/pin"): Route(Access.ADMIN, status.pin),
    ("DELETE", "/v1/cache/pin/{pin}"): Route(Access.ADMIN, status.unpin),
    ("POST", "/v1/cache/clear"): Route(Access.ADMIN, status.clear),
}
_OPENAPI = "/openapi.json"
ACCESS: Mapping[tuple[str, str], Access] = {
    ("GET", _OPENAPI): Access.USER,  # FastAPI's own
    **{route: entry.access for route, entry in ROUTES.items()},
}
"""The whole of the server."""


_CORS: Any = {
    "allow_methods": ["GET", "POST", "DELETE"],
    "allow_headers": ["*"],  # clients in browsers send headers of their own, such as x-stainless-lang
    "expose_headers": ["x-request-id", "retry-after", IGNORED]
    + [f"x-ratelimit-{what}-{name}" for what in ("limit", "remaining", "reset") for name in ("requests", "tokens")],
}
# Newer FastAPI opens spans of its own and hands bodies to their processors; prompts stay here. Older ones ignore it.
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def make_app(
    engine: KVBoost,
    runner: BatchRunner,
    *,
    model_name: str,
    keys: Keys | None = None,
    limits: Limits | None = None,
    only_local_names: bool = True,
    origins: Sequence[str] = (),
    root_path: str = "",
    adapters: Sequence[str] = (),
) -> FastAPI:
    """The ASGI app. ``only_local_names`` refuses, while there are no keys, requests to other names than localhost.

    ``adapters`` of the engine are models of their own. Pages of ``origins`` may call it from a browser. It is reached
    under ``root_path`` as well.
    """
    if root_path and any(path.startswith(root_path + "/") for _, path in ACCESS):
        raise ConfigError(f"root_path={root_path!r} is where routes of this server are; choose another path")
    limits, keys = limits or Limits(), keys or Keys()
    service = Service(engine, runner, model_name=model_name, limits=limits, keys=keys, adapters=adapters)
    app = FastAPI(title="KVBoost", openapi_url=_OPENAPI, docs_url=None, redoc_url=None, telemetry=_NO_TELEMETRY)
    app.state.service = service
    app.router.route_class = JsonRoute
    for (method, path), route in ROUTES.items():
        app.add_api_route(path, route.handler, methods=[method], response_model=None)
    _describe(app)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    users = frozenset(path for (method, path), access in ACCESS.items() if (method, access) == ("POST", Access.USER))
    gate = {"routes": ACCESS, "keys": keys, "limits": limits, "only_local_names": only_local_names, "origins": origins}
    middlewares: list[tuple[Callable[..., ASGIApp], dict[str, Any]]] = [
        (BodyLimit, {"limits": limits, "pool": service.reading, "under_way": service.under_way}),
        (RateLimit, {"rates": service.rates, "paths": users}),
        (Gate, gate),
        *([(CORSMiddleware, {"allow_origins": origins, **_CORS})] if origins else []),
        (RequestLog, {"metrics": service.metrics}),
        *([(_UnderRoot, {"root": root_path})] if root_path else []),
    ]
    for middleware, arguments in middlewares:  # the last one is outermost
        app.add_middleware(middleware, **arguments)
    return app


def _describe(app: FastAPI) -> None:
    """Say in /openapi.json what FastAPI cannot know: the key, and the shapes of refusals."""
    description = app.openapi()
    description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    text, optional = {"type": "string"}, {"type": ["string", "null"]}
    fields = {"message": text, "type": text, "param": optional, "code": optional}
    error = {"type": "object", "properties": fields, "required": list(fields)}
    shape = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    short = {"type": "object", "properties": {"type": text, "message": text}, "required": ["type", "message"]}
    anthropic = {"type": "object", "properties": {"type": text, "error": short}, "required": ["type", "error"]}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            access = ACCESS[method.upper(), path.replace("{model}", "{model:path}")]
            operation["responses"].pop("422", None)
            schema = anthropic if speaks_anthropic(path) else shape
            operation["responses"]["4XX"] = {
                "description": "Refused",
                "content": {"application/json": {"schema": schema}},
            }
            operation["x-access"] = access.value
            if access is not Access.OPEN:
                operation["security"] = [{"key": []}]


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(request.scope["path"]), error.status, headers=error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _refused(request, from_validation(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # FastAPI's, for a body that its JSON parser could not take
        no_json = "the body is not valid JSON: it is nested too deeply or is no UTF-8; send a JSON object"
        return await _refused(request, ApiError(400, no_json, code="invalid_json"))
    return await _refused(request, ApiError(error.status_code, str(error.detail), code="invalid_request"))


class _UnderRoot:
    """Takes the root path off a request's path: proxies hand it on with or without."""

    def __init__(self, app: ASGIApp, *, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["root_path"] = self._root  # for /openapi.json
            if f"{scope['path']}/".startswith(self._root + "/"):
                scope["path"] = scope["path"].removeprefix(self._root) or "/"
        await self._app(scope, receive, send)
