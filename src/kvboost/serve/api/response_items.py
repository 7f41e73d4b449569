"""The output items of one response, and the events that tell how they grow.

Used by /v1/responses. Invariant: one item is open at a time, and each is closed by the event that gives it whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from kvboost.serve.generation.parts import CallArguments, CallOpened, Part, Reasoning
from kvboost.serve.schemas.responses import InputItem

Event = tuple[str, dict[str, Any]]
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class ItemEvents:
    """Writes parts of an answer as items and events."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        """The items so far. The last one is open until the next begins."""

    def as_input(self) -> list[InputItem]:
        """The items as a client would send them back."""
        return _ITEMS.validate_python(self.output)

    def add(self, part: Part) -> Iterator[Event]:
        """The events of the next part."""
        if isinstance(part, CallOpened):
            yield from self._begin("fc_", type="function_call", call_id=part.id, name=part.name, arguments="")
        elif isinstance(part, CallArguments):
            self.output[-1]["arguments"] += part.text
            yield "response.function_call_arguments.delta", {**self._where(), "delta": part.text}
        elif isinstance(part, Reasoning):
            if not self._is_open("reasoning"):
                yield from self._begin("rs_", type="reasoning", summary=[], content=[])
                yield from self._begin_part({"type": "reasoning_text", "text": ""})
            yield self._grown(part.text, "response.reasoning_text.delta")
        else:
            yield from self._said(part.text)

    def end(self, status: str) -> Iterator[Event]:
        """The end of the last item. A response without any gets an empty message: clients look at the first."""
        if not self.output:
            yield from self._said("")
        yield from self._close(status)

    def _said(self, text: str) -> Iterator[Event]:
        if not self._is_open("message"):
            yield from self._begin("msg_", type="message", role="assistant", content=[])
            yield from self._begin_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        if text:
            name, fields = self._grown(text, "response.output_text.delta")
            yield name, {**fields, "logprobs": []}

    def _is_open(self, kind: str) -> bool:
        return bool(self.output) and self.output[-1]["type"] == kind and self.output[-1]["status"] == "in_progress"

    def _begin(self, prefix: str, **fields: Any) -> Iterator[Event]:
        yield from self._close("completed")
        self.output.append({"id": prefix + secrets.token_hex(12), **fields, "status": "in_progress"})
        yield "response.output_item.added", {"output_index": self._index, "item": dict(self.output[-1])}

    def _begin_part(self, part: dict[str, Any]) -> Iterator[Event]:
        yield "response.content_part.added", {**self._where(), "content_index": 0, "part": dict(part)}
        self.output[-1]["content"] = [part]

    def _grown(self, text: str, name: str) -> Event:
        self.output[-1]["content"][0]["text"] += text
        return name, {**self._where(), "content_index": 0, "delta": text}

    def _close(self, status: str) -> Iterator[Event]:
        """The whole of the open item, if there is one."""
        if not self.output or self.output[-1]["status"] != "in_progress":
            return
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._where(), **whole}
        else:
            (part,) = item["content"]
            name = "response.reasoning_text.done" if item["type"] == "reasoning" else "response.output_text.done"
            logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield name, {**self._where(), "content_index": 0, "text": part["text"], **logprobs}
            yield "response.content_part.done", {**self._where(), "content_index": 0, "part": part}
        yield "response.output_item.done", {"output_index": self._index, "item": item}

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": self._index}
