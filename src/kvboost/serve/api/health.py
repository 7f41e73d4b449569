"""GET /health, /ready and /metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvboost.serve.api.dependencies import AppService
from kvboost.serve.generation.service import Service


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
