"""The outputs here are written after the formats that the models' documentation describes, not captured from models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.scheduler.jobs import Finished, Job, NewToken, RunnerLoad
from kvboost.serve.generation.tools import make_reader, read_hermes, read_llama, read_mistral
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.conftest import Running

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
_PARIS = ("get_weather", {"city": "Paris"})

_HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
_QWEN_TWO = (
    "I will look both up.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'
)
_QWEN_CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
_LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
_LLAMA_TAGGED = '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}'
_LLAMA_TWO = _LLAMA + "; " + '{"name": "get_weather", "parameters": {"city": "Rome"}}'
_MISTRAL = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]'
_MISTRAL_NEW = (
    '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_weather[CALL_ID]9cAbCdEfG[ARGS]{"city": "Rome"}'
)


@pytest.mark.parametrize(
    ("read", "text", "content", "calls"),
    [
        (read_hermes, _HERMES, "", [_PARIS]),
        (read_hermes, _QWEN_TWO, "I will look both up.\n", [_PARIS, ("get_weather", {"city": "Zürich", "days": 3})]),
        (read_hermes, _QWEN_CODER, "", [("get_weather", {"city": "Paris", "days": 3})]),
        (read_hermes, _HERMES.removesuffix("\n</tool_call>"), "", [_PARIS]),
        (read_llama, _LLAMA, "", [_PARIS]),
        (read_llama, _LLAMA_TAGGED, "", [_PARIS]),
        (read_llama, _LLAMA_TWO, "", [_PARIS, ("get_weather", {"city": "Rome"})]),
        (read_mistral, _MISTRAL, "", [_PARIS]),
        (read_mistral, _MISTRAL_NEW, "", [_PARIS, ("get_weather", {"city": "Rome"})]),
        (read_mistral, '[TOOL_CALLS]get_weather{"city": "Paris"}', "", [_PARIS]),
    ],
)
def test_recorded_calls(read: Any, text: str, content: str, calls: Any) -> None:
    assert read(text) == (content, calls)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_hermes, "Nothing to call."),
        (read_hermes, '<tool_call>\n{"name": "get_weather", "argum'),
        (read_hermes, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        (read_hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (read_llama, '{"city": "Paris"}'),
        (read_llama, _LLAMA[:-3]),
        (read_llama, "{" * 2000),
        (read_mistral, '[TOOL_CALLS] [{"name"'),
        (read_mistral, "[TOOL_CALLS]get_weather[ARGS]"),
        (read_mistral, "[TOOL_CALLS] [[1]]"),
    ],
)
def test_what_is_not_a_whole_call_is_text(read: Any, text: str) -> None:
    assert read(text)[1] == []


def _tokenizer(written: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{# " + written + " #}{% if tools %}{{ tools | tojson }}{% endif %}"
    return tokenizer


@pytest.mark.parametrize(
    ("marker", "text", "shown"),
    [
        ("<tool_call>", _QWEN_TWO, "I will look both up.\n"),
        ("[TOOL_CALLS]", "Wait. " + _MISTRAL, "Wait. "),
        ("python_tag", _LLAMA, ""),
        ("python_tag", "  " + _LLAMA_TAGGED, "  "),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stream_shows_text_and_holds_calls_back(marker: str, text: str, shown: str, step: int) -> None:
    reader = make_reader(_tokenizer(marker), prompt="", tools=[_WEATHER])
    seen = "".join(reader.add(text[at : at + step]) for at in range(0, len(text), step))
    rest, calls = reader.end()
    assert seen + rest == shown
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Paris"}
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in ids), "Mistral's templates take no others"


def test_calls_of_functions_nobody_has_are_text() -> None:
    reader = make_reader(_tokenizer("<tool_call>"), prompt="", tools=[_WEATHER])
    text = _HERMES.replace("get_weather", "delete_everything")
    assert reader.add(text) + reader.end()[0] == text
    assert reader.end()[1] == []


def test_transformers_own_parser_is_used_where_the_tokenizer_has_one() -> None:
    tokenizer = _tokenizer("")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<assistant>",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
                },
            },
        },
    }
    reader = make_reader(tokenizer, prompt="<assistant>", tools=[_WEATHER])
    reader.add('Let me see.<call>{"name": "get_weather", "arguments": {"city": "Paris"}}</call>')
    rest, calls = reader.end()
    assert rest == "Let me see."
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [_PARIS]


class _Recorded:
    """A runner that answers every job with a text recorded before: a random model calls no tools."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._ids = tokenizer(text)["input_ids"]
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> Any:
        self.jobs.append(job)
        return self

    def events(self) -> Any:
        yield from (NewToken(token) for token in self._ids)
        yield NewToken(2)
        yield Finished("stop", None)

    def cancel(self) -> None: ...

    def load(self) -> RunnerLoad:
        return RunnerLoad(0, 0, 0)

    def close(self) -> None: ...


def test_the_official_client_gets_calls_and_gives_results(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    engine = make_engine()
    engine.tokenizer = _tokenizer("<tool_call>")
    engine.parts.encoder._tokenizer = engine.tokenizer
    runner = _Recorded(engine.tokenizer, _QWEN_TWO)
    running = start_server(engine, runner=runner)
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [_WEATHER],
    }
    with running.openai("no key is needed") as client:
        answer = client.chat.completions.create(**asked)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I will look both up."
        assert [call.function.name for call in choice.message.tool_calls or []] == ["get_weather"] * 2  # type: ignore[union-attr]
        assert "get_weather" in engine.tokenizer.decode(list(runner.jobs[-1].token_ids)), (
            "the template was given the tools"
        )
        chunks = list(client.chat.completions.create(**asked, stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [call.index for call in calls] == [0, 1]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        one = client.chat.completions.create(**asked, parallel_tool_calls=False)
        assert len(one.choices[0].message.tool_calls or []) == 1
        none = client.chat.completions.create(**asked, tool_choice="none")
        assert none.choices[0].finish_reason == "stop"
        assert none.choices[0].message.content == _QWEN_TWO
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"}  # type: ignore[index]
        client.chat.completions.create(
            model="tiny",
            tools=[_WEATHER],
            messages=[*asked["messages"], choice.message.model_dump(exclude_none=True), result],  # type: ignore[list-item]
        )
        assert "rain" in engine.tokenizer.decode(list(runner.jobs[-1].token_ids))
