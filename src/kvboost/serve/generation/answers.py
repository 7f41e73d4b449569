"""One answer as it comes, in parts: reasoning, text, tool calls.

Made by an endpoint for each choice of a chat: ``reader = readers.make(prompt=..., offer=...)``, then ``add`` for every
piece of text and ``end``; what was read so far is in ``reasoning``, ``content`` and ``calls``. Invariant: the parts do
not depend on how the text was cut into pieces, so a stream and a whole answer say the same.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from kvboost.serve.generation.parts import (
    Call,
    CallArguments,
    CallOpened,
    Content,
    Found,
    Part,
    Reasoning,
    ReasoningSplitter,
    hides_reasoning,
    opened_in,
    writes_reasoning,
)
from kvboost.serve.generation.requests import Answer, Offer
from kvboost.serve.generation.token_stream import Ended
from kvboost.serve.generation.tools import ForcedReader, ToolReader, make_tool_reader, parses_reasoning

_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # the templates of Mistral refuse a chat in which an id has another length or other characters


@dataclass(frozen=True)
class AnsweredCall:
    """A call as clients get it."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


class AnswerReaders:
    """Makes the readers of answers that one tokenizer's model writes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._parsed = parses_reasoning(tokenizer)
        self._reasons = not self._parsed and writes_reasoning(tokenizer)
        self._special = self._parsed or (self._reasons and hides_reasoning(tokenizer))

    def needs_special(self, *, tools: bool) -> bool:
        """Whether special tokens have to be written out: reasoning and calls may be recognised by them."""
        return tools or self._special

    def make(
        self, *, prompt: str, offer: Offer, constrained: bool = False, parallel: bool | None = None
    ) -> AnswerReader:
        """The reader of one answer to ``prompt``, which makes this ``offer``.

        ``constrained`` for one that follows a grammar: there is no reasoning then, nor where a call is forced. If
        ``parallel`` is False, only the first call counts.
        """
        if offer.forced:
            return AnswerReader(tools=ForcedReader())
        if constrained:
            return AnswerReader()
        tools = list(offer.tools)
        reader = make_tool_reader(self._tokenizer, prompt=prompt, tools=tools) if tools or self._parsed else None
        splitter = ReasoningSplitter(inside=opened_in(prompt)) if self._reasons else None
        return AnswerReader(splitter=splitter, tools=reader, max_calls=1 if parallel is False else None)


class BlankHolder:
    """Holds back blanks until other text follows, so that those at an end can be dropped."""

    def __init__(self, *, drop_first: bool = False) -> None:
        self.drop_first = drop_first
        """Whether blanks before the first other text are dropped."""
        self._begun = False
        self._blanks: list[str] = []

    def add(self, text: str) -> str:
        """The text up to its last character that is no blank."""
        body = text.rstrip()
        if not body:
            self._blanks.append(text)
            return ""
        before = self.end()
        if not self._begun and self.drop_first:
            before, body = "", body.lstrip()
        self._begun = True
        self._blanks.append(text[len(text.rstrip()) :])
        return before + body

    def end(self) -> str:
        """The blanks that were held back."""
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks


class AnswerReader:
    """Reads one answer."""

    def __init__(
        self,
        *,
        splitter: ReasoningSplitter | None = None,
        tools: ToolReader | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._splitter, self._tools, self._max_calls = splitter, tools, max_calls
        self._thinking, self._saying = BlankHolder(drop_first=True), BlankHolder()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.calls: list[AnsweredCall] = []

    @property
    def reasoning(self) -> str:
        """What the model wrote to itself."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """The text of the answer."""
        return "".join(self._content)

    def add(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        if self._splitter is None:
            return self._parts(self._read(text))
        return self._split(self._splitter.add(text))

    def end(self) -> list[Part]:
        """The rest."""
        parts = self._split(self._splitter.end()) if self._splitter is not None else []
        parts += self._parts(self._tools.end() if self._tools is not None else [])
        blanks = self._saying.end()
        return parts if self.calls else parts + self._said(blanks)

    def _split(self, found: Iterable[Found]) -> list[Part]:
        parts: list[Part] = []
        for one in found:
            parts += self._parts(self._read(one.text) if isinstance(one, Content) else [one])
        return parts

    def _read(self, text: str) -> list[Found]:
        if self._tools is not None:
            return self._tools.add(text)
        return [Content(text)] if text else []

    def _parts(self, found: Iterable[Found]) -> list[Part]:
        parts: list[Part] = []
        for one in found:
            if isinstance(one, Call):
                parts += self._called(one)
            elif isinstance(one, Reasoning):
                text = self._thinking.add(one.text)
                self._saying.drop_first = True
                self._reasoning.append(text)
                parts += [Reasoning(text)] if text else []
            else:
                parts += self._said(self._trimmed(one.text))
        return parts

    def _trimmed(self, text: str) -> str:
        """Text without the blanks around it where a call or reasoning may be next to it."""
        if self._splitter is None and self._tools is None:
            return text
        self._saying.drop_first |= self._splitter is not None and self._splitter.opened
        return self._saying.add(text)

    def _said(self, text: str) -> list[Part]:
        self._content.append(text)
        return [Content(text)] if text else []

    def _called(self, call: Call) -> list[Part]:
        self._saying.end()
        if self._max_calls is not None and len(self.calls) >= self._max_calls:
            return []
        id_ = "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))
        arguments = _written(call.arguments)
        index = len(self.calls)
        self.calls.append(AnsweredCall(id_, call.name, arguments))
        return [CallOpened(index, id_, call.name), CallArguments(index, arguments)]


def _written(arguments: dict[str, Any]) -> str:
    """JSON as people read it; in ASCII where it holds half of a surrogate pair, which no response can carry."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text


async def answer_parts(answer: Answer, reader: AnswerReader) -> AsyncIterator[Part | Ended]:
    """The parts, then the end."""
    async for event in answer.events():
        for part in reader.end() if isinstance(event, Ended) else reader.add(event.text):
            yield part
        if isinstance(event, Ended):
            yield event
