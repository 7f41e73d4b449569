"""Bodies of all requests together are bounded, and what cannot fit is not tokenised."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from kvboost.serve import Limits
from kvboost.serve.security.auth import Caller
from kvboost.serve.security.bodies import BodyLimit
from kvboost.serve.security.fair_pool import FairPool
from tests.serve.asgi import ask
from tests.serve.conftest import KEY, Running


def _post(tenant: str) -> dict[str, Any]:
    """The ASGI scope of a request of this tenant."""
    caller = Caller(tenant, admin=False)
    return {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "state": {"caller": caller}}


def test_a_key_that_fills_the_memory_is_refused_and_another_is_not() -> None:
    async def scenario() -> None:
        go, inside = asyncio.Event(), 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal inside
            inside += 1
            await go.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        pool = FairPool(max_waiting=8, name="test")
        limited = BodyLimit(app, limits=Limits(max_total_body_bytes=100), pool=pool, under_way=Counter())

        async def request(tenant: str, size: int) -> int:
            statuses: list[int] = []

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"x" * size, "more_body": False}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            await limited(_post(tenant), receive, send)
            return statuses[0]

        first = asyncio.create_task(request("a", 80))
        await asyncio.sleep(0.01)
        assert await request("a", 80) == 429
        other = asyncio.create_task(request("b", 40))
        await asyncio.sleep(0.01)
        assert inside == 2, "another key has its share"
        go.set()
        assert await asyncio.gather(first, other) == [200, 200]
        assert await request("a", 80) == 200, "everything was given back"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 70_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 7_000}] * 10}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 70_000}]}]}),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    keyed: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(keyed.service.chats, "encode", fail)
    monkeypatch.setattr(keyed.engine.parts.encoder, "encode", fail)
    answer = ask(keyed.app, "POST", path, key=KEY, json={"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_what_the_template_writes_is_counted_before_it_is_tokenised(
    keyed: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(keyed.service.chats, "_tokenize", fail)
    template = "{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    monkeypatch.setattr(keyed.service.tokenizer, "chat_template", template)
    function = {"name": "f", "arguments": '{"a": "' + "x" * 70_000 + '"}'}
    call = {"id": "c", "type": "function", "function": function}
    body = {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    answer = ask(keyed.app, "POST", "/v1/chat/completions", key=KEY, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_one_keys_many_bodies_do_not_come_before_anothers_one() -> None:
    async def scenario() -> list[str]:
        ended: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            ended.append(scope["state"]["caller"].tenant)

        limited = BodyLimit(app, limits=Limits(), pool=FairPool(max_waiting=8, name="test"), under_way=Counter())

        async def request(tenant: str) -> None:
            pieces = iter(range(9, -1, -1))

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"x" * 1000, "more_body": next(pieces) > 0}

            await limited(_post(tenant), receive, receive)

        await asyncio.gather(*(request(tenant) for tenant in "aaaaab"))
        return ended

    assert asyncio.run(scenario()) == ["b", "a", "a", "a", "a", "a"]


def _received(limits: Limits, pieces: int, *, bodies: int, stuck: int = 0) -> tuple[int, float]:
    """How many of one tenant's bodies were whole, and the seconds they took beside others that stop after a piece."""

    async def scenario() -> tuple[int, float]:
        whole = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal whole
            whole += 1

        async def send(message: Any) -> None:
            pass

        limited = BodyLimit(app, limits=limits, pool=FairPool(max_waiting=8, name="test"), under_way=Counter())

        async def request(count: int, *, ends: bool = True) -> None:
            left = iter(range(count - 1, -1, -1))

            async def receive() -> dict[str, Any]:
                if (number := next(left)) == 0 and not ends:
                    await asyncio.sleep(60)
                return {"type": "http.request", "body": b"x", "more_body": number > 0}

            await limited(_post("a"), receive, send)

        waiting = [asyncio.create_task(request(2, ends=False)) for _ in range(stuck)]
        await asyncio.sleep(0.1 if stuck else 0)
        began = time.monotonic()
        await asyncio.gather(*(request(pieces) for _ in range(bodies)))
        took = time.monotonic() - began
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return whole, took

    return asyncio.run(scenario())


def test_a_body_is_not_late_because_the_server_waited() -> None:
    assert _received(Limits(body_seconds=0.3), 20, bodies=20)[0] == 20


def test_a_body_does_not_wait_for_others_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.serve.security.bodies._COMES_S", 0.05)
    assert _received(Limits(), 20, bodies=1, stuck=25)[1] < 0.5
