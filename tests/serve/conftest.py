from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from kvboost import KVBoost
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve.app import make_app
from kvboost.serve.generation.service import Service
from kvboost.serve.run import http_config
from kvboost.serve.security.auth import Keys
from kvboost.serve.security.limits import Limits
from tests.helpers.models import tiny_model
from tests.helpers.runner import Recording
from tests.helpers.tokenizer import byte_tokenizer

SECRET = b"s" * 32
KEY, OTHER_KEY, ADMIN_KEY = "key-of-the-first", "key-of-the-second", "key-of-the-admin"


@dataclass
class Running:
    """A real server on a loopback port."""

    url: str
    port: int
    engine: KVBoost
    runner: Any
    service: Service
    app: Any

    def openai(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=60)

    def http(self, key: str | None = KEY) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., Running]]:
    """Starts servers; they end with the session."""
    stops: list[Callable[[], None]] = []

    def start(
        engine: KVBoost,
        *,
        runner: Any = None,
        keys: Keys | None = None,
        limits: Limits | None = None,
        model_name: str = "tiny",
        send_buffer: int | None = None,
        tls: Any = None,
        **app_options: Any,
    ) -> Running:
        runner = runner or Recording(BatchRunner(engine))
        limits = limits or Limits(max_new_tokens=64)
        app = make_app(engine, runner, model_name=model_name, keys=keys, limits=limits, **app_options)
        config = http_config(app, limits=limits, drain_seconds=1, tls=tls)
        config.port = 0
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        listening = server.servers[0].sockets[0]
        port = listening.getsockname()[1]
        if send_buffer is not None:  # connections inherit it; a kernel's own takes megabytes that nobody reads
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)

        def stop() -> None:
            server.should_exit = True
            thread.join()
            app.state.service.close()
            runner.close()

        stops.append(stop)
        return Running(f"http://127.0.0.1:{port}", port, engine, runner, app.state.service, app)

    yield start
    for stop in stops:
        stop()


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., KVBoost]:
    def make(**settings: Any) -> KVBoost:
        model = tiny_model("llama", vocab_size=260, max_position_embeddings=2048)
        return KVBoost(model, byte_tokenizer(), **{"chunk_size": 32, "quality": "exact", **settings})

    return make


@pytest.fixture(scope="session")
def keyed(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    """A server with two users and an admin."""
    return start_server(make_engine(), keys=Keys([KEY, OTHER_KEY], admin_key=ADMIN_KEY, secret=SECRET))


@pytest.fixture
def client(keyed: Running) -> Iterator[openai.OpenAI]:
    with keyed.openai() as made:
        yield made


@pytest.fixture(autouse=True)
def _no_secret_of_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
