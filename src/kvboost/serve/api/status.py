"""GET /, /health, /ready, /metrics and /v1/models: what this server is, and how it is.

Called by browsers, orchestrators, scrapers and clients. Invariant: none of them waits for a tier or for the model.
"""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvboost.serve.api.common import AppService
from kvboost.serve.generation.service import Service

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
    tiers = {"tiers": describe_tiers(service)} if caller is not None and caller.admin else {}
    if (failure := service.runner.load().failure) is not None:
        return JSONResponse({"status": "failed", "reason": failure, **tiers}, 503)
    if service.draining:
        return JSONResponse({"status": "draining", **tiers}, 503)
    return JSONResponse({"status": "ready", **tiers})


def describe_tiers(service: Service) -> dict[str, dict[str, Any]]:
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
        for name, tier in service.kept.tiers().items()
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
