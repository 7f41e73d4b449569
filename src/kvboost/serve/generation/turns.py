"""Conversations in the shapes of all endpoints as turns that chat templates take, and remembered ones.

Invariants: the same conversation gives the same turns whatever a client adds to it per request, so that the cache finds
the conversation again; of a :class:`TenantMemory` a tenant finds its own only, and each tenant and all together have a
bounded number of bytes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

from kvboost.serve.errors import bad_request
from kvboost.serve.schemas.base import CacheControl, CalledFunction, Function, Message, TextPart, ToolCall
from kvboost.serve.schemas.messages import (
    Block,
    CountTokensRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from kvboost.serve.schemas.responses import (
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputItem,
    InputMessage,
    ReasoningItem,
)
from kvboost.serve.security.bodies import check_size
from kvboost.serve.security.limits import Limits

B = TypeVar("B")
V = TypeVar("V")
_MAX_RESPONSES = 1024
_MAX_BYTES = 16 * 2**20  # of one tenant
_BILLING = "x-anthropic-billing-header:"
"""Begins the line that Claude Code writes before its system prompt; a hash in it changes with every request."""


@dataclass(frozen=True)
class Turn:
    """A message as templates take it, and where its parts mark a cut or end (characters of its content)."""

    fields: dict[str, Any]
    marks: tuple[tuple[int, int], ...] = ()
    """With the seconds for which what lies before them is to be held."""
    ends: tuple[int, ...] = ()

    @property
    def content(self) -> str:
        """The text of the message."""
        return str(self.fields.get("content") or "")

    @property
    def reasoning(self) -> str:
        """What an assistant wrote to itself before it."""
        return str(self.fields.get("reasoning_content") or "")


def as_function(function: Function | FunctionTool) -> dict[str, Any]:
    """A tool as templates take it. Its schema is not copied: how deep that goes is checked where it is offered."""
    given = {name: getattr(function, name) for name in Function.model_fields}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def to_turn(message: Message, *, param: str = "messages") -> Turn:
    """A client's message as templates take it; ``param`` is the field it came in."""
    if isinstance(message.content, list):
        content, ends, marks = join_parts(message.content)
    else:
        content, ends, marks = message.content or "", [], []
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": content}
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, param=param)},
            }
            for call in message.tool_calls
        ]
    return Turn(fields, tuple(marks), tuple(ends))


def join_parts(parts: Iterable[TextPart | TextBlock]) -> tuple[str, list[int], list[tuple[int, int]]]:
    """The text of several parts, joined with line breaks; where each ends in it, and the marks of some."""
    text = ""
    ends: list[int] = []
    marks: list[tuple[int, int]] = []
    for index, part in enumerate(parts):
        text += part.text if index == 0 else "\n" + part.text
        ends.append(len(text))
        if part.cache_control is not None:
            marks.append((len(text), part.cache_control.seconds))
    return text, ends, marks


def check_arguments(texts: Iterable[str], limits: Limits, *, param: str) -> None:
    """Refuse arguments of earlier calls that take long to parse, all of a request together."""
    # A text with a string left open hides those behind it. None of them is parsed: it comes first, and is no JSON.
    joined = ",".join(texts).encode()
    check_size(joined, limits, what="the arguments of earlier tool calls have", status=400, param=param)


def _arguments(text: str, *, param: str) -> dict[str, Any]:
    """Templates write arguments from an object; clients send them as text."""
    try:
        value = json.loads(text or "{}")  # what some clients send for no arguments
        json.dumps(value, ensure_ascii=False).encode()  # halves of surrogate pairs are no text
    except (ValueError, RecursionError) as error:
        raise bad_request("the arguments of an earlier tool call are no JSON", param=param) from error
    if not isinstance(value, dict):
        raise bad_request("the arguments of an earlier tool call are no JSON object", param=param)
    return value


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


