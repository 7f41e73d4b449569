"""What an answer is made of: reasoning, text and tool calls. Reasoning told from text, calls read in models' own ways.

Made by the readers of answers, written by each endpoint in its own shape. Models that reason write
``<think>...</think>`` first; the templates of some open it in the prompt. Invariants: text that does not begin with
``<think>`` is all answer; a call is read in a time linear in the length of its text, whatever a model was made
to write.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

OPENS, CLOSES = "<think>", "</think>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MARKS = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True)
class Reasoning:
    """More of what the model wrote to itself before its answer."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class Call:
    """A whole call of a tool, as the model wrote it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CallOpened:
    """A call is known: its number in the answer, its id and its function. The arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of a call, as JSON."""

    index: int
    text: str


Found = Reasoning | Content | Call
Part = Reasoning | Content | CallOpened | CallArguments


def writes_reasoning(tokenizer: Any) -> bool:
    """Whether the model behind this tokenizer marks its reasoning."""
    template = json.dumps(getattr(tokenizer, "chat_template", None) or "")
    return OPENS in template or CLOSES in template or CLOSES in _added_tokens(tokenizer)


def hides_reasoning(tokenizer: Any) -> bool:
    """Whether the marks are special tokens, which are left out of text unless they are asked for."""
    return CLOSES in getattr(tokenizer, "all_special_tokens", ())


def opened_in(prompt: str) -> bool:
    """Whether the answer to this prompt begins inside the reasoning."""
    return prompt.rstrip().endswith(OPENS)


def _added_tokens(tokenizer: Any) -> Any:
    added = getattr(tokenizer, "get_added_vocab", None)
    return added() if added is not None else ()


class TagFinder:
    """Looks for a tag in text as it comes, and holds back what may be the beginning of it."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """The text that is certain to be before the tag, and what follows it: None until it was found."""
        before, found, rest = (self._held + text).partition(self._tag)
        if found:
            self._held = ""
            return before, rest
        cut = len(before) - overlap(before, self._tag)
        self._held = before[cut:]
        return before[:cut], None

    def end(self) -> str:
        """What was held back, if no tag came of it."""
        piece, self._held = self._held, ""
        return piece


class ReasoningSplitter:
    """Splits one answer as it comes."""

    def __init__(self, *, inside: bool) -> None:
        self.opened = inside
        """Whether there is reasoning, be it empty."""
        self._closed = False
        self._finder = TagFinder(CLOSES)
        self._blanks: list[str] = []
        self._start = ""  # the first characters that are no blanks: fewer than ``OPENS`` has

    def add(self, text: str) -> list[Reasoning | Content]:
        """What is certain now."""
        if self._closed:
            return [Content(text)] if text else []
        if not self.opened:
            return self._begin(text)
        reasoning, rest = self._finder.add(text)
        self._closed = rest is not None
        found: list[Reasoning | Content] = [Reasoning(reasoning)] if reasoning else []
        return found + self.add(rest or "") if self._closed else found

    def end(self) -> list[Reasoning | Content]:
        """What was held back. Reasoning that was never closed stays reasoning."""
        if self.opened:
            held = self._finder.end()
            return [Reasoning(held)] if held else []
        rest = "" if self._closed else "".join([*self._blanks, self._start])
        return [Content(rest)] if rest else []

    def _begin(self, text: str) -> list[Reasoning | Content]:
        if not self._start:
            word = text.lstrip()
            self._blanks.append(text[: len(text) - len(word)])
            text = word
        self._start += text
        if len(self._start) < len(OPENS) and OPENS.startswith(self._start):
            return []
        if self._start.startswith(OPENS):
            self.opened = True
            return self.add(self._start[len(OPENS) :])
        self._closed = True
        return self.add("".join([*self._blanks, self._start]))


def overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of ``text`` that ``stop`` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class JsonSpan:
    """Finds the end of a JSON object or array as it comes. What precedes its first bracket is passed over.

    A text that begins with ``[`` is an array; in any other the first ``{`` counts.
    """

    def __init__(self) -> None:
        self._brackets = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_in(self, text: str) -> int | None:
        """Where in this piece it ends; None if it goes on."""
        if not self._brackets:
            start = text.lstrip()[:1]
            self._brackets = "" if not start else "[]" if start == "[" else "{}"
        position = int(self._escaped)
        self._escaped = False
        while (mark := _MARKS.search(text, position)) is not None:
            position = mark.end()
            if self._in_string:
                if mark[0] == "\\":
                    position += 1
                    self._escaped = position > len(text)
                self._in_string = mark[0] != '"'
            elif mark[0] == '"':
                self._in_string = self._depth > 0
            elif mark[0] in self._brackets:
                self._depth += 1 if mark[0] == self._brackets[0] else -1
                if self._depth <= 0:
                    return position
        return None


def read_tagged(body: str) -> list[Call]:
    """``{"name", "arguments"}`` (Hermes, Qwen2.5, Qwen3), or XML (Qwen3-Coder). None are found in anything else."""
    body = body.strip()
    call = as_call(load(body)) if body.startswith("{") else _xml_call(body)
    return [call] if call is not None else []


def read_object(body: str) -> list[Call]:
    """``{"name", "parameters"}`` (Llama 3) or ``{"name", "arguments"}``."""
    call = as_call(load(body))
    return [call] if call is not None else []


def read_alone(body: str) -> list[Call]:
    """A call without the marks of its format: its arguments have to be there, or any object with a name were one."""
    value = load(body)
    inner = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(inner, dict) or not {"arguments", "parameters"} & inner.keys():
        return []
    call = as_call(inner)
    return [call] if call is not None else []


def read_mistral(body: str) -> list[Call]:
    """``[{"name", "arguments"}, ...]`` or, newer, ``name[ARGS]{...}``; between the two, ``name{...}``."""
    if body.lstrip().startswith("["):
        values = load(body)
        found = [as_call(value) for value in values] if isinstance(values, list) else []
        return [] if None in found else [call for call in found if call is not None]
    head, brace, rest = body.partition("{")
    name = head.partition("[")[0].strip()
    arguments = load(brace + rest)
    return [Call(name, arguments)] if isinstance(arguments, dict) else []


def as_call(value: Any) -> Call | None:
    """A call out of ``{"name", "arguments"}``, or ``parameters`` instead."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):  # some models write the arguments as text
        given = load(given)
    return Call(value["name"], given) if isinstance(given, dict) else None


def load(text: str) -> Any:
    """The value of a JSON text; None for anything else, and for numbers that JSON does not have."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _xml_call(body: str) -> Call | None:
    """``<function=name><parameter=name>value</parameter>...</function>``."""
    _, opening, rest = body.partition(_FUNCTION)
    name, named, rest = rest.partition(">")
    inner, closing, _ = rest.partition(_FUNCTION_END)
    if not (opening and named and closing):
        return None
    arguments: dict[str, Any] = {}
    at = inner.find(_PARAMETER)
    while at >= 0:
        name_end = inner.find(">", at)
        end = inner.find(_PARAMETER_END, name_end)
        if name_end < 0 or end < 0:
            return None
        value = inner[name_end + 1 : end].removeprefix("\n").removesuffix("\n")
        arguments[inner[at + len(_PARAMETER) : name_end].strip()] = _value(value)
        at = inner.find(_PARAMETER, end)
    return Call(name.strip(), arguments)


def _value(text: str) -> Any:
    """An XML parameter: JSON where it is JSON, else text."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text
