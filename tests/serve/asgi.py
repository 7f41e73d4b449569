"""One request to an app, without a server around it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx


def ask(app: Any, method: str, path: str, *, key: str | None = None, **arguments: Any) -> httpx.Response:
    """The response of ``app``, which takes the client to be on this machine."""
    headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **arguments.pop("headers", {})}

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers, **arguments)

    return asyncio.run(send())
