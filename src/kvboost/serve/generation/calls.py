"""Calls in the ways models write them: from a piece of text to names and arguments.

Used by :mod:`kvboost.serve.generation.tools`. Invariant: the time is linear in the length of the text, whatever a model
was made to write.
"""

from __future__ import annotations

import json
import re
from typing import Any

from kvboost.serve.generation.parts import Call

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MARKS = re.compile(r'["\\{}\[\]]')


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
