from __future__ import annotations

import pytest

from kvboost import KVBoost
from kvboost.errors import BusyError
from kvboost.scheduler.jobs import Job, RunnerLoad, Ticket
from kvboost.serve.app import make_app
from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import Limits, Streams
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.asgi import ask


def test_a_key_that_takes_all_streams_does_not_shut_out_another() -> None:
    streams = Streams(2)
    streams.enter("a")
    streams.enter("a")
    with pytest.raises(ApiError, match="2 requests are being answered"):
        streams.enter("a")
    streams.enter("b")
    with pytest.raises(ApiError, match="2 requests are being answered"):
        streams.enter("b")
    for tenant in "aab":
        streams.leave(tenant)
    assert streams.running == 0
    streams.enter("b")
    streams.enter("b")


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
