"""The parts of a front and of a replica that need no cluster."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvboost.integrations.ray.asgi import LocalApp, plain_scope
from kvboost.serve.security.limits import Limits

_SCOPE = {"type": "http", "method": "POST", "path": "/x", "headers": [], "query_string": b"", "app": object()}


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body, in three messages."""
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"], "more_body": True})
    await asyncio.sleep(0.01)
    await send({"type": "http.response.body", "body": b"end", "more_body": False})


def test_an_app_is_asked_in_its_own_loop() -> None:
    async def run() -> list[Any]:
        return [message async for some in LocalApp(_echo).exchange(plain_scope(_SCOPE), b"hello") for message in some]

    messages = asyncio.run(run())
    assert [message["type"] for message in messages] == ["http.response.start"] + ["http.response.body"] * 2
    assert b"".join(message.get("body", b"") for message in messages) == b"helloend"
    assert "app" not in plain_scope(_SCOPE), "no object of the server that received it"
    assert asyncio.run(LocalApp(_echo).ask("GET", "/health")) == 200


def test_an_app_that_fails_is_an_error() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("broken")

    async def run() -> None:
        async for _ in LocalApp(fails).exchange(plain_scope(_SCOPE), b""):
            pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run())


def test_whoever_stops_listening_is_a_client_that_has_gone() -> None:
    seen: list[str] = []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append((await receive())["type"])

    async def run() -> None:
        answer = LocalApp(endless).exchange(plain_scope(_SCOPE), b"")
        async for _ in answer:
            break
        await answer.aclose()
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert seen == ["http.disconnect"]


def test_metrics_of_replicas_are_told_apart(installed: None) -> None:
    from kvboost.integrations.ray.front import labelled

    counter = '# HELP a_total What.\n# TYPE a_total counter\na_total{tier="x\\"} y"} 1.0\n'
    text = counter + "# HELP b It.\n# TYPE b gauge\nb 2.0\n"
    families = {family.name: family for family in text_string_to_metric_families(labelled({"r1": text, "r2": text}))}
    assert [sample.labels for sample in families["a"].samples] == [
        {"tier": 'x"} y', "replica": "r1"},
        {"tier": 'x"} y', "replica": "r2"},
    ]
    assert [sample.value for sample in families["b"].samples] == [2.0, 2.0]
    assert {name: family.type for name, family in families.items()} == {"a": "counter", "b": "gauge"}


@pytest.mark.parametrize(("path", "status"), [("/v1/cache/clear", 503), ("/metrics", 200)])
def test_what_every_replica_must_do_fails_if_one_did_not_answer(installed: None, path: str, status: int) -> None:
    from kvboost.integrations.ray.front import FleetApp

    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
    answers = [("r1", [start, {"type": "http.response.body", "body": b"a 1.0\n"}]), RuntimeError("it died")]

    class Handle:
        def options(self, **given: Any) -> Any:
            return self

        def broadcast(self, *call: Any) -> Any:
            async def results_async(*, return_exceptions: bool) -> Any:
                return answers

            return SimpleNamespace(results_async=results_async)

    app = FleetApp(Handle(), limits=Limits())
    answer = asyncio.run(app._from_all({"path": path}, b""))
    assert answer.status_code == status


def test_a_front_imports_no_torch(installed: None) -> None:
    code = (
        "import sys, kvboost.integrations.ray.front, kvboost.integrations.ray.router\nsys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
