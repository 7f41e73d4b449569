from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch

from kvboost import KVBoost
from kvboost.serve.security.limits import Limits
from tests.serve.conftest import Running

_ASKED: dict[str, Any] = {"model": "tiny", "prompt": "Caches are", "temperature": 0, "max_tokens": 5}
_TEXT = "A cache keeps what was costly to make near to where it is used. Ärger kostet 5 €, "
_EVALUATED: dict[str, Any] = {"model": "tiny", "prompt": _TEXT, "temperature": 0, "echo": True, "logprobs": 3}


def _plain(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities behind each token but the last, by Transformers alone."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(dim=-1)


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


def test_a_prompt_read_for_its_log_probabilities_is_not_cached(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": _TEXT * 8, "temperature": 0, "max_tokens": 2}
    client.completions.create(**asked)
    for more, cached in (({}, True), ({"echo": True}, True), ({"echo": True, "logprobs": 1}, False)):
        usage = client.completions.create(**asked, **more).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) == cached, more


@pytest.mark.parametrize("new", [0, 1, 4])
def test_a_prompts_log_probabilities_are_plain_transformers_own(
    client: openai.OpenAI, keyed: Running, new: int
) -> None:
    """With max_tokens 0, as evaluations ask, and before those of an answer."""
    (choice,) = client.completions.create(**_EVALUATED, max_tokens=new).choices
    ids, logprobs = keyed.engine.encode(_TEXT), choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert choice.text.startswith(_TEXT)
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == len(ids) + new
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    expected = _plain(keyed.engine.model, ids)
    found = logprobs.token_logprobs[1 : len(ids)]
    assert found == pytest.approx([row[token].item() for row, token in zip(expected, ids[1:], strict=True)], abs=1e-4)
    for row, top, own in zip(expected, logprobs.top_logprobs[1 : len(ids)], found, strict=True):
        assert max(top.values()) == pytest.approx(row.max().item(), abs=1e-4)
        assert own in top.values() or "\ufffd" in top
        assert 2 <= len(top) <= 4  # bytes that are no character have one text
    if new == 0:
        assert (choice.text, choice.finish_reason) == (_TEXT, "length")
    # Each offset is where the token's text begins; a character of several bytes is one.
    starts = zip(logprobs.text_offset, logprobs.tokens, strict=True)
    assert all(choice.text.startswith(token, at) for at, token in starts if "\ufffd" not in token)
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_several_prompts_and_choices_have_their_own(client: openai.OpenAI, keyed: Running) -> None:
    prompts = [keyed.engine.encode(_TEXT), keyed.engine.encode("So"), [70]]
    whole = client.completions.create(**{**_EVALUATED, "prompt": prompts}, n=2, max_tokens=2, seed=1)
    alone = [client.completions.create(**{**_EVALUATED, "prompt": prompt}, max_tokens=0) for prompt in prompts]
    assert [choice.index for choice in whole.choices] == list(range(6))
    for place, choice in enumerate(whole.choices):
        ids, own = prompts[place // 2], alone[place // 2].choices[0].logprobs
        assert choice.logprobs is not None
        assert own is not None
        assert (choice.logprobs.token_logprobs or [])[: len(ids)] == own.token_logprobs
        assert len(choice.logprobs.token_logprobs or []) == len(ids) + 2


def test_warm_and_cold_have_the_same_bits(client: openai.OpenAI, keyed: Running) -> None:
    asked = {**_EVALUATED, "prompt": _TEXT * 4, "max_tokens": 0}
    for view in keyed.engine.views():
        view.clear()
    cold = client.completions.create(**asked).choices[0].logprobs
    client.completions.create(model="tiny", prompt=_TEXT * 4, max_tokens=1)
    assert client.completions.create(**asked).choices[0].logprobs == cold


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(**_EVALUATED, max_tokens=3).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**_EVALUATED, max_tokens=3, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        told = [value for part in parts if part.logprobs for value in getattr(part.logprobs, name)]
        assert told == getattr(whole.logprobs, name)


def test_an_end_token_is_among_those_that_evaluations_count(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    """They leave out the last one as what was generated: were it not there, the prompt would lose its own."""
    engine = make_engine()
    ids = engine.encode(_TEXT)
    (likeliest,) = engine.generate(ids, max_new_tokens=1, temperature=0, eos_token_id=None).token_ids
    engine.tokenizer.eos_token = engine.tokenizer.convert_ids_to_tokens(likeliest)
    with start_server(engine).openai() as client:
        choice = client.completions.create(**_EVALUATED, max_tokens=1).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert len(choice.logprobs.token_logprobs or []) == len(ids) + 1


def test_prompt_logprobs_are_those_of_vllm(client: openai.OpenAI, keyed: Running) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": _TEXT, "temperature": 0}
    for new, given in ((0, 0), (2, 2)):
        (choice,) = client.completions.create(**asked, max_tokens=new, extra_body={"prompt_logprobs": given}).choices
        told, ids = choice.model_extra["prompt_logprobs"], keyed.engine.encode(_TEXT)
        assert (len(choice.text), choice.logprobs) == (new, None) or new
        assert told[0] is None
        expected = _plain(keyed.engine.model, ids)
        for token, entry, row in zip(ids[1:], told[1:], expected, strict=True):
            own = entry[str(token)]
            assert own["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
            assert own["rank"] == 1 + int((row > row[token]).sum())
            assert own["decoded_token"] == keyed.service.token_bytes(token).decode(errors="replace")
            others = {rank: value["logprob"] for value in entry.values() if (rank := value["rank"]) <= given}
            for rank, logprob in others.items():
                assert logprob == pytest.approx(row.topk(given).values[rank - 1].item(), abs=1e-4)
            assert len(others) == given
            assert len(entry) == given + (own["rank"] > given)


def test_a_long_prompt_is_read_in_pieces_with_the_same_bits(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**_EVALUATED, "prompt": _TEXT * 4, "max_tokens": 0}
    whole = client.completions.create(**asked)
    monkeypatch.setattr("kvboost.serve.generation.scores._PIECE", 50)
    assert client.completions.create(**asked).choices == whole.choices


def test_what_was_read_is_counted(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> None:
    server = start_server(make_engine(), limits=Limits(max_tokens_per_minute=10_000))
    with server.openai() as client:
        answer = client.completions.with_raw_response.create(**_EVALUATED, max_tokens=0)
    usage = answer.parse().usage
    tokens = len(server.engine.encode(_TEXT))
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (tokens, 0)
    assert usage.model_extra["kvboost"]["fresh_tokens"] == tokens
    (record,) = server.service.metrics.recent()
    assert (record["endpoint"], record["prompt"], record["finish"]) == ("completions", tokens, "length")
    assert int(server.service.rates.headers("")["x-ratelimit-remaining-tokens"]) < 10_000 - tokens + 1000


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"best_of": 2}, "best_of", "take the best"),
        ({"max_tokens": 0}, "max_tokens", "needs echo and logprobs"),
        ({"max_tokens": 0, "echo": True}, "max_tokens", "needs echo and logprobs"),
        ({"max_tokens": -1}, "max_tokens", "0 or more"),
        ({"echo": True, "logprobs": 6}, "logprobs", "5 or less"),
        ({"logprobs": True}, "logprobs", "give a whole number"),
        ({"prompt_logprobs": 6}, "prompt_logprobs", "5 or less"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"max_tokens": 0, "echo": True, "logprobs": 0, "prompt": [1] * 3000}, "prompt", "at most 2048"),
        ({"suffix": "the end"}, "suffix", "suffix is not supported"),
    ],
)
def test_what_cannot_be_done_says_so(keyed: Running, change: dict[str, Any], param: str, told: str) -> None:
    with keyed.http() as http:
        answer = http.post("/v1/completions", json={**_ASKED, **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert told in answer.json()["error"]["message"]
