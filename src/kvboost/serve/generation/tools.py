"""Tool calls out of a model's text, as it comes.

Used by :mod:`kvboost.serve.generation.answers`. Where the tokenizer says how its model writes calls
(``response_template``), Transformers' own parser reads them; otherwise the chat template shows the format. Invariants:
a call is given as soon as it is whole; text that is not a whole call of an offered tool is given as text; each
character is looked at a bounded number of times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set
from typing import Any

from kvboost.serve.generation.parts import (
    Call,
    Content,
    Found,
    JsonSpan,
    Reasoning,
    TagFinder,
    as_call,
    read_alone,
    read_mistral,
    read_object,
    read_tagged,
)

_BLANKS = " \t\r\n"
_FENCE = re.compile(r"```(?:json)?\s{0,4}(?=\{)")
_HALF_FENCE = re.compile(r"`{1,2}|```(?:j|js|jso|json)?\s{0,4}")
_REASONING_FIELDS = frozenset({"thinking", "reasoning", "reasoning_content"})
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)
"""What Transformers' parser raises for text that is not as its template has it."""
_ALWAYS_FED = 256  # characters that it may be undecided on while every piece is fed to it
_Read = Callable[[str], list[Call]]


def make_tool_reader(tokenizer: Any, *, prompt: str, tools: list[dict[str, Any]]) -> ToolReader:
    """The reader for the way this tokenizer's model writes calls."""
    names = {str(tool["function"]["name"]) for tool in tools}
    if getattr(tokenizer, "response_template", None) is not None:
        return ParserReader(tokenizer.get_response_parser(prefix=prompt, tools=tools), names)
    written = json.dumps(getattr(tokenizer, "chat_template", None) or "")
    if "<tool_call>" in written:
        return FormatReader("<tool_call>", lambda: _Tagged("<tool_call>", "</tool_call>", read_tagged), names)
    if "[TOOL_CALLS]" in written:
        return FormatReader("[TOOL_CALLS]", lambda: _Braced("[TOOL_CALLS]", read_mistral), names)
    tag = "<|python_tag|>"
    return FormatReader(tag, lambda: _Braced(tag, read_object), names, bare=read_object, between=";,")


def parses_reasoning(tokenizer: Any) -> bool:
    """Whether Transformers' parser tells this model's reasoning from its text."""
    template = getattr(tokenizer, "response_template", None)
    fields = template.get("fields", {}) if isinstance(template, dict) else {}
    return bool(_REASONING_FIELDS & set(fields))


class _Tagged:
    """Ends with a tag, or with the answer."""

    def __init__(self, opens: str, closes: str, read: _Read) -> None:
        self._opens, self._closes, self._read = opens, closes, read
        self._finder = TagFinder(closes)
        self._pieces: list[str] = []
        self._closed = False

    def add(self, text: str) -> str | None:
        """Take what belongs to it; what follows it, once it is over."""
        before, rest = self._finder.add(text)
        self._pieces.append(before)
        self._closed = rest is not None
        return rest

    def calls(self) -> list[Call]:
        """Those that it holds, if it ends here; none if it is text."""
        self._pieces.append(self._finder.end())
        return self._read("".join(self._pieces))

    @property
    def text(self) -> str:
        return "".join([self._opens, *self._pieces, self._closes if self._closed else ""])


class _Braced:
    """Ends with the JSON that is in it."""

    def __init__(self, opens: str, read: _Read) -> None:
        self._opens, self._read = opens, read
        self._span = JsonSpan()
        self._pieces: list[str] = []
        self._closed = False

    def add(self, text: str) -> str | None:
        end = self._span.end_in(text)
        self._pieces.append(text[:end])
        self._closed = end is not None
        return text[end:] if self._closed else None

    def calls(self) -> list[Call]:
        return self._read("".join(self._pieces)) if self._closed else []

    @property
    def text(self) -> str:
        return "".join([self._opens, *self._pieces])


_Section = _Tagged | _Braced
"""Text that may be calls, from its opening to its end."""


