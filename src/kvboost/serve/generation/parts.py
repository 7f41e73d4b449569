"""What an answer is made of: reasoning, text and tool calls; reasoning and text separated.

Made by the readers of answers, written by each endpoint in its own shape. Models that reason write
``<think>...</think>`` first; the templates of some open it in the prompt. Invariant: text that does not begin with
``<think>`` is all answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OPENS, CLOSES = "<think>", "</think>"


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
