"""``tool_choice`` that demands a call: a random model over HTTP, which without a grammar never calls anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai
import pytest
from jsonschema import validate

from kvboost import KVBoost
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.conftest import Running

_PAINT = {
    "type": "object",
    "properties": {"colour": {"$ref": "#/$defs/colour"}, "coats": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["colour", "coats"],
    "additionalProperties": False,
    "$defs": {"colour": {"enum": ["red", "gr\u00fcn"]}},
}
_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "paint", "parameters": _PAINT}},
    {"type": "function", "function": {"name": "look.at-it"}},
]
_NAMED: Any = {"type": "function", "function": {"name": "paint"}}
_ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Do something"}],
    "tools": _TOOLS,
    "max_tokens": 64,
}


@pytest.fixture(scope="module")
def running(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    engine = make_engine()
    engine.tokenizer = byte_tokenizer()
    engine.tokenizer.chat_template += "{# <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}"
    return start_server(engine)


@pytest.fixture
def client(running: Running) -> Any:
    with running.openai("no key is needed") as made:
        yield made


def _check(name: str, arguments: str) -> None:
    told = json.loads(arguments)
    if name == "paint":
        validate(told, _PAINT)
    else:
        assert (name, told) == ("look.at-it", {})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", _NAMED], ids=["required", "named"])
def test_a_call_is_made_and_follows_its_schema(client: openai.OpenAI, choice: Any, seed: int) -> None:
    answer = client.chat.completions.create(**_ASKED, seed=seed, tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or []
    _check(call.function.name, call.function.arguments)  # type: ignore[union-attr]
    if choice == _NAMED:
        assert call.function.name == "paint"  # type: ignore[union-attr]


def test_each_function_can_be_the_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**_ASKED, n=8, seed=0, tool_choice="required")
    called = {call.function.name for choice in answer.choices for call in choice.message.tool_calls or []}  # type: ignore[union-attr]
    assert called == {"paint", "look.at-it"}


@pytest.mark.parametrize("choice", ["required", _NAMED], ids=["required", "named"])
def test_a_stream_says_the_same(client: openai.OpenAI, choice: Any) -> None:
    whole = client.chat.completions.create(**_ASKED, seed=3, tool_choice=choice).choices[0].message.tool_calls
    chunks = list(client.chat.completions.create(**_ASKED, seed=3, tool_choice=choice, stream=True))
    opened, arguments = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert whole is not None
    assert arguments.function is not None
    assert opened.function.name == whole[0].function.name  # type: ignore[union-attr]
    assert (arguments.index, arguments.function.arguments) == (0, whole[0].function.arguments)  # type: ignore[union-attr]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_is_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**{**_ASKED, "max_tokens": 5}, tool_choice=_NAMED).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("length", None)
    assert answer.message.content == '{"nam'


@pytest.mark.parametrize(
    ("changed", "param", "told"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "not in tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
        ({"tool_choice": "always"}, "tool_choice", "required"),
        (
            {"tools": [*_TOOLS, {"type": "function", "function": {"name": "bad", "parameters": {"type": "string"}}}]},
            "tools",
            "bad cannot be used: arguments are an object",
        ),
        (
            {
                "tools": [
                    *_TOOLS,
                    {
                        "type": "function",
                        "function": {"name": "bad", "parameters": {"properties": {"x": {"type": "y"}}}},
                    },
                ]
            },
            "tools",
            "bad cannot be used: Invalid type: y",
        ),
    ],
    ids=["unknown function", "no tools", "unknown choice", "no object", "no schema"],
)
def test_what_cannot_be_held_to_is_refused(client: openai.OpenAI, changed: Any, param: str, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as refused:
        client.chat.completions.create(**{**_ASKED, "tool_choice": "required", **changed})
    assert refused.value.param == param


def test_without_llguidance_the_extra_is_named(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match=r"its extra structured") as refused:
        client.chat.completions.create(**_ASKED, tool_choice="required")
    assert refused.value.param == "tool_choice"
