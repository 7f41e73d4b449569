"""Tokenising belongs to the request: it ends with its client, and waits among those of its own tenant."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.serve import Keys
from tests.serve.conftest import KEY, OTHER_KEY, SECRET, Running

_CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
_ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 2, "stream": True},
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 2},
    "/v1/messages": _CHAT,
    "/v1/messages/count_tokens": {"model": "tiny", "messages": _CHAT["messages"]},
    "/tokenize": {"model": "tiny", "prompt": "hello"},
}


@pytest.fixture(scope="module")
def running(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    return start_server(make_engine(), keys=Keys([KEY, OTHER_KEY], secret=SECRET))


@pytest.fixture
def held(running: Running) -> Iterator[Running]:
    """A server whose tokenizer is in use for as long as the test lasts."""
    pool, meet = running.service.tokenizing, threading.Barrier(2)

    async def both_idle() -> None:  # not at the end of what another test has left them
        await asyncio.gather(*(pool.run("", meet.wait, 10) for _ in range(2)))

    asyncio.run(both_idle())
    with running.service.chats.lock:
        yield running


def _until(condition: Callable[[], bool], *, seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def _sent(running: Running, path: str) -> socket.socket:
    body = json.dumps(_ASKED[path]).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", running.port))
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def _left(running: Running) -> int:
    """Requests whose clients had gone before they were answered."""
    found = re.search(rb'kvboost_http_responses_total\{status="499"\} (\d+)', running.service.metrics.text())
    return int(found[1]) if found else 0


@pytest.mark.parametrize("path", _ASKED)
def test_a_client_that_goes_away_ends_the_wait_of_its_prompt(held: Running, path: str) -> None:
    before, jobs = _left(held), len(held.runner.jobs)
    with ExitStack() as stack:
        for _ in range(3):  # two are being tokenised, by as many threads; the third waits
            stack.enter_context(_sent(held, path))
        assert _until(lambda: held.service.tokenizing.waiting == 1)
    assert _until(lambda: _left(held) == before + 3), "the requests ended although the tokenizer is still in use"
    assert held.service.tokenizing.waiting == 0, "nobody waits for the third prompt, so it has left the queue"
    assert len(held.runner.jobs) == jobs


def test_replies_are_remembered_by_the_threads_that_tokenise(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the tokenizer in the threads that all requests share, one tenant would stop all others."""
    threads: set[str] = set()
    service = running.service
    for memory in (service.chats, service.responses):
        kept = memory.remember

        def remember(*given: Any, kept: Callable[..., None] = kept, **more: Any) -> None:
            threads.add(threading.current_thread().name)
            kept(*given, **more)

        monkeypatch.setattr(memory, "remember", remember)
    with running.http() as http:
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            assert http.post(path, json=_ASKED[path]).status_code == 200
    assert threads == {"kvboost-tokenize"}
