from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvboost.serve.generation.answers import AnswerReader, AnswerReaders, BlankHolder
from kvboost.serve.generation.parts import CallArguments, CallOpened, Content, Reasoning
from kvboost.serve.generation.requests import Offer
from tests.helpers.tokenizer import byte_tokenizer

_TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
_F, _G = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', '<tool_call>{"name": "g"}</tool_call>'


def _readers(written: str = "<tool_call> <think>") -> AnswerReaders:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{# " + written + " #}"
    return AnswerReaders(tokenizer)


def _reader(*, prompt: str = "", tools: Any = _TOOLS, forced: Any = (), **settings: Any) -> AnswerReader:
    return _readers().make(prompt=prompt, offer=Offer(tools or (), dict.fromkeys(forced)), **settings)


def _told(reader: AnswerReader) -> tuple[str, str, list[tuple[str, Any]]]:
    return reader.reasoning, reader.content, [(call.name, json.loads(call.arguments)) for call in reader.calls]


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<think>\nHm.\n</think>\n\nSure.\n" + _F + "\n" + _G, ("Hm.", "Sure.", [("f", {"a": 1}), ("g", {})])),
        ("<think></think>\n\nSure. ", ("", "Sure. ", [])),
        (" Sure.\n", ("", " Sure.\n", [])),
        ("<think>" + _F, (_F, "", [])),
        ("<think>Hm.</think>" + '{"name": "f", "arguments": {}}', ("Hm.", "", [("f", {})])),
        ("One " + _F + " two " + _G + "\n", ("", "One two", [("f", {"a": 1}), ("g", {})])),
    ],
)
def test_an_answer_says_the_same_in_any_pieces(text: str, told: Any, step: int) -> None:
    reader = _reader()
    parts = [part for at in range(0, len(text), step) for part in reader.add(text[at : at + step])]
    parts += reader.end()
    assert _told(reader) == told
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == told[0]
    assert "".join(part.text for part in parts if isinstance(part, Content)) == told[1]
    assert all(part.text for part in parts if not isinstance(part, CallOpened)), "nothing is sent for nothing"


def test_a_call_is_given_as_soon_as_it_is_whole() -> None:
    reader = _reader()
    assert reader.add(_F[:-1]) == []
    opened, arguments = reader.add(_F[-1] + "<tool")
    assert isinstance(opened, CallOpened)
    assert (opened.index, opened.name) == (0, "f")
    assert re.fullmatch("[a-zA-Z0-9]{9}", opened.id), "Mistral's templates take no others"
    assert arguments == CallArguments(0, '{"a": 1}')
    second, _ = reader.add("_call>" + _G.removeprefix("<tool_call>"))
    assert isinstance(second, CallOpened)
    assert second.index == 1
    assert second.id != opened.id


def test_one_call_where_several_are_unwanted() -> None:
    reader = _reader(parallel=False)
    reader.add(_F + _G)
    reader.end()
    assert [call.name for call in reader.calls] == ["f"]


def test_what_follows_a_grammar_has_no_reasoning() -> None:
    prompt = "<assistant><think>"
    for settings in ({"constrained": True}, {"tools": None, "constrained": True}):
        reader = _reader(**{"prompt": prompt, **settings})
        reader.add('{"a": 1}')
        reader.end()
        assert _told(reader) == ("", '{"a": 1}', [])
    forced = _reader(prompt=prompt, forced=["f"])
    forced.add('{"name": "f", "arguments": {"a": 1}} and more')
    assert _told(forced) == ("", "", [("f", {"a": 1})])
    cut = _reader(prompt=prompt, forced=["f"])
    cut.add('{"name": "f", "argu')
    cut.end()
    assert _told(cut) == ("", '{"name": "f", "argu', [])


def test_without_marks_and_tools_text_is_as_it_was_written() -> None:
    reader = _readers("").make(prompt="", offer=Offer())
    assert reader.add(" <think>a</think> \n") == [Content(" <think>a</think> \n")]
    assert reader.end() == []


def test_arguments_that_are_no_text_are_escaped() -> None:
    reader = _reader()
    reader.add('<tool_call>{"name": "f", "arguments": {"a": "\\ud800", "b": "ü"}}</tool_call>')
    reader.add('<tool_call>{"name": "f", "arguments": {"b": "ü"}}</tool_call>')
    assert [call.arguments for call in reader.calls] == ['{"a": "\\ud800", "b": "\\u00fc"}', '{"b": "ü"}']


def test_special_tokens_are_needed_where_marks_are_such() -> None:
    assert not _readers().needs_special(tools=False)
    assert _readers().needs_special(tools=True)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    assert AnswerReaders(tokenizer).needs_special(tools=False)


def test_blanks_wait_for_other_text() -> None:
    holder = BlankHolder(drop_first=True)
    assert [holder.add(text) for text in (" \n", "\ta ", "\n", "b\n")] == ["", "a", "", " \nb"]
    assert holder.end() == "\n"
    assert BlankHolder().add(" a") == " a"
