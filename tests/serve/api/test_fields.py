"""The fields that ordinary clients send: which have an effect, which have none and are named, which are refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.serve.conftest import Running

_USER = {"role": "user", "content": "Tell me about caches, please."}
_CHAT: dict[str, Any] = {"model": "tiny", "messages": [_USER], "temperature": 0, "max_tokens": 8}
_PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "Caches are", "temperature": 0, "max_tokens": 8}
_BOTH = pytest.mark.parametrize(
    ("path", "asked"), [("/v1/chat/completions", _CHAT), ("/v1/completions", _PLAIN)], ids=["chat", "completions"]
)


@_BOTH
def test_sampling_fields_reach_the_runner(keyed: Running, path: str, asked: dict[str, Any]) -> None:
    fields = {"top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 3, "stop_token_ids": [7, 9]}
    with keyed.http() as http:
        answer = http.post(path, json={**asked, **fields})
        assert answer.status_code == 200, answer.text
        job = keyed.runner.jobs[-1]
        sampling = job.sampling
        assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.25, 1.5)
        assert sampling.min_new_tokens == 3
        assert job.stop_token_ids == {2, 7, 9}
        assert http.post(path, json={**asked, **fields, "ignore_eos": True, "top_k": -1}).status_code == 200
        assert keyed.runner.jobs[-1].stop_token_ids == {7, 9}
        assert keyed.runner.jobs[-1].sampling.top_k == 0


def test_a_stop_token_ends_an_answer_and_is_not_in_it(client: openai.OpenAI, keyed: Running) -> None:
    (token,) = keyed.engine.encode("Q")
    asked: Any = {**_CHAT, "logit_bias": {str(token): 100}}
    ended = client.chat.completions.create(**asked, extra_body={"stop_token_ids": [token]})
    assert (ended.choices[0].message.content, ended.choices[0].finish_reason) == ("", "stop")
    later = client.chat.completions.create(**asked, extra_body={"stop_token_ids": [token], "min_tokens": 4})
    assert later.usage is not None
    assert later.usage.completion_tokens == 5, "four others, then the token itself"


def test_the_end_of_a_turn_can_be_ignored(client: openai.OpenAI) -> None:
    asked: Any = {**_CHAT, "logit_bias": {"2": 100}}
    assert client.chat.completions.create(**asked).choices[0].finish_reason == "stop"
    whole = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
    assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("length", "")


@_BOTH
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"min_tokens": 9}, "min_tokens"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"stop_token_ids": [260]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_values_that_cannot_be_used(
    keyed: Running, path: str, asked: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    with keyed.http() as http:
        answer = http.post(path, json={**asked, **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert param in answer.json()["error"]["message"]


_INERT: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_options": {"ttl": "30m"},
}
_INERT_IN_CHATS = {"verbosity": "low", "prediction": {"type": "content", "content": "x"}, "modalities": ["text"]}


@_BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_fields_without_effect_are_taken_and_named(
    keyed: Running, path: str, asked: dict[str, Any], stream: bool
) -> None:
    inert = {**_INERT, **(_INERT_IN_CHATS if path.endswith("chat/completions") else {})}
    options = {"stream_options": {"include_obfuscation": False, "include_usage": None}} if stream else {}
    with keyed.http() as http:
        plain = http.post(path, json={**asked, "stream": stream})
        answer = http.post(path, json={**asked, **inert, **options, "stream": stream})
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-kvboost-ignored"].split(", ")
    assert set(named) == {*inert, *(["stream_options.include_obfuscation"] if stream else [])}
    assert "x-kvboost-ignored" not in plain.headers
    if not stream:
        assert answer.json()["choices"] == plain.json()["choices"]


@_BOTH
def test_null_is_what_clients_send_who_have_not_decided(keyed: Running, path: str, asked: dict[str, Any]) -> None:
    body = f"{'ChatRequest' if 'chat' in path else 'CompletionRequest'}"
    fields = keyed.app.openapi()["components"]["schemas"][body]["properties"]
    nothing = {name: None for name in fields if name not in ("model", "messages", "prompt")}
    with keyed.http() as http:
        answer = http.post(path, json={**asked, **nothing, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert "x-kvboost-ignored" not in answer.headers


@_BOTH
@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("topk", "top_k"),
        ("frobnicate", None),
        ("x" * 3000, None),
        ("\ud800", None),
    ],
)
def test_a_misspelt_field_is_told_what_was_meant(
    keyed: Running, path: str, asked: dict[str, Any], sent: str, meant: str | None
) -> None:
    with keyed.http() as http:
        answer = http.post(path, content=json.dumps({**asked, sent: 1}), headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
    assert (f"did you mean {meant}?" if meant else "leave it out") in error["message"]
    assert len(error["message"]) < 200


def test_a_misspelt_field_further_in_is_named_with_its_place(keyed: Running) -> None:
    with keyed.http() as http:
        messages = [_USER, {"role": "user", "contnt": "x"}]
        answer = http.post("/v1/chat/completions", json={**_CHAT, "messages": messages}).json()["error"]
        assert answer["param"] == "messages.1.contnt"
        assert "did you mean content?" in answer["message"]
        options = http.post("/v1/chat/completions", json={**_CHAT, "stream": True, "stream_options": {"usage": True}})
        assert options.json()["error"]["param"] == "stream_options.usage"


@pytest.mark.parametrize(
    ("content", "place", "told"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], ".0", "text only; leave out image_url"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}], ".1", "leave out input_audio"),
        ([{"type": "file", "file": {"file_id": "x"}}], ".0", "leave out file"),
        ([{"type": "poem", "text": "a"}], ".0", 'expected {"type": "text", "text": "..."}'),
        ([{"type": ["text"]}], ".0", 'expected {"type": "text", "text": "..."}'),
        (["a"], ".0", 'expected {"type": "text", "text": "..."}'),
        ([{"type": "text"}], ".0.text", "required"),
        (5, "", 'a text or a list of parts; expected {"type": "text", "text": "..."}'),
        ({"type": "text", "text": "a"}, "", "a text or a list of parts"),
    ],
)
def test_what_is_no_text_is_refused_by_its_name(keyed: Running, content: Any, place: str, told: str) -> None:
    with keyed.http() as http:
        answer = http.post("/v1/chat/completions", json={**_CHAT, "messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.0.content" + place
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model": 3}, "model: give a text"),
        ({"messages": "hello"}, "messages: give a list"),
        ({"messages": ["hello"]}, "messages.0: give an object"),
        ({"messages": []}, "messages: give 1 or more entries"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: this field is required; give it"),
        ({"messages": [{**_USER, "role": "king"}]}, "messages.0.role: give 'system', 'developer', 'user', "),
        ({"messages": [{**_USER, "name": "a b"}]}, "messages.0.name: give a text that fits "),
        ({"temperature": "hot"}, "temperature: give a number"),
        ({"temperature": 3}, "temperature: give 2.0 or less"),
        ({"max_tokens": 0}, "max_tokens: give 1 or more"),
        ({"max_tokens": 1.5}, "max_tokens: give a whole number"),
        ({"stream": "maybe"}, "stream: give true or false"),
        ({"stop": 5}, "stop: give a text"),
        ({"modalities": ["text", "text"]}, "modalities: give 1 or fewer entries"),
        ({"prompt_cache_key": "x" * 257}, "prompt_cache_key: give 256 or fewer characters"),
        ({"tool_choice": "perhaps"}, "tool_choice: give 'none', 'auto' or 'required'"),
        ({"logit_bias": []}, "logit_bias: give an object"),
        ({"response_format": {"type": "moon"}}, "response_format: give 'type' as one of 'text', 'json_object', "),
        ({"response_format": {}}, "response_format: give an object with 'type'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_told_what_to_give(keyed: Running, changed: dict[str, Any], told: str) -> None:
    with keyed.http() as http:
        answer = http.post("/v1/chat/completions", json={**_CHAT, **changed})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(told)
    assert "moon" not in answer.text, "what a client sent is not repeated"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"model": tiny}', "not valid JSON: Expecting value at character 10;"),
        (b"{'model': 1}", "not valid JSON: Expecting property name enclosed in double quotes at character 1;"),
        (b"[" * 30_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"", "not a JSON object"),
    ],
)
def test_broken_json_is_told_where_it_breaks(keyed: Running, body: bytes, told: str) -> None:
    with keyed.http() as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    assert "JSON object" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("functions", [{"name": "f"}], "give tools"),
        ("function_call", "auto", "give tool_choice"),
        ("web_search_options", {}, "does not search"),
        ("audio", {"voice": "x"}, "text only"),
        ("modalities", ["text", "audio"], "modalities"),
        ("moderation", {}, "does not moderate"),
    ],
)
def test_what_would_change_the_answer_is_refused(keyed: Running, field: str, value: Any, told: str) -> None:
    with keyed.http() as http:
        answer = http.post("/v1/chat/completions", json={**_CHAT, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)
    assert told in answer.json()["error"]["message"]


def test_tool_fields_without_tools(client: openai.OpenAI) -> None:
    client.chat.completions.create(**_CHAT, parallel_tool_calls=True)
    client.chat.completions.create(**_CHAT, tools=[], parallel_tool_calls=False, tool_choice="none")
    with pytest.raises(openai.BadRequestError, match="tool_choice needs tools"):
        client.chat.completions.create(**_CHAT, tools=[], tool_choice="auto")
