"""A fleet under Ray Serve over real HTTP: answers as the plain server's, routing, deaths and draining."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.common.servers import RedisServer, redis_server
from tests.helpers.serving import kvboost_serve
from tests.integrations.ray.conftest import until
from tests.integrations.ray.fleets import Fleet, fleet, kill, replica_pids, text

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def two(model: Path, redis: RedisServer) -> Iterator[Fleet]:
    """Two replicas on one Redis."""
    with fleet(model, engine={"cache_bytes": 4 * 10**7, "remote_url": redis.url, "quality": "high"}) as running:
        yield running


def test_it_answers_as_the_plain_server(two: Fleet, model: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}
    asked = [
        ("/v1/completions", {"prompt": text(1), "max_tokens": 6, "temperature": 0}),
        ("/v1/completions", {"prompt": text(1), "max_tokens": 6, "temperature": 0, "stream": True}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True}),
        ("/v1/completions", {"prompt": text(1), "max_tokens": -1}),
        ("/v1/completions", {"prompt": "x" * 5_000_000}),
        ("/v1/nothing", {}),
        ("/tokenize", {"prompt": "hello"}),
    ]
    with kvboost_serve(model) as plain:
        for path, body in asked:
            answers = [
                httpx.post(url + path, json={"model": "model", **body}, timeout=120) for url in (two.url, plain.url)
            ]
            here, there = answers
            assert here.status_code == there.status_code, path
            assert here.headers["content-type"] == there.headers["content-type"]
            assert _said(here) == _said(there), path
        assert httpx.get(two.url + "/", timeout=60).text == httpx.get(plain.url + "/", timeout=60).text


def _said(answer: httpx.Response) -> object:
    """What it says, without ids and times."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return [choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices]
    told = answer.json()
    return told.get("choices") or told.get("error") or told.get("tokens")


def test_metrics_are_those_of_each_replica(two: Fleet) -> None:
    assert two.complete(text(2)).status_code == 200
    running = two.metric("kvboost_jobs_running")
    assert set(running) == set(replica_pids())
    assert sum(two.metric("kvboost_chunk_misses_total").values()) > 0


def test_a_repeated_document_goes_to_the_replica_that_has_it(two: Fleet) -> None:
    documents = [text(100 + n) for n in range(6)]
    where: dict[str, str] = {}
    for document in documents:  # first time
        where[document] = _answered_by(two, document + " first?")
    for round in range(3):
        for document in random.Random(round).sample(documents, len(documents)):
            prompt = document + f" question {round}?" if round < 2 else text(200 + round, 20) + "\n\n" + document
            assert _answered_by(two, prompt) == where[document], f"round {round}"
    assert len(set(where.values())) == 2, "both replicas have some"


def _answered_by(two: Fleet, prompt: str) -> str:
    before = two.metric("kvboost_requests_total")
    assert two.complete(prompt).status_code == 200
    after = two.metric("kvboost_requests_total")
    (replica,) = [name for name in after if after[name] > before.get(name, 0.0)]
    return replica


def test_a_client_that_leaves_frees_its_replica(two: Fleet) -> None:
    asked = {"model": "model", "prompt": text(3, 20), "max_tokens": 1500, "temperature": 0, "stream": True}
    asked["ignore_eos"] = True
    with httpx.stream("POST", two.url + "/v1/completions", json=asked, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: httpx closes the stream with it
        next(lines)
        until(lambda: sum(two.metric("kvboost_jobs_running").values()) == 1, seconds=20)
    until(lambda: sum(two.metric("kvboost_jobs_running").values()) == 0, seconds=20)


def test_a_killed_replica_loses_no_request_that_it_had_not_begun_to_answer(two: Fleet) -> None:
    pids = replica_pids()
    done = threading.Event()

    def ask(number: int) -> list[int]:
        statuses = []
        while not done.is_set():
            statuses.append(two.complete(text(300 + number % 4, 300), max_tokens=8).status_code)
        return statuses

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        try:
            until(lambda: sum(two.metric("kvboost_requests_total").values()) > 20)
            kill(next(iter(pids.values())))
            until(lambda: len(replica_pids()) == 2 and set(replica_pids()) != set(pids))
        finally:
            done.set()
        statuses = [status for future in asking for status in future.result()]
    assert set(statuses) == {200}
