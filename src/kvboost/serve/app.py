"""The routes, each with who may call it, and the app made of them.

Made by :func:`kvboost.serve.run.serve` and by tests. Invariant: :data:`ACCESS` is the whole of the server; the gate
denies a route that is not in it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from kvboost.engine import KVBoost
from kvboost.scheduler.jobs import JobRunner
from kvboost.serve.api import cache, health, models, tokens
from kvboost.serve.api.chat import chat_completions
from kvboost.serve.api.completions import completions
from kvboost.serve.api.responses import responses
from kvboost.serve.errors import ApiError, from_validation
from kvboost.serve.generation.service import Service
from kvboost.serve.observability.metrics import CountResponses
from kvboost.serve.observability.tracing import Tracing
from kvboost.serve.security.auth import Access, Gate, Keys
from kvboost.serve.security.bodies import BodyLimit
from kvboost.serve.security.limits import Limits
from kvboost.serve.ui.page import page

_log = logging.getLogger("kvboost.serve")


@dataclass(frozen=True)
class Route:
    """Who may call a route, and what answers."""

    access: Access
    handler: Callable[..., Awaitable[Response]]


ROUTES: Mapping[tuple[str, str], Route] = {
    ("GET", "/"): Route(Access.OPEN, page),  # without any numbers; they come from the routes below
    ("GET", "/health"): Route(Access.OPEN, health.health),
    ("GET", "/ready"): Route(Access.OPEN, health.ready),
    ("POST", "/v1/chat/completions"): Route(Access.USER, chat_completions),
    ("POST", "/v1/completions"): Route(Access.USER, completions),
    ("POST", "/v1/responses"): Route(Access.USER, responses),
    ("GET", "/v1/models"): Route(Access.USER, models.models),
    ("GET", "/v1/models/{model:path}"): Route(Access.USER, models.model),
    ("POST", "/tokenize"): Route(Access.USER, tokens.tokenize),
    ("POST", "/detokenize"): Route(Access.USER, tokens.detokenize),
    ("GET", "/metrics"): Route(Access.ADMIN, health.metrics),
    ("GET", "/v1/cache"): Route(Access.ADMIN, cache.show),
    ("POST", "/v1/cache/warm"): Route(Access.ADMIN, cache.warm),
    ("POST", "/v1/cache/pin"): Route(Access.ADMIN, cache.pin),
    ("DELETE", "/v1/cache/pin/{pin}"): Route(Access.ADMIN, cache.unpin),
    ("POST", "/v1/cache/clear"): Route(Access.ADMIN, cache.clear),
}
_OPENAPI = "/openapi.json"
ACCESS: Mapping[tuple[str, str], Access] = {
    ("GET", _OPENAPI): Access.USER,  # FastAPI's own
    **{route: entry.access for route, entry in ROUTES.items()},
}
"""The whole of the server."""


# Newer FastAPI opens spans of its own and hands bodies to their processors; prompts stay here. Older ones ignore it.
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def make_app(
    engine: KVBoost,
    runner: JobRunner,
    *,
    model_name: str,
    keys: Keys | None = None,
    limits: Limits | None = None,
    only_local_names: bool = True,
) -> FastAPI:
    """The ASGI app. ``only_local_names`` refuses, while there are no keys, requests to other names than localhost."""
    limits, keys = limits or Limits(), keys or Keys()
    service = Service(engine, runner, model_name=model_name, limits=limits, keys=keys)
    app = FastAPI(title="KVBoost", openapi_url=_OPENAPI, docs_url=None, redoc_url=None, telemetry=_NO_TELEMETRY)
    app.state.service = service
    for (method, path), route in ROUTES.items():
        app.add_api_route(path, route.handler, methods=[method], response_model=None)
    _describe(app)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    middlewares: list[tuple[Callable[..., ASGIApp], dict[str, Any]]] = [
        (BodyLimit, {"limits": limits}),
        (Tracing, {"paths": frozenset(path for method, path in ROUTES if method == "POST")}),
        (Gate, {"routes": ACCESS, "keys": keys, "limits": limits, "only_local_names": only_local_names}),
        (CountResponses, {"metrics": service.metrics}),
    ]
    for middleware, arguments in middlewares:  # the last one is outermost
        app.add_middleware(middleware, **arguments)
    return app


def _describe(app: FastAPI) -> None:
    """Say in /openapi.json what FastAPI cannot know: the key, and that what is wrong is a 400 in OpenAI's shape."""
    description = app.openapi()
    description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    text, optional = {"type": "string"}, {"type": ["string", "null"]}
    fields = {"message": text, "type": text, "param": optional, "code": optional}
    error = {"type": "object", "properties": fields, "required": list(fields)}
    shape = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    refusal = {"description": "Refused", "content": {"application/json": {"schema": shape}}}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            access = ACCESS[method.upper(), path.replace("{model}", "{model:path}")]
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = refusal
            operation["x-access"] = access.value
            if access is not Access.OPEN:
                operation["security"] = [{"key": []}]


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _refused(request, from_validation(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # FastAPI's, for a body that its JSON parser could not take
        no_json = "the body is not valid JSON: it is nested too deeply or is no UTF-8; send a JSON object"
        return await _refused(request, ApiError(400, no_json, code="invalid_json"))
    return await _refused(request, ApiError(error.status_code, str(error.detail), code="invalid_request"))


async def _failed(request: Request, error: Exception) -> Response:
    _log.error("a request failed", exc_info=error)
    return await _refused(request, ApiError(500, "the server failed; its log says why"))
