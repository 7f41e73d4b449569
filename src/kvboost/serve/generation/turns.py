"""Conversations in the shapes of Anthropic and of /v1/responses as turns that chat templates take, and remembered ones.

Invariants: the same conversation gives the same turns whatever a client adds to it per request, so that the cache finds
the conversation again; of :class:`ResponseMemory` a tenant finds its own responses only, each tenant has a bounded
number of responses, and each and all together have a bounded number of bytes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from kvboost.serve.generation.prompts import Turn, join_parts, to_turn
from kvboost.serve.schemas.base import CalledFunction, Message, ToolCall
from kvboost.serve.schemas.messages import (
    Block,
    CountTokensRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from kvboost.serve.schemas.responses import FunctionCall, FunctionCallOutput, InputItem, InputMessage, ReasoningItem

B = TypeVar("B")
_MAX_RESPONSES = 1024
_MAX_BYTES = 16 * 2**20  # of one tenant
_Conversation = tuple[tuple[bytes, ...], int]
"""Its turns as JSON, and their size."""
_BILLING = "x-anthropic-billing-header:"
"""Begins the line that Claude Code writes before its system prompt; a hash in it changes with every request."""


def turns_of_messages(body: CountTokensRequest) -> list[Turn]:
    """The turns of a conversation. Messages of one role in a row are one turn, as at Anthropic."""
    system = [block for block in map(_without_billing, _as_blocks(body.system)) if block.text]
    turns = [_turn("system", system)] if system else []
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for role, messages in groupby(body.messages, key=lambda message: message.role):
        blocks: list[Block] = [block for message in messages for block in _as_blocks(message.content)]
        turns += (
            [_assistant_of_blocks(blocks, names)] if role == "assistant" else _others_of_blocks(role, blocks, names)
        )
    return turns


def _turn(role: str, blocks: Iterable[TextBlock], *, is_marked: bool = False, **fields: Any) -> Turn:
    """A turn with the text of these blocks, cut where they mark it, and if ``is_marked`` at its end."""
    text, _, marks = join_parts(blocks)
    return Turn({"role": role, "content": text, **fields}, (*marks, len(text)) if is_marked else tuple(marks))


def _assistant_of_blocks(blocks: Iterable[Block], names: dict[str, str]) -> Turn:
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


def _others_of_blocks(role: str, blocks: Iterable[Block], names: dict[str, str]) -> Iterator[Turn]:
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


def _as_blocks(content: str | Iterable[B] | None) -> Iterable[B | TextBlock]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content or ()


def _without_billing(block: TextBlock) -> TextBlock:
    if not block.text.startswith(_BILLING):
        return block
    return block.model_copy(update={"text": block.text.partition("\n")[2]})


def turns_of_items(items: str | Iterable[InputItem]) -> list[Turn]:
    """The turns of a conversation. What an assistant thought, said and called in a row is one turn."""
    if isinstance(items, str):
        return [Turn({"role": "user", "content": items})]
    turns: list[Turn] = []
    for of_assistant, group in groupby(items, key=_is_of_assistant):
        found = list(group)
        turns += [_assistant_of_items(found)] if of_assistant else [_other_of_item(item) for item in found]
    return turns


def _is_of_assistant(item: InputItem) -> bool:
    return isinstance(item, FunctionCall | ReasoningItem) or (
        isinstance(item, InputMessage) and item.role == "assistant"
    )


def _assistant_of_items(items: Iterable[InputItem]) -> Turn:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for item in items:
        if isinstance(item, ReasoningItem):
            thoughts += [part.text for part in item.content or item.summary]
        elif isinstance(item, FunctionCall):
            calls.append(ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments)))
        elif isinstance(item, InputMessage):
            texts += [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
    turn = to_turn(Message(role="assistant", content="\n".join(texts), tool_calls=calls or None), param="input")
    return Turn({**turn.fields, "reasoning_content": "\n".join(thoughts)}) if thoughts else turn


def _other_of_item(item: InputItem) -> Turn:
    if isinstance(item, FunctionCallOutput):
        return to_turn(Message(role="tool", content=_content(item.output), tool_call_id=item.call_id))
    assert isinstance(item, InputMessage)
    return to_turn(Message(role=item.role, content=_content(item.content)))


def _content(parts: str | Sequence[Any]) -> Any:
    return parts if isinstance(parts, str) else list(parts)


class ResponseMemory:
    """The conversations that ended with a response, by tenant and id; drops the oldest. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` are for all tenants together; beyond them, who has most loses the oldest."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tenants: defaultdict[str, _Kept] = defaultdict(_Kept)

    def remember(self, response: str, turns: Sequence[Turn], *, tenant: str) -> None:
        """Keep the conversation up to this response, the response included."""
        # As bytes they take what is counted; as objects they would take several times that.
        written = tuple(_written(turn) for turn in turns)
        size = sys.getsizeof(written) + sum(map(sys.getsizeof, written))
        with self._lock:
            kept = self._tenants[tenant]
            kept.conversations[response] = (written, size)
            kept.bytes += size
            while len(kept.conversations) > _MAX_RESPONSES or kept.bytes > _MAX_BYTES:
                kept.drop_oldest()
            while sum(other.bytes for other in self._tenants.values()) > self._max_bytes:
                name, most = max(self._tenants.items(), key=lambda other: other[1].bytes)
                most.drop_oldest()
                if not most.conversations:
                    del self._tenants[name]

    def find(self, response: str, *, tenant: str) -> Sequence[Turn] | None:
        """The conversation that ended with this response; None if it is not remembered."""
        found = self._find(response, tenant)
        return [_read(turn) for turn in found[0]] if found is not None else None

    def nbytes(self, response: str, *, tenant: str) -> int:
        """How large that conversation is; 0 if it is not remembered."""
        found = self._find(response, tenant)
        return found[1] if found is not None else 0

    def forget(self, tenant: str) -> None:
        """Forget all of a tenant's."""
        with self._lock:
            self._tenants.pop(tenant, None)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._tenants.clear()

    def _find(self, response: str, tenant: str) -> _Conversation | None:
        with self._lock:  # a tenant that only asks leaves no entry
            return self._tenants[tenant].conversations.get(response) if tenant in self._tenants else None


def _written(turn: Turn) -> bytes:
    return json.dumps([turn.fields, turn.marks, turn.ends], ensure_ascii=False).encode(errors="surrogatepass")


def _read(written: bytes) -> Turn:
    fields, marks, ends = json.loads(written.decode(errors="surrogatepass"))
    return Turn(fields, tuple(marks), tuple(ends))


class _Kept:
    """What one tenant has."""

    def __init__(self) -> None:
        self.conversations: OrderedDict[str, _Conversation] = OrderedDict()
        self.bytes = 0

    def drop_oldest(self) -> None:
        """Forget one."""
        _, (_, size) = self.conversations.popitem(last=False)
        self.bytes -= size
