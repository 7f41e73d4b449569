"""/v1/cache, for the admin: what is kept, reading ahead, pinning and forgetting."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvboost.engine.jobs import Sampling
from kvboost.serve.auth import Caller
from kvboost.serve.chat import encode_messages
from kvboost.serve.errors import ApiError, bad_request
from kvboost.serve.schemas import WarmRequest
from kvboost.serve.service import Asked, Service
from kvboost.serve.sse import while_connected


async def show(service: Service) -> Response:
    """What the cache holds, what runs, and the last requests."""
    stats = await asyncio.to_thread(service.engine.cache_stats)
    load = service.runner.load()
    return JSONResponse(
        {
            "object": "kvboost.cache",
            "model": service.model_name,
            "cache": stats,
            "load": {"running": load.running, "waiting": load.waiting, "kv_bytes": load.cached_bytes},
            "streams": service.streams.running,
            "tenants": service.keys.tenants,
            "requests": service.recent.listed(),
        }
    )


async def warm(service: Service, body: WarmRequest, request: Request) -> Response:
    """Read a prompt ahead, for one tenant."""
    caller = Caller(_tenant(service, body), admin=False)
    if body.messages is not None and body.prompt is None:
        chat = await asyncio.to_thread(encode_messages, service, body.messages, caller, None)
        ids, boundaries = chat.token_ids, chat.boundaries
    elif body.prompt is not None and body.messages is None:
        ids, boundaries = await asyncio.to_thread(service.encode, body.prompt), []
    else:
        raise bad_request("give prompt or messages, one of them", param="prompt")
    # A job of one token reads as every other job reads, in the same batch and under the same budgets.
    asked = Asked("warm", [(ids, boundaries)], caller, 1, Sampling())
    return await while_connected(request, _read(service, asked))


async def _read(service: Service, asked: Asked) -> Response:
    async with service.answering(asked, prefix="warm-") as answer:
        async for _ in answer.events():
            pass
    return JSONResponse({"object": "kvboost.warm", "prompt_tokens": answer.prompt_tokens, **answer.reuse()})


async def pin(service: Service, body: WarmRequest, request: Request) -> Response:
    """Keep a prompt against eviction."""
    raise ApiError(501, "pinning is not there yet")


async def clear(service: Service) -> Response:
    """Forget everything that was read, of all tenants."""
    await asyncio.to_thread(service.engine.clear)
    return JSONResponse({"object": "kvboost.clear", "cleared": True})


def _tenant(service: Service, body: WarmRequest) -> str:
    """Whose prompts will find what is read ahead."""
    known = service.keys.tenants
    if body.tenant is not None:
        if body.tenant not in known:
            raise bad_request("there is no such tenant; GET /v1/cache lists them", param="tenant")
        return body.tenant
    if len(known) > 1:
        raise bad_request("say for which tenant; GET /v1/cache lists them", param="tenant")
    return known[0] if known else ""
