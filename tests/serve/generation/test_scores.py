"""Scores take turns: with other tenants' scores, with jobs, and with clients that leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvboost import CapacityError, KVBoost
from kvboost.serve.security.auth import Keys
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.conftest import KEY, OTHER_KEY, SECRET, Running

_MANY: dict[str, Any] = {"query": "x", "documents": [f"document {place}" for place in range(12)]}
_ONE: dict[str, Any] = {"query": "x", "documents": ["alone"]}


class Turnstile:
    """Lets calls of ``KVBoost.score_many`` through one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tenants: list[str] = []
        self.arrived, self.open = threading.Semaphore(0), threading.Semaphore(0)
        score = KVBoost.score_many

        def stopped(engine: KVBoost, *args: Any, **given: Any) -> Any:
            self.tenants.append(engine.config.tenant)
            self.arrived.release()
            self.open.acquire()
            return score(engine, *args, **given)

        monkeypatch.setattr(KVBoost, "score_many", stopped)
        monkeypatch.setattr("kvboost.serve.generation.scores._PIECE", 1)


@pytest.fixture
def turnstile(monkeypatch: pytest.MonkeyPatch) -> Turnstile:
    return Turnstile(monkeypatch)


@pytest.fixture
def server(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    return start_server(make_engine(), keys=Keys([KEY, OTHER_KEY], secret=SECRET))


def _post(server: Running, key: str, body: dict[str, Any], *, answers: list[httpx.Response]) -> threading.Thread:
    def send() -> None:
        with server.http(key) as http:
            answers.append(http.post("/rerank", json=body))

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def _wait(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_tenants_take_turns_and_everything_else_goes_on(server: Running, turnstile: Turnstile) -> None:
    answers: list[httpx.Response] = []
    many = _post(server, KEY, _MANY, answers=answers)
    assert turnstile.arrived.acquire(timeout=30)
    one = _post(server, OTHER_KEY, _ONE, answers=answers)
    _wait(lambda: server.service.scoring.waiting == 1)
    with server.openai() as client:  # while the model is being asked for scores
        assert client.completions.create(model="tiny", prompt="x", max_tokens=4, temperature=0).usage
    turnstile.open.release(100)
    many.join()
    one.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [len(answer.json()["results"]) for answer in answers] == [1, 12]
    assert len(turnstile.tenants) == 13
    assert turnstile.tenants[1] != turnstile.tenants[0]


def test_nothing_more_is_read_for_a_client_that_left(server: Running, turnstile: Turnstile) -> None:
    with server.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/rerank", json=_MANY, timeout=0.5)
    _wait(lambda: server.service.streams.held == 0)
    turnstile.open.release(100)
    answers: list[httpx.Response] = []
    _post(server, OTHER_KEY, _ONE, answers=answers).join()
    assert answers[0].status_code == 200
    assert len(turnstile.tenants) == 2, "the piece that had begun, and the other tenant's"
    assert [record["finish"] for record in server.service.metrics.recent()] == ["cancelled", "length"]


def test_what_does_not_fit_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **given: Any) -> Any:
        raise CapacityError("secret numbers")

    monkeypatch.setattr(KVBoost, "score_many", full)
    with server.http() as http:
        answer = http.post("/rerank", json=_ONE)
        echo = http.post("/v1/completions", json={"model": "tiny", "prompt": "xyz", "echo": True, "logprobs": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "documents")
    assert (echo.status_code, echo.json()["error"]["param"]) == (413, "prompt")
    assert "secret" not in answer.text + echo.text
    assert [record["finish"] for record in server.service.metrics.recent()] == ["refused", "refused"]
    _wait(lambda: server.runner.load().running == 0)


def test_a_model_that_one_request_uses_at_a_time_is_shared(start_server: Callable[..., Running]) -> None:
    """Dynamic RoPE: requests lock the model. A long answer and scores both end, with what they give alone."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = tiny_model("llama", vocab_size=260, max_position_embeddings=2048, rope_parameters=rope)
    server = start_server(KVBoost(model, byte_tokenizer(), chunk_size=32, quality="exact"))
    with server.openai() as client, server.http() as http:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 64, "temperature": 0}
        alone, scores = client.completions.create(**asked), http.post("/rerank", json=_MANY).json()["results"]
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(client.completions.create(**asked)))
        thread.start()
        assert http.post("/rerank", json=_MANY).json()["results"] == scores
        thread.join()
    assert found[0].choices == alone.choices
