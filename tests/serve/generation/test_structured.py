from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import torch

from kvboost.serve.generation.structured import Grammars
from kvboost.serve.schemas.responses import InlineSchemaFormat
from kvboost.serve.security.limits import Limits
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.conftest import Running

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
_ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "JSON, please"}], "max_tokens": 60}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}


@pytest.mark.parametrize("seed", range(5))
def test_even_a_random_model_follows_a_schema(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.create(**_ASKED, seed=seed, response_format=_format(_SCHEMA))  # type: ignore[call-overload]
    told = json.loads(answer.choices[0].message.content)
    assert told["colour"] in ("red", "green")
    assert 0 <= told["count"] <= 99
    assert answer.choices[0].finish_reason == "stop"


def test_choices_do_not_share_their_place_in_the_grammar(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**_ASKED, n=3, seed=1, response_format=_format(_SCHEMA))  # type: ignore[call-overload]
    for choice in answer.choices:
        assert set(json.loads(choice.message.content)) == {"colour", "count"}


def test_any_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**_ASKED, seed=1, response_format={"type": "json_object"})
    assert (answer.choices[0].message.content or "").startswith("{")
    if answer.choices[0].finish_reason == "stop":
        json.loads(answer.choices[0].message.content or "")


def test_the_other_two_ways(client: openai.OpenAI) -> None:
    responded = client.responses.create(
        model="tiny",
        input="JSON",
        max_output_tokens=60,
        text={"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}},
    )
    assert set(json.loads(responded.output_text)) == {"colour", "count"}
    completed = client.completions.create(
        model="tiny", prompt="JSON", max_tokens=60, extra_body={"response_format": _format(_SCHEMA)}
    )
    assert set(json.loads(completed.choices[0].text)) == {"colour", "count"}


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "code"),
    [
        (_deep(40), "too_deep"),
        ({"enum": ["x" * 70_000]}, "too_large"),
        ({"type": "no such type"}, "invalid_schema"),
        ({"type": "string", "pattern": "("}, "invalid_schema"),
        ({"$ref": "http://example.org/schema"}, "invalid_schema"),
        ({"type": "string", "description": "\ud800"}, None),
    ],
    ids=["deep", "large", "type", "pattern", "ref", "surrogate"],
)
def test_schemas_that_cannot_be_used_are_refused(keyed: Running, schema: dict[str, Any], code: str | None) -> None:
    body = json.dumps({**_ASKED, "response_format": _format(schema)})
    with keyed.http() as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "response_format"
    assert answer.json()["error"]["code"] == code


def test_a_grammar_that_fails_on_the_way_is_no_answer() -> None:
    schema = InlineSchemaFormat.model_validate({"type": "json_schema", "name": "x", "schema": {"type": "object"}})
    ends = frozenset({int(byte_tokenizer().eos_token_id)})
    make = Grammars(byte_tokenizer(), vocab_size=260, end_token_ids=ends).compile(schema, limits=Limits(), param="x")
    assert make is not None
    held = make()
    held([], torch.zeros(260))
    with pytest.raises(RuntimeError, match="the grammar cannot go on"):
        held([int(byte_tokenizer()("x")["input_ids"][0])], torch.zeros(260))  # an object never begins so
