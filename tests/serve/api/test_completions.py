from __future__ import annotations

from typing import Any

import openai
import pytest

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
