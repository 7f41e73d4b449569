"""GET /v1/models: the one model that is served."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from kvboost.serve.api.dependencies import AppService
from kvboost.serve.generation.service import Service


async def models(service: AppService) -> Response:
    """A list of one."""
    return JSONResponse({"object": "list", "data": [_card(service)]})


async def model(service: AppService, model: str) -> Response:
    """That model, by name."""
    service.check_model(model)
    return JSONResponse(_card(service))


def _card(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "kvboost",
        "max_model_len": service.max_positions,
    }
