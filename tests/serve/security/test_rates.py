from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from kvboost import KVBoost
from kvboost.serve import Keys, Limits
from kvboost.serve.app import make_app
from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import Rates
from tests.serve.asgi import ask
from tests.serve.conftest import KEY, OTHER_KEY, Running


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_come_back_evenly() -> None:
    clock = _Clock()
    rates = Rates(Limits(max_requests_per_minute=3), clock=clock)
    for _ in range(3):
        rates.enter("one")
    with pytest.raises(ApiError, match="3 requests per minute") as refused:
        rates.enter("one")
    assert refused.value.status == 429
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.headers["Retry-After"] == "20"
    rates.enter("other")
    clock.now += 19.9
    with pytest.raises(ApiError):
        rates.enter("one")
    clock.now += 0.2
    rates.enter("one")
    clock.now += 3600
    assert rates.headers("one")["x-ratelimit-remaining-requests"] == "3", "no more than a minute's worth"


def test_tokens_beyond_the_budget_are_paid_back() -> None:
    clock = _Clock()
    rates = Rates(Limits(max_tokens_per_minute=600), clock=clock)
    rates.enter("one")
    rates.spend("one", 1200)
    assert rates.headers("one") == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "120.000s",
    }
    with pytest.raises(ApiError, match="600 tokens per minute; try again in 60 seconds"):
        rates.enter("one")
    clock.now += 60
    rates.enter("one")


def test_nothing_is_limited_or_told_by_default() -> None:
    rates = Rates(Limits())
    for _ in range(1000):
        rates.enter("one")
        rates.spend("one", 10**9)
    assert rates.headers("one") == {}


def test_a_key_over_its_rate_is_told_when_to_come_back(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    limits = Limits(max_requests_per_minute=3, max_tokens_per_minute=100)
    running = start_server(make_engine(), keys=Keys([KEY, OTHER_KEY]), limits=limits)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "a b c d e", "max_tokens": 4, "temperature": 0}
    with running.openai() as client:
        answer = client.completions.with_raw_response.create(**asked)
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 100
        client.completions.create(**{**asked, "prompt": "x" * 120})
        with pytest.raises(openai.RateLimitError, match="100 tokens per minute") as refused:
            client.completions.create(**asked)
        assert int(refused.value.response.headers["retry-after"]) > 1
        assert refused.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
    with running.openai(OTHER_KEY) as client:
        client.completions.create(**asked)
    with running.http() as http:
        assert http.get("/v1/models").status_code == 200, "only what costs something is limited"


def test_who_needs_no_key_shares_one_budget(keyed: Running) -> None:
    app = make_app(keyed.engine, keyed.runner, model_name="tiny", limits=Limits(max_requests_per_minute=1))
    assert [ask(app, "POST", "/tokenize", json={"prompt": "x"}).status_code for _ in range(2)] == [200, 429]


def test_a_path_with_a_line_break_is_no_way_around_the_rate(keyed: Running) -> None:
    app = make_app(
        keyed.engine, keyed.runner, model_name="tiny", keys=Keys([KEY]), limits=Limits(max_requests_per_minute=1)
    )
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    assert ask(app, "POST", "/v1/completions", key=KEY, json=asked).status_code == 200
    assert ask(app, "POST", "/v1/completions", key=KEY, json=asked).status_code == 429
    assert ask(app, "POST", "/v1/completions%0A", key=KEY, json=asked).status_code == 404


def test_tokens_of_an_answer_that_nobody_waits_for_are_counted(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    running = start_server(make_engine(), keys=Keys([KEY]), limits=Limits(max_tokens_per_minute=300))
    asked: dict[str, Any] = {"model": "tiny", "prompt": "a b c", "max_tokens": 400, "stream": True}
    with running.openai() as client, running.http() as http:
        with client.completions.create(**asked, extra_body={"ignore_eos": True}) as stream:
            for _ in range(100):
                next(stream)
        for _ in range(100):
            left = int(http.post("/tokenize", json={"prompt": "a"}).headers["x-ratelimit-remaining-tokens"])
            if left < 250:
                break
            time.sleep(0.1)
    assert left < 250, "a hundred tokens were written; five come back each second"
