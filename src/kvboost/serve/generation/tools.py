"""Tool calls out of a model's text.

Used by chats with tools. Where the tokenizer says how its model writes them (``response_template``), Transformers'
own parser reads them; otherwise the chat template shows the format. Invariant: text that is not a whole and
valid call is given to the client as text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from typing import Any

from kvboost.serve.generation.text import StopCutter

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_XML_FUNCTION = re.compile(r"<function=([^>\s]+)>\s*(.*?)\s*</function>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MISTRAL_CALL = re.compile(r"\s*([a-zA-Z0-9_.-]+)(?:\[CALL_ID\][a-zA-Z0-9]+)?\[ARGS\]")
_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # the templates of Mistral refuse a chat in which an id has another length or other characters
_Calls = list[tuple[str, dict[str, Any]]]


class ToolReader:
    """Reads one answer: text goes through until a call may begin, then everything waits for the end."""

    def __init__(self, *, opens: str | None, read: Any, json_alone: bool = False, wait: bool = False) -> None:
        self._cutter = StopCutter([opens] if opens else [])
        self._read = read
        self._json_alone = json_alone
        self._text = ""
        self._given = ""
        self._looked_at = 0
        self._wait = wait

    def add(self, text: str) -> str:
        """What is certainly not part of a call."""
        self._text += text
        if self._wait or (self._json_alone and self._text.lstrip()[:1] in ("", "{", "[")):
            return ""
        fresh, self._looked_at = self._text[self._looked_at :], len(self._text)
        piece = self._cutter.add(fresh)
        self._given += piece
        return piece

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text, and the calls in OpenAI's shape."""
        content, calls = self._read(self._text)
        if not calls:
            return self._text[len(self._given) :], []
        rest = content[len(self._given) :] if content.startswith(self._given) else ""
        return rest, [_openai_call(name, arguments) for name, arguments in calls]


def make_forced_reader() -> ToolReader:
    """The reader of an answer that was held to one call; only one that was cut off is text."""
    return ToolReader(opens=None, read=read_forced, wait=True)


def make_reader(tokenizer: Any, *, prompt: str, tools: list[dict[str, Any]]) -> ToolReader:
    """The reader for the way this tokenizer's model writes calls."""
    if getattr(tokenizer, "response_template", None) is not None:
        return ToolReader(opens=None, read=lambda text: _by_transformers(tokenizer, text, prompt, tools), wait=True)
    names = {tool["function"]["name"] for tool in tools}
    written = json.dumps(getattr(tokenizer, "chat_template", None) or "")
    if "<tool_call>" in written:
        return ToolReader(opens="<tool_call>", read=lambda text: _known(read_hermes(text), names))
    if "[TOOL_CALLS]" in written:
        return ToolReader(opens="[TOOL_CALLS]", read=lambda text: _known(read_mistral(text), names))
    return ToolReader(opens="<|python_tag|>", read=lambda text: _known(read_llama(text), names), json_alone=True)


def _known(found: tuple[str, _Calls], names: set[str]) -> tuple[str, _Calls]:
    """Nothing if a call is of a function that the client does not have."""
    content, calls = found
    return (content, calls) if all(name in names for name, _ in calls) else (content, [])


def _openai_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH)),
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def _by_transformers(tokenizer: Any, text: str, prompt: str, tools: list[dict[str, Any]]) -> tuple[str, _Calls]:
    try:
        message = tokenizer.parse_response(text, prefix=prompt, tools=tools)
    except (ValueError, TypeError, KeyError):  # what the parser says of text that is not as its template has it
        return text, []
    calls: _Calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        calls.append((str(function["name"]), dict(function.get("arguments") or {})))
    return str(message.get("content") or ""), calls


def read_forced(text: str) -> tuple[str, _Calls]:
    """``{"name", "arguments"}`` at the beginning, as ``Grammars.compile_call`` has it."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return text, []
    call = _as_call(value, "arguments")
    return ("", [call]) if call is not None else (text, [])


def read_hermes(text: str) -> tuple[str, _Calls]:
    """``<tool_call>{"name", "arguments"}</tool_call>`` (Hermes, Qwen2.5, Qwen3), or with XML inside (Qwen3-Coder)."""
    content, opening, _ = text.partition("<tool_call>")
    calls: _Calls = []
    for match in _HERMES.finditer(text) if opening else ():
        inner = match[1]
        if function := _XML_FUNCTION.search(inner):
            calls.append((function[1], {name: _value(value) for name, value in _XML_PARAMETER.findall(function[2])}))
            continue
        call = _json_call(inner, "arguments")
        if call is None:
            return text, []
        calls.append(call)
    return content, calls


def read_llama(text: str) -> tuple[str, _Calls]:
    """``{"name", "parameters"}``, alone or behind ``<|python_tag|>``, several with ``;`` between (Llama 3)."""
    head, tag, body = text.partition("<|python_tag|>")
    content, body = (head, body) if tag else ("", text)
    decoder = json.JSONDecoder()
    calls: _Calls = []
    body = body.strip()
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            return text, []
        written = isinstance(value, dict) and "parameters" in value
        call = _as_call(value, "parameters" if written else "arguments")
        if call is None:
            return text, []
        calls.append(call)
        body = body[end:].lstrip(" \n;,")
    return content, calls


def read_mistral(text: str) -> tuple[str, _Calls]:
    """``[TOOL_CALLS][{"name", "arguments"}, ...]`` or, newer, ``[TOOL_CALLS]name[ARGS]{...}`` for each."""
    content, opening, body = text.partition("[TOOL_CALLS]")
    if not opening:
        return text, []
    calls: _Calls = []
    decoder = json.JSONDecoder()
    if body.lstrip().startswith("["):
        try:
            values, _ = decoder.raw_decode(body.lstrip())
        except (ValueError, RecursionError):
            return text, []
        found = [_as_call(value, "arguments") for value in values]
        return (content, [call for call in found if call is not None]) if None not in found else (text, [])
    while body.strip():
        match = _MISTRAL_CALL.match(body)
        name, rest = (match[1], body[match.end() :]) if match else ("", "")
        if match is None and (brace := body.find("{")) > 0:  # between the two: the name, then its arguments
            name, rest = body[:brace].strip(), body[brace:]
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return text, []
        if not isinstance(value, dict):
            return text, []
        calls.append((name, value))
        body = rest[end:].strip().removeprefix("[TOOL_CALLS]")
    return content, calls


def _json_call(text: str, arguments: str) -> tuple[str, dict[str, Any]] | None:
    try:
        return _as_call(json.loads(text), arguments)
    except (ValueError, RecursionError):
        return None


def _as_call(value: Any, arguments: str) -> tuple[str, dict[str, Any]] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {})
    if isinstance(given, str):  # some models write the arguments as text
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return (value["name"], given) if isinstance(given, dict) else None


def _value(text: str) -> Any:
    """An XML parameter: JSON where it is JSON, else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
