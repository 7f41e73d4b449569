from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from kvboost import KVBoost
from kvboost.scheduler.jobs import Finished, NewToken, RunnerLoad
from tests.serve.conftest import Running

_ASKED: dict[str, Any] = {"model": "tiny", "prompt": "Caches are", "temperature": 0, "max_tokens": 5}


def test_an_echo_comes_first(client: openai.OpenAI, keyed: Running) -> None:
    plain = client.completions.create(**{**_ASKED, "prompt": ["Caches are", "So"]})
    for prompt in (["Caches are", "So"], [keyed.engine.encode("Caches are"), keyed.engine.encode("So")]):
        asked: Any = {**_ASKED, "prompt": prompt, "echo": True}
        whole = client.completions.create(**asked)
        assert [choice.text for choice in whole.choices] == [
            before + choice.text for before, choice in zip(("Caches are", "So"), plain.choices, strict=True)
        ]
        streamed = {0: "", 1: ""}
        for chunk in client.completions.create(**asked, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert list(streamed.values()) == [choice.text for choice in whole.choices]


def test_the_best_of_several_has_the_likeliest_tokens(client: openai.OpenAI, keyed: Running) -> None:
    asked: Any = {**_ASKED, "prompt": ["Caches are", "So"], "temperature": 2, "seed": 5}
    every = client.completions.create(**asked, n=4, logprobs=0)

    def mean(choice: Any) -> float:
        found = choice.logprobs.token_logprobs
        return float(sum(found) / len(found))

    best = [text for start in (0, 4) for text in sorted(every.choices[start : start + 4], key=mean)[:1:-1]]
    chosen = client.completions.create(**asked, n=2, best_of=4)
    assert [choice.text for choice in chosen.choices] == [choice.text for choice in best]
    assert [choice.index for choice in chosen.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in chosen.choices)
    assert chosen.usage is not None
    assert every.usage is not None
    assert chosen.usage.completion_tokens == every.usage.completion_tokens, "all that were made are counted"


class _Drawn:
    """A runner whose answers were drawn before: for each job the next one, tokens with their log-probabilities."""

    answers: Iterator[list[NewToken]]

    def submit(self, job: Any) -> Any:
        drawn = next(self.answers)
        events = [*drawn, Finished("stop", None)]
        return SimpleNamespace(listen=lambda deliver: [deliver(event) for event in events], cancel=lambda: None)

    def load(self) -> RunnerLoad:
        return RunnerLoad(0, 0, 0)

    def close(self) -> None: ...


def test_an_answer_that_ends_at_once_is_as_likely_as_its_end(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    engine = make_engine()
    x, y = engine.encode("xy")
    end = engine.tokenizer.eos_token_id
    nothing, begun, whole = (
        [NewToken(end, -8.0)],
        [NewToken(x, -0.5), NewToken(end, -6.0)],
        [NewToken(y, -1.0), NewToken(end, -0.2)],
    )
    running = start_server(engine, runner=(drawn := _Drawn()))
    with running.openai() as client:
        drawn.answers = iter([nothing, begun, whole])
        chosen = client.completions.create(**_ASKED, n=2, best_of=3, logprobs=0)
        assert [choice.text for choice in chosen.choices] == ["y", "x"]
        assert chosen.choices[0].logprobs is not None
        assert chosen.choices[0].logprobs.token_logprobs == [-1.0], "its end is no part of the answer"
        drawn.answers = iter([begun, [NewToken(end, -0.1)], whole])
        assert client.completions.create(**_ASKED, best_of=3).choices[0].text == ""


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"best_of": 2, "n": 3}, "best_of", "less than n"),
        ({"best_of": 9}, "best_of", "at most 8"),
        ({"echo": True, "logprobs": 1}, "echo", "log-probabilities"),
        ({"suffix": "the end"}, "suffix", "suffix is not supported"),
    ],
)
def test_what_cannot_be_done_says_so(keyed: Running, change: dict[str, Any], param: str, told: str) -> None:
    with keyed.http() as http:
        answer = http.post("/v1/completions", json={**_ASKED, **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert told in answer.json()["error"]["message"]
