"""GET /, /health, /ready, /metrics and /v1/models: what this server is, and how it is. /v1/cache: what it holds.

Called by browsers, orchestrators, scrapers and clients; the last one by the admin, who may warm, pin and clear.
Invariant: none of those that only look waits for a tier or for the model.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvboost.errors import CapacityError, ConfigError, StoreError
from kvboost.hf.sampling import Sampling
from kvboost.serve.api.common import AppService
from kvboost.serve.api.tokens import encode_either
from kvboost.serve.errors import ApiError, bad_request
from kvboost.serve.generation.requests import Answer, GenerationRequest
from kvboost.serve.generation.service import Service
from kvboost.serve.observability.metrics import total_stats
from kvboost.serve.schemas.chat import WarmRequest
from kvboost.serve.security.auth import Caller

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _page() -> bytes:
    return files("kvboost.serve").joinpath("ui/page.html").read_bytes()


async def page() -> Response:
    """The page; nothing in it comes from anywhere else."""
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(_page(), media_type="text/html; charset=utf-8", headers=headers)


async def health(service: AppService) -> Response:
    """Whether the process can still answer. If not, only another one can: this one is about to end."""
    if (failure := service.runner.load().failure) is not None:
        return JSONResponse({"status": "failed", "reason": failure}, 503)
    return JSONResponse({"status": "ok"})


async def ready(service: AppService, request: Request) -> Response:
    """Whether new requests are taken; for the admin also the state of every tier. A tier that fails is no reason."""
    caller = request.scope["state"]["caller"]
    tiers = {"tiers": _tiers(service)} if caller is not None and caller.admin else {}
    if (failure := service.runner.load().failure) is not None:
        return JSONResponse({"status": "failed", "reason": failure, **tiers}, 503)
    if service.draining:
        return JSONResponse({"status": "draining", **tiers}, 503)
    return JSONResponse({"status": "ready", **tiers})


def _tiers(service: Service) -> dict[str, dict[str, Any]]:
    """The state of each tier below the memory. Asks none of them."""
    return {
        name: {
            "available": tier.available,
            "errors": tier.work.errors,
            "writes_dropped": tier.work.writes_dropped,
            "loads_declined": tier.work.loads_declined,
            "loads": tier.work.loads,
            "load_ms": round(tier.load_ms, 3),
            "hit_rate": round(tier.hit_rate, 4),
        }
        for name, tier in service.engine.tier_states().items()
    }


async def metrics(service: AppService) -> Response:
    """The metrics in Prometheus' text format."""
    text = await asyncio.to_thread(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(service: AppService) -> Response:
    """All of them, the model itself first."""
    cards = [_card(service, name) for name in (service.model_name, *service.adapters)]
    return JSONResponse({"object": "list", "data": cards})


async def model(service: AppService, model: str) -> Response:
    """One of them, by name."""
    service.check_model(model)
    return JSONResponse(_card(service, model))


def _card(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "kvboost",
        "max_model_len": service.max_positions,
        "parent": None if name == service.model_name else service.model_name,
    }


async def show_cache(service: AppService) -> Response:
    """What the cache holds, what runs, and the last requests."""
    stats = await asyncio.to_thread(total_stats, service.engine, ask_tiers=False)
    hottest = await asyncio.to_thread(service.engine.hottest_chunks)
    load = service.runner.load()
    return JSONResponse(
        {
            "object": "kvboost.cache",
            "model": service.model_name,
            "uptime_seconds": int(time.time()) - service.started,
            "cache": stats,
            "tiers": _tiers(service),
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
        tenant = generation.caller.tenant
        session = (service.engine.for_tenant(tenant) if tenant else service.engine).session
        pin = await asyncio.to_thread(service.pins.add, session, ids, boundaries=boundaries)
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
