"""GET /v1/models: the model that is served, and its adapters."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from kvboost.serve.api.dependencies import AppService
from kvboost.serve.generation.service import Service


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
