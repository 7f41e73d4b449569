"""Conversations in Anthropic's shape as turns that chat templates take.

Called by /v1/messages. Invariant: the same conversation gives the same turns whatever a client adds to it per request,
so that the cache finds the conversation again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from kvboost.serve.generation.prompts import Turn, join_parts
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


def to_turns(body: CountTokensRequest) -> list[Turn]:
    """The turns of a conversation. Messages of one role in a row are one turn, as at Anthropic."""
    system = [block for block in map(_without_billing, _as_blocks(body.system)) if block.text]
    turns = [_turn("system", system)] if system else []
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for role, messages in groupby(body.messages, key=lambda message: message.role):
        blocks = [block for message in messages for block in _blocks_of(message)]
        turns += [_of_assistant(blocks, names)] if role == "assistant" else _of_user(role, blocks, names)
    return turns


def _turn(role: str, blocks: Iterable[TextBlock], *, is_marked: bool = False, **fields: Any) -> Turn:
    """A turn with the text of these blocks, cut where they mark it, and if ``is_marked`` at its end."""
    text, _, marks = join_parts(blocks)
    return Turn({"role": role, "content": text, **fields}, (*marks, len(text)) if is_marked else tuple(marks))


def _of_assistant(blocks: Iterable[Block], names: dict[str, str]) -> Turn:
    said: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            said.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
    fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts)
    return _turn("assistant", said, **fields)


def _of_user(role: str, blocks: Iterable[Block], names: dict[str, str]) -> Iterator[Turn]:
    said: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            said.append(block)
        elif isinstance(block, ToolResultBlock):
            if said:
                yield _turn(role, said)
                said = []
            named = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
            is_marked = block.cache_control is not None
            result = _as_blocks(block.content)
            yield _turn("tool", result, is_marked=is_marked, tool_call_id=block.tool_use_id, **named)
    if said:
        yield _turn(role, said)


def _as_blocks(content: str | Iterable[TextBlock] | None) -> Iterable[TextBlock]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content or ()


def _blocks_of(message: InputMessage) -> Iterable[Block]:
    return message.content if isinstance(message.content, list) else _as_blocks(message.content)


def _without_billing(block: TextBlock) -> TextBlock:
    if not block.text.startswith(_BILLING):
        return block
    return block.model_copy(update={"text": block.text.partition("\n")[2]})
