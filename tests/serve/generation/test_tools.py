"""The outputs here are written after the formats that the models' documentation describes, not captured from models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.serve.generation.parts import Call, Content, Reasoning
from kvboost.serve.generation.tools import ToolReader, make_tool_reader
from tests.helpers.runner import Recorded
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


def _tokenizer(written: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{# " + written + " #}{% if tools %}{{ tools | tojson }}{% endif %}"
    return tokenizer


def _read(reader: ToolReader, text: str, step: int = 1000) -> tuple[str, list[Any]]:
    found = [part for at in range(0, len(text), step) for part in reader.add(text[at : at + step])]
    found += reader.end()
    assert not any(isinstance(part, Reasoning) for part in found)
    return (
        "".join(part.text for part in found if isinstance(part, Content)),
        [(part.name, part.arguments) for part in found if isinstance(part, Call)],
    )


def _reader(marker: str) -> ToolReader:
    return make_tool_reader(_tokenizer(marker), prompt="", tools=[_WEATHER])


_ROME = ("get_weather", {"city": "Rome"})
_ZURICH = ("get_weather", {"city": "Zürich", "days": 3})


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("marker", "text", "content", "calls"),
    [
        ("<tool_call>", _HERMES, "", [_PARIS]),
        ("<tool_call>", _QWEN_TWO, "I will look both up.\n\n", [_PARIS, _ZURICH]),
        ("<tool_call>", _QWEN_CODER, "", [("get_weather", {"city": "Paris", "days": 3})]),
        ("<tool_call>", _HERMES.removesuffix("\n</tool_call>"), "", [_PARIS]),
        ("<tool_call>", _HERMES + "Done.", "Done.", [_PARIS]),
        ("[TOOL_CALLS]", "Wait. " + _MISTRAL, "Wait. ", [_PARIS]),
        ("[TOOL_CALLS]", _MISTRAL_NEW, "", [_PARIS, _ROME]),
        ("python_tag", _LLAMA, "", [_PARIS]),
        ("python_tag", "  " + _LLAMA_TAGGED, "  ", [_PARIS]),
        ("python_tag", _LLAMA_TWO, "", [_PARIS, _ROME]),
        ("python_tag", _LLAMA_TAGGED + ";" + _LLAMA.replace("Paris", "Rome"), "", [_PARIS, _ROME]),
    ],
)
def test_calls_in_the_format_of_the_template(marker: str, text: str, content: str, calls: Any, step: int) -> None:
    assert _read(_reader(marker), text, step) == (content, calls)


_BARE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("marker", ["<tool_call>", "[TOOL_CALLS]", "python_tag"])
def test_a_call_without_its_marks_is_one_if_it_is_the_whole_answer(marker: str, step: int) -> None:
    assert _read(_reader(marker), " " + _BARE + "\n", step)[1] == [_PARIS]
    for fenced in ("```json\n" + _BARE + "\n```", "\n```\n" + _BARE + "```\n"):  # as Qwen2.5-Coder-0.5B writes them
        assert _read(_reader(marker), fenced, step) == ("", [_PARIS])


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        _BARE + " is how to call it.",
        "Call " + _BARE,
        _BARE + _BARE,
        _BARE[:-1],
        _BARE.replace("get_weather", "delete_everything"),
        '{"name": "get_weather"}',
        '{"name": "get_weather", "arguments": [1]}',
        '{"temperature": 21}',
        "```json\n" + _BARE + "\n```\nis how to call it.",
        '```json\n{"temperature": 21}\n```',
        "```python\n" + _BARE + "\n```",
        "`" + _BARE + "`",
        "``",
        "```json",
    ],
)
def test_what_only_looks_like_a_call_without_marks_is_text(text: str, step: int) -> None:
    assert _read(_reader("<tool_call>"), text, step) == (text, [])


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("marker", "text"),
    [
        ("<tool_call>", "Nothing to call."),
        ("<tool_call>", '<tool_call>\n{"name": "get_weather", "argum'),
        ("<tool_call>", '<tool_call>{"name": 3, "arguments": {}}</tool_call> so'),
        ("<tool_call>", _HERMES.replace("get_weather", "delete_everything")),
        ("python_tag", '{"city": "Paris"}'),
        ("python_tag", _LLAMA[:-3]),
        ("python_tag", "<|python_tag|>print(1)"),
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name"'),
        ("[TOOL_CALLS]", "[TOOL_CALLS]get_weather[ARGS]"),
        ("[TOOL_CALLS]", "[TOOL_CALLS] [[1]]"),
    ],
)
def test_what_is_not_a_whole_call_of_an_offered_tool_is_text(marker: str, text: str, step: int) -> None:
    assert _read(_reader(marker), text, step) == (text, [])


def _hostile(size: int) -> dict[str, tuple[str, str]]:
    """Markers of formats, and answers of about ``size`` characters that are slow to read for who reads them again."""
    return {
        "blanks in a call": ("<tool_call>", "<tool_call>" + " " * size),
        "blanks alone": ("<tool_call>", " " * size),
        "blanks in a fence": ("<tool_call>", "```json" + " " * size),
        "openings": ("<tool_call>", "<tool_call>" * (size // 11)),
        "functions": ("<tool_call>", "<tool_call>" + "<function=a>" * (size // 12)),
        "parameters": ("<tool_call>", "<tool_call><function=a>" + "<parameter=a>" * (size // 13) + "</function>"),
        "halves": ("<tool_call>", "<tool_cal" * (size // 9)),
        "empty calls": ("<tool_call>", "<tool_call></tool_call>" * (size // 23)),
        "braces": ("python_tag", "{" * size),
        "quotes": ("python_tag", '{"' + '\\"' * (size // 2)),
        "objects": ("python_tag", '{"name":"get_weather","parameters":{}};' * (size // 39)),
        "brackets": ("[TOOL_CALLS]", "[TOOL_CALLS][" + "[" * size),
        "names": ("[TOOL_CALLS]", "[TOOL_CALLS]a" * (size // 13)),
    }


def _parsed(**marks: str) -> Any:
    """A tokenizer that says how its model writes calls."""
    tokenizer = _tokenizer("")
    function = {"name": "{content.name}", "arguments": "{content.arguments}"}
    calls = {"repeats": True, "content": "json", "transform": {"type": "function", "function": function}, **marks}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<assistant>",
        "fields": {"content": {}, "tool_calls": calls},
    }
    return tokenizer


def _seconds(reader: ToolReader, text: str) -> float:
    started = time.process_time()
    for at in range(0, len(text), 8):
        reader.add(text[at : at + 8])
    reader.end()
    return time.process_time() - started


@pytest.mark.parametrize("hostile", _hostile(0))
def test_an_answer_of_a_million_characters_is_read_in_linear_time(hostile: str) -> None:
    marker, text = _hostile(10**6)[hostile]
    assert _seconds(_reader(marker), text) < 8.0  # a second; to search all of it anew at each token takes 30


@pytest.mark.parametrize(
    "marks",
    [
        {"open": "<tool_call>", "close": "</tool_call>"},
        {"open_pattern": r"<tool_call>\s*", "close": "</tool_call>"},
    ],
    ids=["marks", "patterns"],
)
@pytest.mark.parametrize("hostile", _hostile(0))
def test_and_by_transformers_parser(hostile: str, marks: dict[str, str]) -> None:
    text = _hostile(200_000)[hostile][1].replace("[TOOL_CALLS]", "<tool_call>")
    reader = make_tool_reader(_parsed(**marks), prompt="<assistant>", tools=[_WEATHER])
    assert _seconds(reader, text) < 5.0  # half a second; to search all of it anew at each token takes 14


def test_transformers_own_parser_is_used_where_the_tokenizer_has_one() -> None:
    tokenizer = _parsed(open="<call>", close="</call>")
    call = '<call>{"name": "get_weather", "arguments": {"city": "Paris"}}</call>'
    for step in (1, 1000):
        reader = make_tool_reader(tokenizer, prompt="<assistant>", tools=[_WEATHER])
        assert _read(reader, "Let me see." + call + call, step) == ("Let me see.", [_PARIS, _PARIS])
    early = make_tool_reader(tokenizer, prompt="<assistant>", tools=[_WEATHER])
    assert [part for part in early.add(call) if isinstance(part, Call)], "before the answer has ended"
    for broken in (call.replace('"}}', '"'), call.replace("get_weather", "delete_everything")):
        reader = make_tool_reader(tokenizer, prompt="<assistant>", tools=[_WEATHER])
        content, calls = _read(reader, broken + "More.")
        assert calls == []
        assert "Paris" in content
        assert content.endswith("More.")


def test_the_official_client_gets_calls_and_gives_results(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    engine = make_engine()
    engine.tokenizer = _tokenizer("<tool_call>")
    engine.parts.encoder._tokenizer = engine.tokenizer
    runner = Recorded(engine.tokenizer, _QWEN_TWO)
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
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [call.index for call in deltas] == [0, 0, 1, 1]
        for opened, arguments in (deltas[:2], deltas[2:]):
            assert (opened.type, opened.function.name, opened.function.arguments) == ("function", "get_weather", "")  # type: ignore[union-attr]
            assert opened.id
            assert (arguments.id, arguments.type, arguments.function.name) == (None, None, None)  # type: ignore[union-attr]
            assert json.loads(arguments.function.arguments)  # type: ignore[union-attr,arg-type]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I will look both up."
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        with client.chat.completions.stream(**asked) as stream:  # the client's own bookkeeping agrees
            collected = stream.get_final_completion().choices[0].message.tool_calls or []
        assert [json.loads(call.function.arguments) for call in collected] == [_PARIS[1], _ZURICH[1]]
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
