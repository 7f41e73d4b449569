from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serve.conftest import OTHER_KEY, Running

_SYSTEM = {"role": "system", "content": "You are terse and you never, ever repeat yourself in any answer at all."}
_USER = {"role": "user", "content": "Tell me about caches, please, in one sentence of moderate length."}
_GREEDY: dict[str, Any] = {"model": "tiny", "messages": [_SYSTEM, _USER], "temperature": 0, "max_completion_tokens": 12}


def test_an_answer_says_what_it_cost_and_what_it_was_spared(client: openai.OpenAI) -> None:
    asked = {**_GREEDY, "messages": [{**_SYSTEM, "content": _SYSTEM["content"] + " (first)"}, _USER]}
    cold = client.chat.completions.create(**asked)
    warm = client.chat.completions.create(**asked)
    assert cold.usage is not None
    assert warm.usage is not None
    assert cold.usage.prompt_tokens_details is not None
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details is not None
    cached = warm.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached > 64
    told = warm.usage.model_dump()["kvboost"]
    assert told["exact_tokens"] == cached
    assert told["exact_tokens"] + told["moved_tokens"] + told["fresh_tokens"] == warm.usage.prompt_tokens
    assert told["bitwise"] is True
    assert told["ttft_ms"] > 0
    assert warm.choices[0].message.content == cold.choices[0].message.content
    assert warm.choices[0].finish_reason in ("length", "stop")
    assert warm.usage.total_tokens == warm.usage.prompt_tokens + warm.usage.completion_tokens


def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**_GREEDY)
    chunks = list(client.chat.completions.create(**_GREEDY, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert not any(reasons[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_without_being_asked_a_stream_carries_no_usage(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**_GREEDY, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_several_choices(client: openai.OpenAI) -> None:
    asked = {**_GREEDY, "temperature": 1.5, "n": 3, "seed": 7}
    answer = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3, "each choice has a seed of its own"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 36
    again = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in again.choices] == texts
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[index] for index in range(3)] == texts


def test_stop_strings_end_an_answer_before_them(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**_GREEDY).choices[0].message.content
    assert whole is not None
    stop = whole[4:7]
    cut = whole.index(stop)
    answer = client.chat.completions.create(**_GREEDY, stop=["never in there", stop])
    assert answer.choices[0].message.content == whole[:cut]
    assert answer.choices[0].finish_reason == "stop"
    counts = {client.chat.completions.create(**_GREEDY, stop=stop).usage.completion_tokens for _ in range(3)}
    assert counts == {answer.usage.completion_tokens}, "no token behind it counts"
    chunks = client.chat.completions.create(**_GREEDY, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[:cut]


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**_GREEDY, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 12
    joined = b"".join(bytes(token.bytes or []) for token in content)
    assert joined.decode(errors="replace") == answer.choices[0].message.content
    for token in content:
        assert token.logprob == max(top.logprob for top in token.top_logprobs), "greedy takes the likeliest"
        assert len(token.top_logprobs) == 3
    plain = client.chat.completions.create(**_GREEDY, logprobs=True)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.content is not None
    assert plain.choices[0].logprobs.content[0].top_logprobs == []
    streamed = list(client.chat.completions.create(**_GREEDY, logprobs=True, top_logprobs=3, stream=True))
    tokens = [t for chunk in streamed if chunk.choices[0].logprobs for t in chunk.choices[0].logprobs.content or []]
    assert [token.token for token in tokens] == [token.token for token in content]


def test_a_bias_decides(client: openai.OpenAI, keyed: Running) -> None:
    (token,) = keyed.engine.encode("Q")
    answer = client.chat.completions.create(**_GREEDY, logit_bias={str(token): 100})
    assert answer.choices[0].message.content == "Q" * 12


def test_penalties_and_top_p_reach_the_runner(client: openai.OpenAI, keyed: Running) -> None:
    client.chat.completions.create(**_GREEDY, presence_penalty=0.5, frequency_penalty=-0.25, top_p=0.5, seed=3)
    sampling = keyed.runner.jobs[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.top_p, sampling.seed) == (
        0.5,
        -0.25,
        0.5,
        3,
    )


def test_the_least_temperature_and_share_are_the_likeliest_token(client: openai.OpenAI) -> None:
    greedy = client.chat.completions.create(**_GREEDY).choices[0].message.content
    for extreme in ({"temperature": 5e-324}, {"temperature": 2, "top_p": 5e-324}):
        assert client.chat.completions.create(**{**_GREEDY, **extreme}).choices[0].message.content == greedy


def test_openai_defaults(client: openai.OpenAI, keyed: Running) -> None:
    client.chat.completions.create(model="tiny", messages=[_USER], max_tokens=2)
    job = keyed.runner.jobs[-1]
    assert job.sampling.temperature == 1.0
    assert job.top_logprobs is None
    assert job.max_new_tokens == 2
    assert job.stop_token_ids == frozenset({2})


def test_nothing_is_found_of_what_another_tenant_said(keyed: Running) -> None:
    asked = {**_GREEDY, "messages": [{**_SYSTEM, "content": "Between us: " + _SYSTEM["content"]}, _USER]}

    def cached(client: openai.OpenAI) -> int | None:
        usage = client.chat.completions.create(**asked).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens

    with keyed.openai() as one, keyed.openai(OTHER_KEY) as other:
        assert cached(one) == 0
        assert cached(other) == 0
        assert cached(one)
        first = keyed.runner.jobs[-1].tenant
        assert cached(other)
        second = keyed.runner.jobs[-1].tenant
    assert len(first) == len(second) == 64
    assert first != second


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"max_completion_tokens": 65}, "max_completion_tokens"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"model": "gpt-4"}, "model"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(keyed: Running, change: dict[str, Any], param: str | None) -> None:
    with keyed.http() as http:
        answer = http.post("/v1/chat/completions", json={**_GREEDY, **change})
    assert answer.status_code == (404 if "model" in change else 400)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param
        assert param.split(".")[0] in error["message"] or param in (
            "max_tokens",
            "messages",
            "model",
            "n",
            "tools",
            "stop",
        )


def test_what_clients_write_who_have_not_decided_is_taken(keyed: Running) -> None:
    with keyed.http() as http:
        plain = http.post("/v1/chat/completions", json=_GREEDY).json()
        for change in ({"stream": None}, {"top_p": 0, "temperature": 2, "seed": 1}, {"top_p": None}):
            answer = http.post("/v1/chat/completions", json={**_GREEDY, **change})
            assert answer.status_code == 200, change
            assert answer.json()["choices"][0]["message"] == plain["choices"][0]["message"], change
        for wrong in ({"stream": "perhaps"}, {"top_p": -0.1}):
            assert http.post("/v1/chat/completions", json={**_GREEDY, **wrong}).status_code == 400


def test_bodies_that_are_no_json_are_refused(keyed: Running) -> None:
    bodies = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": NaN}', b"[" * 30_000, b"1" * 5000]
    with keyed.http() as http:
        for body in bodies:
            answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, body[:20]
            assert "message" in answer.json()["error"]
        form = http.post("/v1/chat/completions", content=b'{"model":"tiny"}', headers={"Content-Type": "text/plain"})
        assert form.status_code == 400, "a page elsewhere must not be able to send this without a preflight"
        half = http.post(
            "/v1/chat/completions",
            content=b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
            headers={"Content-Type": "application/json"},
        )
        assert half.status_code == 400


def test_errors_reach_the_official_client_as_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**_GREEDY, extra_body={"frobnicate": 1})
    assert caught.value.param == "frobnicate"
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
