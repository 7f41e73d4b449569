"""Conversations in Anthropic's shape as turns that chat templates take.

Called by /v1/messages. Invariant: the same conversation gives the same turns whatever a client adds to it per request,
so that the cache finds the conversation again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from kvboost.serve.generation.prompts import Turn
from kvboost.serve.schemas.messages import (
    Block,
    CountTokensRequest,
    InputMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

_BILLING = "x-anthropic-billing-header:"
"""Begins the line that Claude Code writes before its system prompt; a hash in it changes with every request."""


class _Content:
    """The text of one turn, and where its blocks mark a cut. Blocks are joined with a line break."""

    def __init__(self, content: str | Iterable[TextBlock] | None = None) -> None:
        self._texts: list[str] = []
        self._length = 0
        self.marks: list[int] = []
        for block in _as_blocks(content):
            self.add(block)

    def add(self, block: TextBlock) -> None:
        """One more block."""
        self._length += len(block.text) + bool(self._texts)
        self._texts.append(block.text)
        if block.cache_control is not None:
            self.mark()

    def mark(self) -> None:
        """A cut after what there is."""
        self.marks.append(self._length)

    def turn(self, role: str, **fields: Any) -> Turn:
        """A turn with this text."""
        return Turn({"role": role, "content": "\n".join(self._texts), **fields}, tuple(self.marks))

    def __bool__(self) -> bool:
        return bool(self._texts)


def to_turns(body: CountTokensRequest) -> list[Turn]:
    """The turns of a conversation. Messages of one role in a row are one turn, as at Anthropic."""
    turns: list[Turn] = []
    system = _Content(block for block in map(_without_billing, _as_blocks(body.system)) if block.text)
    if system:
        turns.append(system.turn("system"))
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for role, messages in groupby(body.messages, key=lambda message: message.role):
        blocks = [block for message in messages for block in _blocks_of(message)]
        turns += [_of_assistant(blocks, names)] if role == "assistant" else _of_user(role, blocks, names)
    return turns


def _of_assistant(blocks: Iterable[Block], names: dict[str, str]) -> Turn:
    content, thoughts = _Content(), []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            content.add(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
    fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts)
    return content.turn("assistant", **fields)


def _of_user(role: str, blocks: Iterable[Block], names: dict[str, str]) -> Iterator[Turn]:
    content = _Content()
    for block in blocks:
        if isinstance(block, TextBlock):
            content.add(block)
        elif isinstance(block, ToolResultBlock):
            if content:
                yield content.turn(role)
                content = _Content()
            result = _Content(block.content)
            if block.cache_control is not None:
                result.mark()
            named = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
            yield result.turn("tool", tool_call_id=block.tool_use_id, **named)
    if content:
        yield content.turn(role)


def _as_blocks(content: str | Iterable[TextBlock] | None) -> Iterable[TextBlock]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content or ()


def _blocks_of(message: InputMessage) -> Iterable[Block]:
    return message.content if isinstance(message.content, list) else _as_blocks(message.content)


def _without_billing(block: TextBlock) -> TextBlock:
    if not block.text.startswith(_BILLING):
        return block
    return block.model_copy(update={"text": block.text.partition("\n")[2]})
