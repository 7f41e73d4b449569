"""Tokenising belongs to the request: it ends with its client, and waits among those of its own tenant."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.serve import Keys
from kvboost.serve.generation.prompts import ChatPrompts
from kvboost.serve.generation.turns import Turn
from tests.helpers.tokenizer import byte_tokenizer
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
def hold(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Prompts of so many tokens are not tokenised until the test is over."""
    go, service = threading.Event(), running.service
    encode = service.encode

    def hold(*, at_least: int) -> None:
        def wait(prompt: str | list[int], **more: Any) -> list[int]:
            assert len(prompt) < at_least or go.wait(30)
            return encode(prompt, **more)

        monkeypatch.setattr(service, "encode", wait)

    yield hold
    go.set()
    asyncio.run(service.tokenizing.run("", lambda: None))  # its thread has nothing left of this test


def _waiting(running: Running) -> int:
    """Prompts that are not being tokenised yet."""
    return running.service.tokenizing._short.waiting + running.service.reading.waiting


def _until(condition: Callable[[], bool], *, seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def _sent(running: Running, path: str, body: dict[str, Any] | None = None) -> socket.socket:
    content = json.dumps(body or _ASKED[path]).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", running.port))
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def _left(running: Running) -> int:
    """Requests whose clients had gone before they were answered."""
    found = re.search(rb'kvboost_http_responses_total\{status="499"\} (\d+)', running.service.metrics.text())
    return int(found[1]) if found else 0


@pytest.mark.parametrize("path", _ASKED)
def test_a_client_that_goes_away_ends_the_wait_of_its_prompt(
    running: Running, hold: Callable[..., None], path: str
) -> None:
    hold(at_least=0)
    before, jobs = _left(running), len(running.runner.jobs)
    with ExitStack() as stack:
        for _ in range(2):  # one is being tokenised, the other waits
            stack.enter_context(_sent(running, path))
        assert _until(lambda: _waiting(running) == 1)
    assert _until(lambda: _left(running) == before + 2), (
        "the requests ended, though the first prompt is still being tokenised"
    )
    assert _waiting(running) == 0, "nobody waits for the second prompt, so it has left the queue"
    assert len(running.runner.jobs) == jobs


def test_a_short_prompt_does_not_wait_for_a_long_one(running: Running, hold: Callable[..., None]) -> None:
    hold(at_least=1000)
    long = {"model": "tiny", "prompt": "x" * 20_000}
    with _sent(running, "/tokenize", long), _sent(running, "/tokenize", long), running.http() as http:
        assert _until(lambda: _waiting(running) == 1), "of the long ones; the other is being tokenised"
        answer = http.post("/tokenize", json=_ASKED["/tokenize"], timeout=5)
    assert answer.status_code == 200


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


def test_a_long_conversation_that_is_remembered_is_a_long_prompt(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody with a short prompt waits for it, though the body that goes on with it is short."""
    monkeypatch.setattr("kvboost.serve.security.bodies._LARGE_BYTES", 500)
    threads: list[str] = []
    service = running.service
    for owner, name in ((service, "encode"), (service.chats, "remember"), (service.responses, "remember")):
        kept = getattr(owner, name)

        def noted(*given: Any, kept: Callable[..., Any] = kept, **more: Any) -> Any:
            threads.append(threading.current_thread().name)
            return kept(*given, **more)

        monkeypatch.setattr(owner, name, noted)
    with running.http() as http:
        first = http.post("/v1/responses", json={**_ASKED["/v1/responses"], "input": "x" * 600}).json()
        go_on = {**_ASKED["/v1/responses"], "previous_response_id": first["id"]}
        assert http.post("/v1/responses", json=go_on).status_code == 200
    assert threads == ["kvboost-large"] * 6


class _NotAtOnce:
    """A tokenizer that is not fast, and sees whether two threads use it."""

    is_fast = False

    def __init__(self) -> None:
        self._inner, self._free = byte_tokenizer(), threading.Lock()
        self.at_once = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *given: Any, **more: Any) -> Any:
        if not self._free.acquire(blocking=False):
            self.at_once += 1
            return self._inner(*given, **more)
        try:
            time.sleep(0.001)
            return self._inner(*given, **more)
        finally:
            self._free.release()


@pytest.mark.parametrize("fast", [True, False])
def test_a_tokenizer_is_used_by_several_threads_only_if_it_can_be(fast: bool) -> None:
    tokenizer = byte_tokenizer() if fast else _NotAtOnce()
    chats = ChatPrompts(tokenizer, min_gap=4)

    def encode(number: int) -> list[int]:
        turns = [Turn({"role": "user", "content": f"{number} " * 200})]
        return chats.encode(turns, tenant="", cache_key="").token_ids

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(encode, range(40)))
    assert found == [encode(number) for number in range(40)]
    assert fast or tokenizer.at_once == 0