class FormatReader:
    """Reads calls that a tag opens, and those without one.

    Without a tag the whole answer has to be one call, be it fenced as code, unless ``bare`` says how the format writes
    them; then several may follow each other, with characters of ``between`` among them.
    """

    def __init__(
        self,
        opens: str,
        section: Callable[[], _Section],
        names: Set[str],
        *,
        bare: _Read | None = None,
        between: str = "",
    ) -> None:
        self._make, self._names, self._bare = section, names, bare
        self._blanks = _BLANKS
        self._between = _BLANKS + between
        self._finder = TagFinder(opens)
        self._section: _Section | None = None
        self._must_be_all = False  # the section is a call only if nothing else is in the answer
        self._fresh = True  # only blanks so far, or since the last call
        self._held: list[str] = []
        self._half_fence = ""
        self._alone: tuple[str, list[Call]] | None = None

    def add(self, text: str) -> list[Found]:
        """What is certain now."""
        found: list[Found] = []
        while text:
            if self._section is not None:
                rest = self._section.add(text)
                if rest is not None:
                    found += self._close(self._section)
            elif self._fresh:
                rest = self._begin(text, found)
            else:
                before, rest = self._finder.add(text)
                found += _text(before)
                if rest is not None:
                    self._section, self._must_be_all = self._make(), False
            text = rest or ""
        return found

    def end(self) -> list[Found]:
        """The rest."""
        found: list[Found] = []
        if self._section is not None:
            found += self._close(self._section)
        if self._alone is not None:
            return [*found, *self._alone[1]]
        return [*found, *_text("".join([*self._held, self._half_fence, self._finder.end()]))]

    def _begin(self, text: str, found: list[Found]) -> str:
        """Pass over blanks; what follows them is a call without a tag, or text."""
        if self._half_fence:
            start = self._half_fence + text
        else:
            start = text.lstrip(self._blanks)
            self._held.append(text[: len(text) - len(start)])
        self._half_fence = start if self._alone is None and _HALF_FENCE.fullmatch(start) else ""
        if not start or self._half_fence:
            return ""
        self._fresh = False
        held = "".join(self._held)
        self._held.clear()
        fence = _FENCE.match(start)
        if self._alone is not None:  # more than a call: it was no call
            found += _text(self._alone[0] + held)
            self._alone = None
        elif fence is not None:
            self._section, self._must_be_all = _Braced(held + fence[0], read_alone), True
            self._blanks += "`"
            return start[fence.end() :]
        elif start[0] == "{":
            self._section, self._must_be_all = _Braced(held, self._bare or read_alone), self._bare is None
        else:
            found += _text(held)
        return start

    def _close(self, section: _Section) -> list[Found]:
        self._section = None
        calls = section.calls()
        if not calls or any(call.name not in self._names for call in calls):
            return _text(section.text)
        self._fresh = True
        if self._must_be_all:
            self._alone = (section.text, calls)
            return []
        self._blanks = self._between
        return list(calls)


class ForcedReader:
    """Reads an answer that was held to one call; only one that was cut off is text. What follows it is dropped."""

    def __init__(self) -> None:
        self._section = _Braced("", read_object)
        self._over = False

    def add(self, text: str) -> list[Found]:
        """The call, once it is whole."""
        if self._over or self._section.add(text) is None:
            return []
        self._over = True
        return list(self._section.calls()) or _text(self._section.text)

    def end(self) -> list[Found]:
        """What was cut off."""
        return [] if self._over else _text(self._section.text)


class ParserReader:
    """Reads with Transformers' parser. What that cannot read is text, and so is all that follows."""

    def __init__(self, parser: Any, names: Set[str]) -> None:
        self._parser, self._names = parser, names
        self._open: list[str] = []  # of the call that is being written
        self._held: list[str] = []  # not fed yet
        self._held_length = 0
        self._quiet = 0  # characters fed since the parser last said anything
        self._failed = False

    def add(self, text: str) -> list[Found]:
        """What is certain now."""
        if self._failed:
            return _text(text)
        self._held.append(text)
        self._held_length += len(text)
        # At each feed the parser searches all that it has not decided on: the more that is, the more has to come.
        if self._held_length * 4 < self._quiet - _ALWAYS_FED:
            return []
        return self._feed()

    def end(self) -> list[Found]:
        """The rest."""
        found = self._feed() if self._held else []
        if self._failed:
            return found
        try:
            _, events = self._parser.finalize()
        except _UNREADABLE:
            return [*found, *_text("".join(self._open))]
        return [*found, *self._found(events)]

    def _feed(self) -> list[Found]:
        text = "".join(self._held)
        self._held.clear()
        self._held_length = 0
        try:
            events = self._parser.feed(text)
        except _UNREADABLE:
            self._failed = True
            return _text("".join(self._open) + text)
        self._quiet = 0 if events else self._quiet + len(text)
        return self._found(events)

    def _found(self, events: list[dict[str, Any]]) -> list[Found]:
        found: list[Found] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if field == "tool_calls":
                if kind == "region_chunk":
                    self._open.append(event["text"])
                elif kind == "region_close":
                    found += self._calls(event["value"])
            elif kind == "region_chunk" and field in _REASONING_FIELDS:
                found.append(Reasoning(event["text"]))
            elif kind == "region_chunk" and field == "content":
                found += _text(event["text"])
        return found

    def _calls(self, value: Any) -> list[Found]:
        written = "".join(self._open)
        self._open.clear()
        values = value if isinstance(value, list) else [value]
        calls = [as_call(one.get("function", one)) if isinstance(one, dict) else None for one in values]
        known = [call for call in calls if call is not None and call.name in self._names]
        return list(known) if known and len(known) == len(calls) else _text(written)


def _text(text: str) -> list[Found]:
    return [Content(text)] if text else []


ToolReader = FormatReader | ForcedReader | ParserReader
"""Reads one answer."""
