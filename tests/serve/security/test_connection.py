from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvboost import KVBoost
from kvboost.errors import BusyError, CapacityError
from kvboost.serve.security.limits import Limits
from tests.helpers.runner import OneByOne
from tests.serve.conftest import Running

_ASKED: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 60, "temperature": 0}


@pytest.fixture(scope="module")
def slow(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    """Small limits, and a model that takes its time."""
    engine = make_engine()
    limits = Limits(
        max_new_tokens=64,
        max_body_bytes=10_000,
        body_seconds=0.5,
        header_seconds=0.5,
        max_header_bytes=2000,
        max_streams=2,
    )
    return start_server(engine, runner=OneByOne(engine, pause=0.05), limits=limits)


@pytest.fixture
def http(slow: Running) -> Iterator[httpx.Client]:
    with slow.http(None) as made:
        yield made


def _until(condition: Callable[[], bool], *, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def _posted(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _idle(running: Running) -> bool:
    return running.runner.alive == 0 and running.service.streams.held == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_job(slow: Running, stream: bool) -> None:
    body = json.dumps({**_ASKED, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.sendall(_posted(body))
        assert _until(lambda: slow.runner.alive == 1)
        if stream:
            connection.settimeout(20)
            while b"data: {" not in connection.recv(65536):
                pass
    assert _until(lambda: _idle(slow))
    listed = slow.service.metrics.recent()
    if stream:
        assert listed[-1]["prompt"] == len("hello")
    # One that is left while its job is submitted is not listed; one that was answered to its end would be.
    assert [answer["finish"] for answer in listed[-1:]] in ([], ["cancelled"])


@pytest.fixture(scope="module")
def unread(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    """Cuts those off who do not read."""
    engine = make_engine()
    limits = Limits(max_new_tokens=1500, write_seconds=0.5)
    return start_server(engine, runner=OneByOne(engine, pause=0.002), limits=limits, send_buffer=4096)


def _connected(running: Running) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", running.port))
    return connection


def test_a_client_that_does_not_read_is_cut_off(unread: Running) -> None:
    body = {**_ASKED, "stream": True, "max_tokens": 1500, "logit_bias": {"256": -100, "257": -100, "258": -100}}
    with _connected(unread) as connection:
        connection.sendall(_posted(json.dumps(body).encode()))
        assert _until(lambda: unread.runner.alive == 1)
        assert _until(lambda: _idle(unread), seconds=20)
    last = unread.service.metrics.recent()[-1]
    assert last["finish"] == "cancelled"
    assert last["new"] < 1500


def test_a_client_that_reads_slowly_gets_everything(unread: Running) -> None:
    body = {**_ASKED, "stream": True, "max_tokens": 100}
    got = b""
    with _connected(unread) as connection:
        connection.sendall(_posted(json.dumps(body).encode()))
        connection.settimeout(10)
        while b"[DONE]" not in got:
            read = connection.recv(2048)
            assert read, "it was cut off"
            got += read
            time.sleep(0.02)
    assert _until(lambda: _idle(unread))
    assert unread.service.metrics.recent()[-1]["finish"] != "cancelled"


def test_a_client_that_goes_away_while_it_waits_for_its_turn(slow: Running) -> None:
    body = json.dumps({**_ASKED, "stream": True, "max_tokens": 20}).encode()
    with socket.create_connection(("127.0.0.1", slow.port)) as first:
        first.sendall(_posted(body))
        assert _until(lambda: slow.runner.alive == 1)
        with socket.create_connection(("127.0.0.1", slow.port)) as second:
            second.sendall(_posted(body))
            assert _until(lambda: slow.runner.alive == 2)
        assert _until(lambda: slow.service.streams.held == 1)
    assert _until(lambda: _idle(slow))


def test_too_many_streams_are_a_429(slow: Running, http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json={**_ASKED, "stream": True}) as one:
        assert one.status_code == 200
        with http.stream("POST", "/v1/completions", json={**_ASKED, "stream": True}) as two:
            assert two.status_code == 200
            answer = http.post("/v1/completions", json=_ASKED)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert http.get("/health").status_code == 200
    assert _until(lambda: _idle(slow))


@pytest.mark.parametrize(("error", "status"), [(BusyError("try later"), 429), (CapacityError("too large"), 413)])
def test_what_the_runner_refuses(
    slow: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    submit = slow.runner.submit
    calls = iter([submit, None])

    def refuse(job: Any) -> Any:
        call = next(calls)
        if call is None:
            raise error
        return call(job)

    monkeypatch.setattr(slow.runner, "submit", refuse)
    answer = http.post("/v1/completions", json={**_ASKED, "n": 2, "stream": True})
    assert answer.status_code == status
    told = answer.json()["error"]["message"]
    assert told == str(error) if status == 429 else "shorten prompt or lower max_tokens" in told
    assert _until(lambda: _idle(slow)), "the choice that was taken is cancelled"


def test_large_and_slow_bodies_are_refused(slow: Running, http: httpx.Client) -> None:
    large = {"model": "tiny", "prompt": "x" * 20_000}
    assert http.post("/v1/completions", json=large).status_code == 413

    def unannounced() -> Iterator[bytes]:
        yield b'{"model": "tiny", "prompt": "'
        for _ in range(20):
            yield b"x" * 1000

    answer = http.post("/v1/completions", content=unannounced(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.settimeout(5)
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in connection.recv(1000)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET"]
)
def test_silent_connections_are_closed(slow: Running, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.settimeout(20)  # the server's limit is half a second
        connection.sendall(sent)
        while connection.recv(1000):
            pass


def test_long_headers_are_refused(http: httpx.Client) -> None:
    assert http.get("/health", headers={"X": "x" * 5000}).status_code == 431


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.fixture(scope="module")
def few(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    """Takes four connections, and lets them be silent."""
    engine = make_engine()
    limits = Limits(max_new_tokens=64, max_connections=4, header_seconds=60)
    return start_server(engine, runner=OneByOne(engine, pause=0.05), limits=limits)


def _read_health(connection: socket.socket) -> None:
    connection.settimeout(20)
    got = b""
    while b'"ok"}' not in got:
        got += (more := connection.recv(1000))
        assert more, "it was closed"


def test_silent_connections_keep_nobody_out(few: Running) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = json.dumps({**_ASKED, "stream": True}).encode()
    with ExitStack() as opened:

        def connect(sent: bytes = b"") -> socket.socket:
            made = opened.enter_context(socket.create_connection(("127.0.0.1", few.port)))
            made.sendall(sent)
            return made

        answered = connect(_posted(body))
        assert _until(lambda: few.runner.alive == 1)
        kept_alive = connect(asked)
        _read_health(kept_alive)
        silent, half = connect(), connect(b"GET /health HTTP/1.1\r\nHost: loc")
        time.sleep(0.2)
        kept_alive.sendall(asked)
        _read_health(kept_alive)  # now it is the one that was idle least
        assert httpx.get(few.url + "/health").status_code == 200, "a second peer gets in"
        assert _is_closed(silent)
        assert not _is_closed(half)
        newer = [connect() for _ in range(2)]
        assert _is_closed(half)
        assert not any(map(_is_closed, [kept_alive, *newer]))
        answered.settimeout(20)
        while b"[DONE]" not in answered.recv(65536):
            pass
    assert _until(lambda: _idle(few))


def test_a_connection_too_many_is_closed_if_all_others_are_answered(few: Running) -> None:
    body = json.dumps({**_ASKED, "stream": True}).encode()
    with ExitStack() as opened:
        for number in range(4):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", few.port)))
            connection.sendall(_posted(body))
            assert _until(lambda wanted=number + 1: few.runner.alive == wanted)  # type: ignore[misc]
        assert _is_closed(opened.enter_context(socket.create_connection(("127.0.0.1", few.port))))
        assert few.runner.alive == 4
    assert _until(lambda: _idle(few))


def test_bytes_that_are_no_http_never_bring_it_down(slow: Running) -> None:
    rng = random.Random(5)
    good = _posted(b'{"model": "tiny", "prompt": "hello", "max_tokens": 1}')
    statuses: list[bytes] = []
    slowest = 0.0
    for number in range(120):
        sent = bytearray(good)
        for _ in range(rng.randint(1, 12)):
            kind, at = rng.randrange(4), rng.randrange(len(sent))
            if kind == 0:
                sent[at] = rng.randrange(256)
            elif kind == 1:
                del sent[at : at + rng.randint(1, 20)]
            elif kind == 2:
                sent[at:at] = rng.randbytes(rng.randint(1, 20))
            else:
                sent[at:at] = sent[at : at + 30]
        with socket.create_connection(("127.0.0.1", slow.port)) as connection:
            connection.settimeout(0.05)
            connection.sendall(bytes(sent))
            try:
                statuses.append(connection.recv(200)[9:12])
            except (TimeoutError, ConnectionResetError):
                statuses.append(b"")
        if number % 10 == 0:
            began = time.monotonic()
            assert httpx.get(slow.url + "/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
    assert not [status for status in statuses if status.startswith(b"5")]
    assert b"400" in statuses
    assert slowest < 5.0, "the benchmark http_fuzz holds it to 100 ms on a quiet machine"
    assert _until(lambda: _idle(slow), seconds=10)


def test_prompts_are_not_logged(slow: Running, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        http.post("/v1/completions", json={**_ASKED, "prompt": "my secret words", "max_tokens": 2})
        http.post("/v1/completions", json={**_ASKED, "prompt": "my secret words", "n": "my secret words"})
    assert "completions" in caplog.text
    assert "secret" not in caplog.text


_SERVER = """
import sys
from kvboost import KVBoost
from kvboost.serve import ServerConfig, serve
from tests.helpers.models import tiny_model
from tests.helpers.runner import OneByOne
from tests.helpers.tokenizer import byte_tokenizer

engine = KVBoost(tiny_model("llama", vocab_size=260), byte_tokenizer(), chunk_size=32)
runner = OneByOne(engine, pause=0.05)
serve(engine, runner, ServerConfig(served_model_name="tiny", port=0, drain_seconds=float(sys.argv[1])),
      ready=lambda host, port: print(port, flush=True))
runner.close()
print("done", flush=True)
"""


@pytest.mark.parametrize("drain", [20, 1])
def test_sigterm_lets_running_answers_finish_and_exits_with_0(drain: int) -> None:
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(drain)], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        assert _until(lambda: _status(url) == 200, seconds=20)
        got: list[str] = []

        def ask() -> None:
            body = {**_ASKED, "max_tokens": 40 if drain == 20 else 400, "stream": True}
            with (
                suppress(httpx.TransportError),  # the end that an answer has which took too long
                httpx.stream("POST", url + "/v1/completions", json=body, timeout=30) as answer,
            ):
                for line in answer.iter_lines():
                    got.append(line)

        asking = threading.Thread(target=ask)
        asking.start()
        assert _until(lambda: len(got) > 4, seconds=20)
        process.send_signal(signal.SIGTERM)
        assert _until(lambda: _status(url) == 503), "it says that nothing new is taken, as long as an answer runs"
        assert httpx.post(url + "/v1/completions", json=_ASKED).status_code == 503
        asking.join(30)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert "done" in out
        if drain == 20:
            assert "data: [DONE]" in got
        else:
            assert "data: [DONE]" not in got
    finally:
        process.kill()
        process.communicate()


def _status(url: str) -> int | None:
    try:
        return httpx.get(url + "/ready", timeout=5).status_code
    except httpx.TransportError:
        return None


def test_what_clients_held_comes_back_when_they_go_at_any_moment(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    running = start_server(make_engine())
    prompt = "several clients ask for this at once, and some of them do not wait for it. " * 4
    body = {**_ASKED, "prompt": prompt, "max_tokens": 24}
    alone = httpx.post(running.url + "/v1/completions", json=body).json()["choices"][0]["text"]
    got: list[str] = []

    def impatient(number: int) -> None:
        rng = random.Random(number)
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", running.port)) as connection:
                sent = _posted(json.dumps({**body, "stream": rng.random() < 0.5}).encode())
                connection.sendall(sent[: rng.choice([len(sent), len(sent), len(sent) // 2])])
                time.sleep(rng.random() * 0.1)

    def patient() -> None:
        got.append(httpx.post(running.url + "/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])

    threads = [threading.Thread(target=impatient, args=(number,)) for number in range(8)]
    threads += [threading.Thread(target=patient) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [alone] * 3

    def nothing_left() -> bool:
        load = running.runner.load()
        held = running.engine._store.stats().leased + load.running + load.waiting + load.cached_bytes
        return held == 0 and running.service.streams.held == 0

    assert _until(nothing_left, seconds=10), "1 s on a quiet machine: the benchmark http_disconnects"
    assert len(running.runner.jobs) > 4  # of some of those that went, too; others went before they were one
