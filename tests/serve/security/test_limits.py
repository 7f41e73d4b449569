from __future__ import annotations

from typing import Any

import pytest

from kvboost import ConfigError, KVBoost
from kvboost.errors import BusyError
from kvboost.scheduler.jobs import Job, RunnerLoad, Ticket
from kvboost.serve.app import make_app
from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import Limits, Shares, check_count, check_json, is_deeper
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.asgi import ask


def test_a_key_that_takes_all_streams_does_not_shut_out_another() -> None:
    streams = Shares(2, refusal="2 requests are being answered")
    streams.add("a")
    streams.add("a")
    with pytest.raises(ApiError, match="2 requests are being answered"):
        streams.add("a")
    streams.add("b")
    with pytest.raises(ApiError, match="2 requests are being answered"):
        streams.add("b")
    for tenant in "aab":
        streams.give_back(tenant)
    assert streams.held == 0
    streams.add("b")
    streams.add("b")


def test_bytes_are_shared_evenly_once_they_are_all_taken() -> None:
    shares = Shares(100, refusal="the requests have 100 bytes")
    shares.add("a", 100)
    with pytest.raises(ApiError) as refused:
        shares.add("a", 1)
    assert refused.value.status == 429
    assert refused.value.message == "the requests have 100 bytes, this server's limit; try again in a moment"
    assert (refused.value.code, refused.value.headers) == ("too_many_requests", {"Retry-After": "1"})
    assert shares.held == 100, "what was refused is not held"
    shares.add("b", 50)
    with pytest.raises(ApiError):
        shares.add("b", 1)
    shares.give_back("a", 100)
    assert shares.held == 50
    shares.add("b", 50)
    shares.give_back("b", 100)
    assert shares.held == 0
    shares.add("c", 100)


def test_a_tenant_without_anything_gets_one_even_if_its_share_is_less() -> None:
    streams = Shares(1, refusal="1 requests are being answered")
    streams.add("a")
    streams.add("b")
    with pytest.raises(ApiError):
        streams.add("b")


@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_that_refuses_everything_is_refused(value: int) -> None:
    with pytest.raises(ConfigError, match=f"max_prompts={value} refuses everything"):
        Limits(max_prompts=value)
    assert Limits(max_prompts=1, max_requests_per_minute=None).max_prompts == 1


def _refused(call: Any) -> tuple[Any, ...]:
    with pytest.raises(ApiError) as refused:
        call()
    error = refused.value
    return error.status, error.message, error.param, error.code


def test_a_list_may_have_as_many_entries_as_the_limit_says() -> None:
    check_count(4, 4, param="stop")
    message = "stop has 5 entries, this server takes 4"
    assert _refused(lambda: check_count(5, 4, param="stop")) == (400, message, "stop", "too_many")


@pytest.mark.parametrize(
    ("value", "depth"), [(1, 0), ([], 0), ({}, 0), ([1], 1), ({"a": 1}, 1), ([{"a": [1]}], 3), ([1, [2], {"a": {}}], 2)]
)
def test_depth_is_counted_in_lists_and_objects(value: Any, depth: int) -> None:
    assert not is_deeper(value, depth)
    assert depth == 0 or is_deeper(value, depth - 1)


def test_json_of_a_client_is_bounded_in_depth_and_bytes() -> None:
    limits = Limits(max_schema_depth=2, max_schema_bytes=13)
    check_json({"a": ["ü"]}, limits=limits, param="tools")
    deep = {"a": {"b": {"c": 1}}}
    assert _refused(lambda: check_json(deep, limits=limits, param="tools")) == (
        400,
        "tools is nested deeper than 2 levels",
        "tools",
        "too_deep",
    )
    assert _refused(lambda: check_json({"a": ["üü"]}, limits=limits, param="tools")) == (
        400,
        "tools has 15 bytes, this server takes 13",
        "tools",
        "too_large",
    )
    assert _refused(lambda: check_json("\ud800", limits=limits, param="tools")) == (
        400,
        "tools holds half of a surrogate pair, which is no text",
        "tools",
        None,
    )


class _Full:
    """A runner that takes nothing; it says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def submit(self, job: Job) -> Ticket:
        self.asked.append(job.max_new_tokens)
        raise BusyError("full")

    def load(self) -> RunnerLoad:
        return RunnerLoad(0, 0, 0)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("limits", "wanted", "status", "given"),
    [
        (Limits(), 6000, 429, [6000]),
        (Limits(), None, 429, [8192 - 4]),
        (Limits(), 8192, 400, []),
        (Limits(max_new_tokens=5000), 5000, 429, [5000]),
        (Limits(max_new_tokens=5000), 5001, 400, []),
        (Limits(max_new_tokens=5000), None, 429, [5000]),
    ],
)
def test_answers_are_as_long_as_the_model_has_positions_unless_the_server_says_less(
    limits: Limits, wanted: int | None, status: int, given: list[int]
) -> None:
    model = tiny_model("llama", vocab_size=260, max_position_embeddings=8192)
    runner = _Full()
    with KVBoost(model, byte_tokenizer(), chunk_size=32) as engine:
        app = make_app(engine, runner, model_name="tiny", limits=limits)
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "abcd"}], "max_completion_tokens": wanted}
        answer = ask(app, "POST", "/v1/chat/completions", json=asked)
    assert (answer.status_code, len(runner.asked)) == (status, len(given)), answer.text
    assert not given or given[0] - 40 < runner.asked[0] <= given[0], "the chat's template takes some"
