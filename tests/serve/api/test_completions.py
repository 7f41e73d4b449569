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


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"best_of": 2}, "best_of", "take the best"),
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
