"""The small endpoints: models, tokens, readiness and metrics."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.serve.api.chat import encode_messages
from kvboost.serve.api.errors import bad_request
from kvboost.serve.api.schemas import DetokenizeRequest, TokenizeRequest
from kvboost.serve.generation.service import Service
from kvboost.serve.observability.metrics import Metrics
from kvboost.serve.security.auth import caller_of


def models(service: Service) -> Response:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_card(service)]})


def model(service: Service, name: str) -> Response:
    """That model, by name."""
    service.check_model(name)
    return JSONResponse(_card(service))


def _card(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "kvboost",
        "max_model_len": service.longest,
    }


async def tokenize(service: Service, body: TokenizeRequest, request: Request) -> Response:
    """The ids of a text or of a chat, as a generation would read them."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give prompt or messages, one of them", param="prompt")
    if body.messages is not None:
        chat = await asyncio.to_thread(encode_messages, service, body.messages, caller_of(request), None)
        tokens = chat.token_ids
    else:
        tokens = await asyncio.to_thread(service.encode, body.prompt or "")
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.longest})


async def detokenize(service: Service, body: DetokenizeRequest) -> Response:
    """The text of ids, special tokens written out."""
    service.check_model(body.model)
    if any(token >= service.vocab_size for token in body.tokens):
        raise bad_request(f"this model has {service.vocab_size} tokens", param="tokens")
    return JSONResponse({"prompt": await asyncio.to_thread(service.chats.decode, body.tokens, special=True)})


def ready(service: Service) -> Response:
    """Whether new requests are taken."""
    if service.draining:
        return JSONResponse({"status": "draining"}, 503)
    if not service.runner.load().alive:
        return JSONResponse({"status": "failed"}, 503)
    return JSONResponse({"status": "ready"})


async def metrics(service: Service) -> Response:
    """Prometheus' text."""
    text = await asyncio.to_thread(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class CountResponses:
    """Counts responses by status, refused ones too. Stands outermost."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on and watch what is sent."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responded(message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
