"""GET /health, /ready and /metrics."""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse, Response

from kvboost.serve.api.dependencies import AppService


async def health() -> Response:
    """The process is alive."""
    return JSONResponse({"status": "ok"})


async def ready(service: AppService) -> Response:
    """Whether new requests are taken."""
    if service.draining:
        return JSONResponse({"status": "draining"}, 503)
    if not service.runner.load().alive:
        return JSONResponse({"status": "failed"}, 503)
    return JSONResponse({"status": "ready"})


async def metrics(service: AppService) -> Response:
    """The metrics in Prometheus' text format."""
    text = await asyncio.to_thread(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
