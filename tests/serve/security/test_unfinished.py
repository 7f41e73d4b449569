"""Bodies that are promised and handshakes that are begun, and never finished."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kvboost import KVBoost
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve import Keys, Limits
from kvboost.serve.app import make_app
from kvboost.serve.run import _Server, http_config
from tests.helpers.certificates import self_signed
from tests.serve.conftest import KEY, SECRET, Running

_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the first bytes of a TLS handshake


def _promise(method: str, path: str, key: str | None = KEY) -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}Content-Length: 100\r\n\r\n".encode()


def _all_of(connection: socket.socket) -> bytes:
    """What comes until it is closed."""
    connection.settimeout(5)
    got = b""
    while more := connection.recv(1000):
        got += more
    return got


@pytest.mark.parametrize(("key", "status"), [(KEY, b"200"), (None, b"401")], ids=["key", "no key"])
def test_a_get_is_answered_without_the_body_it_promises(keyed: Running, key: str | None, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", keyed.port)) as connection:
        connection.settimeout(5)
        connection.sendall(_promise("GET", "/v1/models", key))
        assert connection.recv(1000).split()[1] == status


@pytest.mark.parametrize("apart", [0.0, 0.3], ids=["at once", "later"])
def test_a_get_whose_body_comes_keeps_its_connection(keyed: Running, apart: float) -> None:
    """Closed before its body is read, a connection is reset, and takes the answer along."""
    with socket.create_connection(("127.0.0.1", keyed.port)) as connection:
        connection.settimeout(5)
        for _ in range(2):
            connection.sendall(_promise("GET", "/v1/models") + (b"" if apart else b" " * 100))
            time.sleep(apart)
            connection.sendall(b" " * 100 if apart else b"")
            got = b""
            while not got.endswith(b"}]}"):
                got += (more := connection.recv(1000))
                assert more, "it was closed"


def test_a_get_whose_body_never_comes_is_closed_in_time(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    running = start_server(make_engine(), limits=Limits(header_seconds=1))
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(_promise("GET", "/health"))
        assert b'"ok"}' in _all_of(connection)


def test_promised_bodies_keep_nobody_out(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    running = start_server(make_engine(), limits=Limits(max_connections=4))
    with ExitStack() as opened:
        for _ in range(4):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            connection.sendall(_promise("POST", "/tokenize"))
        time.sleep(0.3)
        assert httpx.get(running.url + "/health").status_code == 200


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return self_signed(tmp_path)


def _trusted(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[0]))


def _is_closed(connection: socket.socket, *, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_handshakes_are_connections_with_a_time_limit(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost], certificate: tuple[Path, Path]
) -> None:
    limits = Limits(max_connections=3, header_seconds=4)
    running = start_server(make_engine(), limits=limits, tls=certificate)
    with ExitStack() as opened:
        begun = [opened.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(4)]
        for connection in begun[1:3]:
            connection.sendall(_HELLO)
        assert _is_closed(begun[0], seconds=3), "one too many: the longest idle goes"
        answer = httpx.get(f"https://localhost:{running.port}/health", verify=_trusted(certificate))
        assert answer.json() == {"status": "ok"}
        assert _is_closed(begun[1], seconds=3)
        assert not _is_closed(begun[3], seconds=0.1)
        assert _is_closed(begun[3], seconds=20), "asyncio's own limit is a minute"


def test_clients_that_do_not_end_tls_keep_nobody_out(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost], certificate: tuple[Path, Path]
) -> None:
    running = start_server(make_engine(), limits=Limits(max_connections=2), tls=certificate)
    trusted = _trusted(certificate)
    with ExitStack() as opened:
        for _ in range(2):
            plain = socket.create_connection(("127.0.0.1", running.port))
            connection = opened.enter_context(trusted.wrap_socket(plain, server_hostname="localhost"))
            connection.sendall(_HEALTH)
            assert b'"ok"}' in _all_of(connection)  # the server has closed it, and waits for the client to do so
        assert httpx.get(f"https://localhost:{running.port}/health", verify=trusted).status_code == 200


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_it_stops_at_once_while_clients_are_silent(
    make_engine: Callable[..., KVBoost], certificate: tuple[Path, Path], tls: bool
) -> None:
    limits, keys = Limits(), Keys([KEY], secret=SECRET)
    sent = [b"", b"GET /health HTTP/1.1\r\nHost: loc", _HEALTH.replace(b"close", b"keep-alive")]
    for path, method in (("/v1/models", "GET"), ("/tokenize", "POST")):
        sent += [_promise(method, path), _promise(method, path, key=None)]
    with make_engine() as engine, BatchRunner(engine) as runner, ExitStack() as opened:
        app = make_app(engine, runner, model_name="tiny", keys=keys, limits=limits)
        config = http_config(app, limits=limits, drain_seconds=30, tls=certificate if tls else None)
        server = _Server(config, app.state.service, drain_seconds=30)
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            with ExitStack() as clients:

                def connect() -> socket.socket:
                    return clients.enter_context(socket.create_connection(listening.getsockname()))

                for words in sent * 8:
                    connection = connect()
                    if tls:
                        connection = _trusted(certificate).wrap_socket(connection, server_hostname="localhost")
                        clients.enter_context(connection)
                    connection.sendall(words)
                if tls:
                    connect()
                    connect().sendall(_HELLO)
                time.sleep(0.5)
                server.handle_exit(signal.SIGTERM, None)
                thread.join(5)
                assert not thread.is_alive(), "it waits for clients that say nothing"
        finally:
            server.handle_exit(signal.SIGINT, None)
            thread.join()
            app.state.service.close()
