from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from kvboost import ConfigError, KVBoost
from kvboost.errors import ClosedError
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve import Keys, ServerConfig, serve
from kvboost.serve.run import _bind, _Server
from tests.serve.conftest import SECRET


def test_threads_hand_over_the_interpreter_often_while_it_serves(
    make_engine: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def run(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()
        seen.append(sys.getswitchinterval())

    monkeypatch.setattr("kvboost.serve.run.asyncio.run", run)
    before = sys.getswitchinterval()
    with make_engine() as engine, BatchRunner(engine) as runner:
        serve(engine, runner, ServerConfig(served_model_name="tiny", port=0))
    assert seen == [pytest.approx(0.001)]
    assert sys.getswitchinterval() == before


def test_what_is_sent_in_parts_does_not_wait_for_acknowledgements() -> None:
    """Nagle's algorithm and a client's late ACK together are 40 ms for a head and a body, or for two tokens."""

    async def delays() -> bool:
        taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            taken.set_result(not option)
            writer.close()

        async with await asyncio.start_server(connected, sock=_bind("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.close()
            return await taken

    assert not asyncio.run(delays())


@pytest.mark.parametrize(("left", "given"), [(0.3, 1), (-0.1, 1), (7.2, 8)])
def test_what_is_done_can_be_sent_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, left: float, given: int
) -> None:
    """uvicorn takes whole seconds, and cuts off at once if there are none."""
    seen: list[int | None] = []

    async def shut_down(server: uvicorn.Server, sockets: Any = None) -> None:
        seen.append(server.config.timeout_graceful_shutdown)

    monkeypatch.setattr(uvicorn.Server, "shutdown", shut_down)
    service: Any = SimpleNamespace(draining=False)
    server = _Server(uvicorn.Config(lambda: None), service, drain_seconds=left)
    server.handle_exit(signal.SIGTERM, None)
    asyncio.run(server.shutdown())
    assert seen == [given]


def test_a_server_ends_with_its_runner(make_engine: Callable[..., KVBoost]) -> None:
    with make_engine() as engine, BatchRunner(engine) as runner:
        lost = threading.Timer(0.5, runner.close)
        with pytest.raises(ClosedError, match="the runner was closed; see the log, and start the server again"):
            serve(
                engine,
                runner,
                ServerConfig(served_model_name="tiny", port=0),
                keys=Keys(["key-of-somebody"], secret=SECRET),
                ready=lambda *address: lost.start(),
            )


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"served_model_name": None}, {}, r"ServerConfig\(served_model_name=\.\.\.\)"),
        ({"host": "0.0.0.0"}, {}, "API key"),
        ({"host": "192.0.2.1", "allow_open": True}, {}, "cannot listen on 192.0.2.1:8000"),
        ({"host": "192.0.2.1"}, {"keys": Keys(["key-of-somebody"])}, "cannot listen on 192.0.2.1:8000"),
    ],
)
def test_what_cannot_work_is_said(
    config: dict[str, Any], arguments: dict[str, Any], message: str, make_engine: Callable[..., KVBoost]
) -> None:
    runner: Any = None  # nothing gets so far as to run a job
    with make_engine() as engine, pytest.raises(ConfigError, match=message):
        serve(engine, runner, ServerConfig(**{"served_model_name": "tiny", **config}), **arguments)