def _turn(role: str, blocks: Iterable[TextBlock], *, mark: CacheControl | None = None, **fields: Any) -> Turn:
    """A turn with the text of these blocks, cut where they mark it, and with a ``mark`` at its end."""
    text, _, marks = join_parts(blocks)
    if mark is not None:
        marks.append((len(text), mark.seconds))
    return Turn({"role": role, "content": text, **fields}, tuple(marks))


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
            result = _as_blocks(block.content)
            yield _turn("tool", result, mark=block.cache_control, tool_call_id=block.tool_use_id, **named)
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


class TenantMemory(Generic[V]):
    """What tenants may find again by a key, within bounds. Thread-safe."""

    def __init__(self, max_bytes: int, *, most: int | None = None, each: int | None = None) -> None:
        """``max_bytes`` are for all tenants together; beyond them, who has most loses the oldest.

        One tenant has ``most`` entries and ``each`` bytes at most.
        """
        self._max_bytes, self._most, self._each = max_bytes, most or sys.maxsize, each or max_bytes
        self._lock = threading.Lock()
        self._tenants: defaultdict[str, OrderedDict[Hashable, tuple[V, int]]] = defaultdict(OrderedDict)
        self._bytes: Counter[str] = Counter()

    def keep(self, tenant: str, keys: Iterable[Hashable], value: V, nbytes: int) -> None:
        """Keep a value under each of these keys, of which each counts ``nbytes``."""
        with self._lock:
            own = self._tenants[tenant]
            for key in keys:
                _, before = own.pop(key, (value, 0))
                own[key] = value, nbytes
                self._bytes[tenant] += nbytes - before
            while len(own) > self._most or self._bytes[tenant] > self._each:
                self._drop_oldest(tenant)
            while self._bytes.total() > self._max_bytes:
                self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def look_up(self, tenant: str, keys: Iterable[Hashable], *, renew: bool = False) -> tuple[V, int] | None:
        """The value under the first of these keys that has one, and its bytes; ``renew``: it is the newest now."""
        with self._lock:
            own = self._tenants.get(tenant)  # a tenant that only asks leaves no entry
            for key in keys if own is not None else ():
                if own is not None and key in own:
                    if renew:
                        own.move_to_end(key)
                    return own[key]
        return None

    def forget(self, tenant: str) -> None:
        """Forget all of a tenant's."""
        with self._lock:
            self._tenants.pop(tenant, None)
            self._bytes.pop(tenant, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._tenants.clear()
            self._bytes.clear()

    def _drop_oldest(self, tenant: str) -> None:
        own = self._tenants[tenant]
        _, (_, nbytes) = own.popitem(last=False)
        self._bytes[tenant] -= nbytes
        if not own:
            del self._tenants[tenant], self._bytes[tenant]


class ResponseMemory(TenantMemory[tuple[bytes, ...]]):
    """The conversations that ended with a response, by tenant and id: their turns as JSON."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, most=_MAX_RESPONSES, each=_MAX_BYTES)

    def remember(self, response: str, turns: Sequence[Turn], *, tenant: str) -> None:
        """Keep the conversation up to this response, the response included."""
        # As bytes they take what is counted; as objects they would take several times that.
        written = tuple(_written(turn) for turn in turns)
        self.keep(tenant, [response], written, sys.getsizeof(written) + sum(map(sys.getsizeof, written)))

    def find(self, response: str, *, tenant: str) -> Sequence[Turn] | None:
        """The conversation that ended with this response; None if it is not remembered."""
        found = self.look_up(tenant, [response])
        return [_read(turn) for turn in found[0]] if found is not None else None

    def nbytes(self, response: str, *, tenant: str) -> int:
        """How large that conversation is; 0 if it is not remembered."""
        found = self.look_up(tenant, [response])
        return found[1] if found is not None else 0


def _written(turn: Turn) -> bytes:
    return json.dumps([turn.fields, turn.marks, turn.ends], ensure_ascii=False).encode(errors="surrogatepass")


def _read(written: bytes) -> Turn:
    fields, marks, ends = json.loads(written.decode(errors="surrogatepass"))
    return Turn(fields, tuple((place, seconds) for place, seconds in marks), tuple(ends))
