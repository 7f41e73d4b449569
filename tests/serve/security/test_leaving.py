from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvboost.serve.security.leaving import ClientGoneError, disconnected, while_connected


def messages(*kinds: str) -> Callable[[], Awaitable[dict[str, Any]]]:
    """A connection that sends these and is silent then."""
    left = list(kinds)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.sleep(60)
        return {"type": left.pop(0)}

    return receive


def test_only_a_disconnect_is_the_end() -> None:
    async def wait() -> None:
        receive = messages("http.request", "http.request", "http.disconnect", "left")
        await asyncio.wait_for(disconnected(receive), 10)
        assert (await receive())["type"] == "left"

    asyncio.run(wait())


def test_work_is_cancelled_when_the_client_goes_and_not_before() -> None:
    ended: list[str] = []

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return "done"

    async def run() -> None:
        assert await while_connected(messages("http.request"), work(0.01)) == "done"
        assert ended == []
        with pytest.raises(ClientGoneError):
            await while_connected(messages("http.request", "http.disconnect"), work(60))
        assert ended == ["cancelled"], "before it returned"

    asyncio.run(run())


def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(while_connected(messages(), work()))
