"""What FastAPI hands to every endpoint beside the request's body."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from kvboost.serve.generation.service import Service


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


AppService = Annotated[Service, Depends(_service)]
