from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import openai
import pytest
import torch

from kvboost import ConfigError
from kvboost.engine.structured import Matchers
from kvboost.serve.errors import ApiError
from kvboost.serve.generation.structured import COMPILE_S, TOO_LONG, GrammarCheck, Grammars
from kvboost.serve.schemas.responses import InlineSchemaFormat
from kvboost.serve.security.limits import Limits
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.conftest import OTHER_KEY, Running

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
        ({"$ref": "#"}, "invalid_schema"),
        ({"$ref": "http://example.org/schema"}, "invalid_schema"),
        ({"type": "string", "description": "\ud800"}, None),
    ],
    ids=["deep", "large", "type", "pattern", "self", "ref", "surrogate"],
)
def test_schemas_that_cannot_be_used_are_refused(keyed: Running, schema: dict[str, Any], code: str | None) -> None:
    body = json.dumps({**_ASKED, "response_format": _format(schema)})
    with keyed.http() as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "response_format"
    assert answer.json()["error"]["code"] == code


# Each was measured with llguidance 1.9 and 128,000 tokens, on one core and within the limit of bytes.
_SLOW_TO_COMPILE = {
    "a step for every remainder": {"type": "integer", "multipleOf": 999_983},  # minutes
    "every pair is compared": {"patternProperties": {f"^k{n}_[a-z]*$": {"type": "null"} for n in range(400)}},  # 56 s
    "all at once": {"allOf": [{"type": "string", "pattern": f".*{c}.*{c}.*{c}.*"} for c in "abcdefghijklmnopqrstuv"]},
}
_COSTLY_TO_FOLLOW = {"allOf": [{"type": "string", "pattern": f"^(.{{{n}}})*$"} for n in (7, 11, 13, 17, 19, 23, 29)]}


def _token_gaps(running: Running, *, until: Callable[[], bool]) -> list[float]:
    """Seconds between the tokens of answers to another key, one after the other."""
    gaps = []
    with running.openai(OTHER_KEY) as client:
        while not until():
            last = time.monotonic()
            for _ in client.completions.create(model="tiny", prompt="on and on", max_tokens=60, stream=True):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
    return gaps


@pytest.mark.parametrize("schema", [*_SLOW_TO_COMPILE.values(), _COSTLY_TO_FOLLOW], ids=[*_SLOW_TO_COMPILE, "masks"])
def test_a_hostile_schema_is_refused_and_others_go_on(keyed: Running, schema: dict[str, Any]) -> None:
    worst = []
    # A busy machine delays a token now and then; a compiler on the model's thread does so each time.
    for attempt in range(4):
        with keyed.http() as http, ThreadPoolExecutor(1) as pool:
            body = {**_ASKED, "response_format": _format({**schema, "description": f"attempt {attempt}"})}
            asked = pool.submit(http.post, "/v1/chat/completions", json=body)
            gaps = _token_gaps(keyed, until=asked.done)
            answer = asked.result()
        assert answer.status_code == 400, answer.text
        assert "simplify" in answer.json()["error"]["message"]
        worst.append(max(gaps, default=0.0))
        if worst[-1] < 1.0:
            return
    raise AssertionError(f"tokens were as late as {worst} s")


def test_tools_that_take_long_to_compile_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 128 tools by itself may take nearly as long as all may."""
    tried: list[str] = []

    def checked(check: GrammarCheck, grammar: str, *, within: float) -> str:
        tried.append(grammar)
        return TOO_LONG if len(tried) == 1 else ""

    monkeypatch.setattr(GrammarCheck, "check", checked)
    grammars = Grammars(Matchers(byte_tokenizer(), vocab_size=260, end_token_ids=frozenset()))
    with pytest.raises(ApiError, match="these tools cannot be used: compiling it takes more than 3 s"):
        grammars.compile_call({"first": None, "second": None})
    assert len(tried) == 1


def test_the_tool_that_cannot_be_used_is_looked_for_no_longer_than_one_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = {"properties": {"x": {"type": "integer", "multipleOf": 29_989}}}  # not slow enough to be refused
    tools = {f"slow {number}": slow for number in range(40)}
    wrong = {"properties": {"x": {"type": "string", "pattern": "("}}}
    spent, check = list[float](), GrammarCheck.check

    def timed(self: GrammarCheck, grammar: str, *, within: float) -> str:
        began = time.monotonic()
        try:
            return check(self, grammar, within=within)
        finally:
            spent.append(time.monotonic() - began)

    monkeypatch.setattr(GrammarCheck, "check", timed)
    with closing(Grammars(Matchers(byte_tokenizer(), vocab_size=260, end_token_ids=frozenset()))) as grammars:
        with pytest.raises(ApiError, match="the parameters of wrong cannot be used: .*regex parse error"):
            grammars.compile_call({"fine": None, "wrong": wrong})
        spent.clear()
        with pytest.raises(ApiError, match="these tools cannot be used"):
            grammars.compile_call({**tools, "wrong": wrong})
    assert len(spent) > 1, "none was looked at alone"
    assert sum(spent) < 2.5 * COMPILE_S


def test_the_tokens_are_read_before_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    with closing(Grammars(Matchers(byte_tokenizer(), vocab_size=260, end_token_ids=frozenset()))) as grammars:
        grammars.prepare()
        _wait_until(lambda: grammars._matchers._made is not None)
    with closing(Grammars(Matchers("no tokenizer", vocab_size=260, end_token_ids=frozenset()))) as grammars:
        grammars.prepare()
        _wait_until(lambda: "answers cannot follow schemas with this tokenizer: ValueError" in caplog.text)


def _wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def _compiled(schema: dict[str, Any]) -> Any:
    wanted = InlineSchemaFormat.model_validate({"type": "json_schema", "name": "x", "schema": schema})
    ends = frozenset({int(byte_tokenizer().eos_token_id)})
    grammars = Grammars(Matchers(byte_tokenizer(), vocab_size=260, end_token_ids=ends))
    try:
        make = grammars.compile(wanted, limits=Limits(), param="x")
    finally:
        grammars.close()
    assert make is not None
    return make()


def test_a_grammar_that_fails_on_the_way_is_no_answer() -> None:
    held = _compiled({"type": "object"})
    held([], torch.zeros(260))
    with pytest.raises(ConfigError, match="the grammar cannot go on"):
        held([int(byte_tokenizer()("x")["input_ids"][0])], torch.zeros(260))  # an object never begins so


def test_a_grammar_that_fails_within_a_mask_is_no_answer() -> None:
    """The mask that meets a limit allows the end alone."""
    many = "|".join(f"a{{0,{length}}}b" for length in range(6000))
    held = _compiled({"type": "string", "pattern": f"({many})"})
    held([], torch.zeros(260))
    quote = int(byte_tokenizer()('"')["input_ids"][0])
    with pytest.raises(ConfigError, match="the grammar cannot go on: lexer error"):
        held([quote], torch.zeros(260))


def test_the_time_of_a_grammar_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held = _compiled({"type": "string"})
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.03  # a mask that takes long
        return now

    monkeypatch.setattr("kvboost.serve.generation.structured.thread_time", clock)
    ids = [int(token) for token in byte_tokenizer()('"xxx')["input_ids"]][:4]
    for taken in range(3):
        held(ids[:taken], torch.zeros(260))
    with pytest.raises(ConfigError, match="simplify the schema"):
        held(ids[:3], torch.zeros(260))
