"""The routes, each with who may call it, and the app made of them.

Made by :func:`kvboost.serve.run.serve` and by tests. Invariant: :data:`ROUTES` is the whole of the server; a route
that is not in it cannot be added and cannot be reached.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
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
from kvboost.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
    WarmRequest,
)
from kvboost.serve.security.auth import Access, Gate, Keys
from kvboost.serve.security.bodies import BodyLimit
from kvboost.serve.security.limits import Limits
from kvboost.serve.ui.page import page

_log = logging.getLogger("kvboost.serve")

ROUTES: Mapping[tuple[str, str], Access] = {
    ("GET", "/"): Access.OPEN,  # the page without any numbers; they come from the routes below
    ("GET", "/health"): Access.OPEN,
    ("GET", "/ready"): Access.OPEN,
    ("POST", "/v1/chat/completions"): Access.USER,
    ("POST", "/v1/completions"): Access.USER,
    ("POST", "/v1/responses"): Access.USER,
    ("GET", "/v1/models"): Access.USER,
    ("GET", "/v1/models/{model:path}"): Access.USER,
    ("POST", "/tokenize"): Access.USER,
    ("POST", "/detokenize"): Access.USER,
    ("GET", "/openapi.json"): Access.USER,
    ("GET", "/metrics"): Access.ADMIN,
    ("GET", "/v1/cache"): Access.ADMIN,
    ("POST", "/v1/cache/warm"): Access.ADMIN,
    ("POST", "/v1/cache/pin"): Access.ADMIN,
    ("DELETE", "/v1/cache/pin/{pin}"): Access.ADMIN,
    ("POST", "/v1/cache/clear"): Access.ADMIN,
}


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
    app = FastAPI(title="KVBoost", openapi_url="/openapi.json", docs_url=None, redoc_url=None, telemetry=_NO_TELEMETRY)
    app.state.service = service
    _add_routes(app, service)
    _describe(app)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    wrapped: list[tuple[Callable[..., ASGIApp], dict[str, Any]]] = [
        (BodyLimit, {"limits": limits}),
        (Tracing, {"paths": frozenset(path for method, path in ROUTES if method == "POST")}),
        (Gate, {"routes": ROUTES, "keys": keys, "limits": limits, "only_local_names": only_local_names}),
        (CountResponses, {"metrics": service.metrics}),
    ]
    for middleware, arguments in wrapped:  # the last one stands outermost
        app.add_middleware(middleware, **arguments)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    def add(method: str, path: str) -> Callable[[Callable[..., Awaitable[Response]]], None]:
        if (method, path) not in ROUTES:
            raise ValueError(f"{method} {path} is not listed")  # a mistake of ours, seen at the first start

        def register(handler: Callable[..., Awaitable[Response]]) -> None:
            app.add_api_route(path, handler, methods=[method], response_model=None)

        return register

    @add("POST", "/v1/chat/completions")
    async def chat_completions_(body: ChatRequest, request: Request) -> Response:
        return await chat_completions(service, body, request)

    @add("POST", "/v1/completions")
    async def completions_(body: CompletionRequest, request: Request) -> Response:
        return await completions(service, body, request)

    @add("POST", "/v1/responses")
    async def responses_(body: ResponsesRequest, request: Request) -> Response:
        return await responses(service, body, request)

    @add("GET", "/v1/models")
    async def models_() -> Response:
        return models.models(service)

    @add("GET", "/v1/models/{model:path}")
    async def model_(model: str) -> Response:
        return models.model(service, model)

    @add("POST", "/tokenize")
    async def tokenize_(body: TokenizeRequest, request: Request) -> Response:
        return await tokens.tokenize(service, body, request)

    @add("POST", "/detokenize")
    async def detokenize_(body: DetokenizeRequest) -> Response:
        return await tokens.detokenize(service, body)

    @add("GET", "/")
    async def page_() -> Response:
        return page()

    @add("GET", "/health")
    async def health_() -> Response:
        return health.health()

    @add("GET", "/ready")
    async def ready_() -> Response:
        return health.ready(service)

    @add("GET", "/metrics")
    async def metrics_() -> Response:
        return await health.metrics(service)

    @add("GET", "/v1/cache")
    async def cache_() -> Response:
        return await cache.show(service)

    @add("POST", "/v1/cache/warm")
    async def warm_(body: WarmRequest, request: Request) -> Response:
        return await cache.warm(service, body, request)

    @add("POST", "/v1/cache/pin")
    async def pin_(body: WarmRequest, request: Request) -> Response:
        return await cache.pin(service, body, request)

    @add("DELETE", "/v1/cache/pin/{pin}")
    async def unpin_(pin: str) -> Response:
        return await cache.unpin(service, pin)

    @add("POST", "/v1/cache/clear")
    async def clear_() -> Response:
        return await cache.clear(service)


def _describe(app: FastAPI) -> None:
    """Say in /openapi.json what FastAPI cannot know: the key, and that what is wrong is a 400 in OpenAI's shape."""
    description = app.openapi()
    description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    shape = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    }
    refusal = {"description": "Refused", "content": {"application/json": {"schema": shape}}}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            listed = "/v1/models/{model:path}" if path == "/v1/models/{model}" else path
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = refusal
            operation["x-access"] = ROUTES[method.upper(), listed].value
            if ROUTES[method.upper(), listed] is not Access.OPEN:
                operation["security"] = [{"key": []}]


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _refused(request, from_validation(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _refused(request, ApiError(error.status_code, str(error.detail), code="invalid_request"))


async def _failed(request: Request, error: Exception) -> Response:
    _log.error("a request failed", exc_info=error)
    return await _refused(request, ApiError(500, "the server failed; its log says why"))
