"""/v1/cache, for the admin: what is stored, warming, pinning and clearing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

from starlette.responses import JSONResponse, Response

from kvboost.errors import CapacityError, ConfigError, StoreError
from kvboost.hf.sampling import Sampling
from kvboost.serve.api.common import AppService
from kvboost.serve.api.status import describe_tiers
from kvboost.serve.api.tokens import encode_either
from kvboost.serve.errors import ApiError, bad_request
from kvboost.serve.generation.requests import Answer, GenerationRequest
from kvboost.serve.generation.service import Service
from kvboost.serve.schemas.chat import WarmRequest
from kvboost.serve.security.auth import Caller


async def show(service: AppService) -> Response:
    """What the cache holds, what runs, and the last requests."""
    stats = await asyncio.to_thread(service.kept.total)
    hottest = await asyncio.to_thread(service.engine.hottest_chunks)
    load = service.runner.load()
    return JSONResponse(
        {
            "object": "kvboost.cache",
            "model": service.model_name,
            "uptime_seconds": int(time.time()) - service.started,
            "cache": stats,
            "tiers": describe_tiers(service),
            "load": {"running": load.running, "waiting": load.waiting, "kv_bytes": load.cached_bytes},
            "streams": service.streams.held,
            "tenants": service.keys.tenants,
            "spaces": await asyncio.to_thread(service.spaces.listed),
            "pins": [asdict(pin) for pin in service.pins.listed()],
            "hottest": [
                {
                    "key": chunk.key.hex()[:12],
                    "uses": chunk.uses,
                    "start": chunk.start,
                    "tokens": chunk.tokens,
                    "bytes": chunk.nbytes,
                }
                for chunk in hottest
            ],
            "requests": service.metrics.recent(),
        }
    )


async def warm(service: AppService, body: WarmRequest) -> Response:
    """Prefill a prompt for one tenant."""
    answer = await _prefill(service, await _generation(service, body))
    return JSONResponse({"object": "kvboost.warm", "prompt_tokens": answer.prompt_tokens, **answer.reuse()})


async def pin(service: AppService, body: WarmRequest) -> Response:
    """Prefill a prompt and hold it against eviction."""
    generation = await _generation(service, body)
    await _prefill(service, generation)
    ((ids, boundaries),) = generation.prompts
    try:
        pin = await asyncio.to_thread(service.pins.add, ids, boundaries=boundaries, tenant=generation.caller.tenant)
    except CapacityError as error:
        raise ApiError(413, str(error), code="too_many_pins") from error
    except ConfigError as error:
        raise bad_request(str(error), param="prompt") from error
    return JSONResponse({"object": "kvboost.pin", **asdict(pin)})


async def unpin(service: AppService, pin: str) -> Response:
    """Let a pin go."""
    if not await asyncio.to_thread(service.pins.remove, pin):
        raise ApiError(404, "there is no such pin; GET /v1/cache lists them", code="unknown_pin")
    return JSONResponse({"object": "kvboost.pin", "id": pin, "deleted": True})


async def _generation(service: Service, body: WarmRequest) -> GenerationRequest:
    caller = Caller(_tenant(service, body), admin=False)
    prompt = await encode_either(service, body, caller)
    # A job of one token is prefilled like every other job, in the same batch and under the same budgets.
    return GenerationRequest("warm", [prompt], caller, 1, Sampling(), model=None)


async def _prefill(service: Service, generation: GenerationRequest) -> Answer:
    async with service.generating(generation, prefix="warm-") as answer:
        async for _ in answer.events():
            pass
    return answer


async def clear(service: AppService) -> Response:
    """Remove all stored KV, replies and responses of all tenants, also what an earlier process left on a disk."""
    await asyncio.to_thread(service.pins.clear)
    service.chats.replies.clear()
    service.responses.clear()
    try:
        await asyncio.to_thread(_purge, service)
    except StoreError as error:
        raise ApiError(503, "a tier did not answer and may hold more; try again", code="not_cleared") from error
    finally:
        service.kept.look_again()
    return JSONResponse({"object": "kvboost.clear", "cleared": True})


def _purge(service: Service) -> None:
    engine = service.engine
    try:
        engine.purge_all()  # a key that was revoked has no tenant here, but may have left chunks in a tier
    except ConfigError:  # the store was given to the engine: it has no tenants, so all of it is cleared
        engine.clear()


def _tenant(service: Service, body: WarmRequest) -> str:
    """Whose prompts will find the KV."""
    known = service.keys.tenants
    if body.tenant is not None:
        if body.tenant not in known:
            raise bad_request("there is no such tenant; GET /v1/cache lists them", param="tenant")
        return body.tenant
    if len(known) > 1:
        raise bad_request("say for which tenant; GET /v1/cache lists them", param="tenant")
    return known[0] if known else ""
