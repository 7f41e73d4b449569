"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface, for coding agents above all.

Invariant: a whole answer is put together from the events of its stream, so both say the same.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.responses import JSONResponse, Response

from kvboost.serve.api.chat import encode_turns
from kvboost.serve.api.common import AppCaller, AppService, streamed, unread, with_ignored
from kvboost.serve.errors import ApiError, bad_request
from kvboost.serve.generation.answers import AnswerReader, answer_parts
from kvboost.serve.generation.parts import CallArguments, CallOpened, Part, Reasoning
from kvboost.serve.generation.prompts import ChatPrompt, effort_variables
from kvboost.serve.generation.requests import (
    Answer,
    Choice,
    GenerationRequest,
    Offer,
    drawn_by,
    make_offer,
)
from kvboost.serve.generation.service import Service
from kvboost.serve.generation.token_stream import Ended
from kvboost.serve.generation.turns import as_function, turns_of_messages
from kvboost.serve.schemas.base import Function
from kvboost.serve.schemas.messages import CountTokensRequest, CustomTool, MessagesRequest
from kvboost.serve.schemas.responses import InlineSchemaFormat
from kvboost.serve.security.auth import Caller

_PATH = "/v1/messages"
_CHOICES: dict[str, Choice] = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
_Event = tuple[str, dict[str, Any]]


async def messages(service: AppService, body: MessagesRequest, caller: AppCaller) -> Response:
    """Answer a conversation, whole or as a stream."""
    if body.messages[-1].role == "assistant":
        raise bad_request("the last message is the assistant's, which this server does not continue; end with a user's")
    offer, prompt = await _read(service, body, caller)
    grammar = await service.grammar(_format(body), offer=offer, param="output_config", tenant=caller.tenant)
    parallel = body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use
    reader = service.answers.make(prompt=prompt.text, offer=offer, constrained=grammar is not None, parallel=parallel)
    generation = GenerationRequest(
        endpoint="messages",
        prompts=[(prompt.token_ids, prompt.boundaries)],
        caller=caller,
        max_new_tokens=None,
        default_new_tokens=body.max_tokens,  # every client must name one, and most name more than a model has
        prompt_param="messages",
        model=body.model,
        sampling=drawn_by(body, top_k=body.top_k or 0),
        stops=body.stop_sequences or (),
        grammar=grammar,
        special=grammar is None and service.answers.needs_special(tools=bool(offer.tools)),
        holds=prompt.holds,
    )
    writing = _MessageWriter(service, prompt, reader)
    ignored = [*body.ignored(), *unread(service.chats, _variables(body))]
    events = writing.stream(generation)
    answer = await (streamed(events, failure=_failure) if body.stream else writing.whole(events))
    return with_ignored(answer, ignored)


async def count_tokens(service: AppService, body: CountTokensRequest, caller: AppCaller) -> Response:
    """How many tokens a conversation has."""
    _, prompt = await _read(service, body, caller)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})


async def _read(service: Service, body: CountTokensRequest, caller: Caller) -> tuple[Offer, ChatPrompt]:
    """The tools and the prompt, checked."""
    service.check_model(body.model)
    choice = body.tool_choice
    offer = make_offer(
        [_function(tool) for tool in body.tools or []],
        choice=_CHOICES[choice.type] if choice is not None else "auto",
        named=choice.name if choice is not None else None,
        chats=service.chats,
        limits=service.limits,
    )
    cache_key = body.prompt_cache_key if isinstance(body, MessagesRequest) else None
    variables = {name: value for given in _variables(body).values() for name, value in given.items()}

    def encode() -> ChatPrompt:
        tools = list(offer.tools)
        return encode_turns(
            service, turns_of_messages(body), caller, cache_key, tools, param="messages", template_kwargs=variables
        )

    return offer, await service.tokenizing.run(caller.tenant, encode)


def _function(tool: CustomTool) -> dict[str, Any]:
    # Checked already, and names may be longer here.
    return as_function(
        Function.model_construct(name=tool.name, description=tool.description, parameters=tool.input_schema)
    )


def _variables(body: CountTokensRequest) -> dict[str, dict[str, Any]]:
    """What fields set in the chat template."""
    found: dict[str, dict[str, Any]] = {}
    if body.thinking is not None:
        found["thinking"] = {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config is not None:
        found["output_config.effort"] = effort_variables(body.output_config.effort)
    return found


def _format(body: MessagesRequest) -> InlineSchemaFormat | None:
    wanted = (body.output_config.format if body.output_config is not None else None) or body.output_format
    if wanted is None:
        return None
    return InlineSchemaFormat.model_validate({"type": "json_schema", "name": "answer", "schema": wanted.schema_})


class _MessageWriter:
    """Writes one message."""

    def __init__(self, service: Service, prompt: ChatPrompt, reader: AnswerReader) -> None:
        self._service, self._prompt, self._reader = service, prompt, reader

    async def whole(self, events: AsyncIterator[_Event]) -> Response:
        """The message as one object."""
        message: dict[str, Any] = {}
        arguments = ""
        async for name, event in events:
            if name == "message_start":
                message = event["message"]
            elif name == "content_block_start":
                message["content"].append(event["content_block"])
                arguments = ""
            elif name == "content_block_delta":
                for field, more in event["delta"].items():
                    if field == "partial_json":
                        arguments += more
                    elif field != "type":
                        message["content"][-1][field] += more
            elif name == "content_block_stop" and message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(arguments)
            elif name == "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
        return JSONResponse(message)

    async def stream(self, generation: GenerationRequest) -> AsyncIterator[_Event]:
        """The message as events."""
        blocks = _BlockEvents()
        async with self._service.generating(generation, prefix="msg_") as answer:
            message = {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model, "content": []}
            end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
            yield _event("message_start", message={**message, **end, "usage": self._usage(answer)})
            yield _event("ping")
            async for part in answer_parts(answer, self._reader):
                if isinstance(part, Ended):
                    shown = (self._reader.reasoning, self._reader.content)
                    await self._service.remember(self._prompt, part, shown=shown)
                    end = {"stop_reason": _stop_reason(part, blocks), "stop_sequence": part.stop_string}
                else:
                    for event in blocks.add(part):
                        yield event
        for event in blocks.end():
            yield event
        yield _event("message_delta", delta=end, usage=self._usage(answer))
        yield _event("message_stop")

    def _usage(self, answer: Answer) -> dict[str, Any]:
        """Anthropic counts each token of a prompt once: read from the cache, written to it, or neither."""
        reuse = answer.reuse()
        read = reuse["cached_tokens"]
        marked = {int(hold.seconds): hold.tokens for hold in self._prompt.holds}
        written = max(0, max(marked.values(), default=0) - read) if answer.ended else 0
        for_an_hour = min(written, max(0, marked.get(3600, 0) - read))
        return {
            "input_tokens": answer.prompt_tokens - read - written,
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": written,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written - for_an_hour,
                "ephemeral_1h_input_tokens": for_an_hour,
            },
            "output_tokens": answer.new_tokens,
            **({"kvboost": reuse} if answer.ended else {}),
        }


class _BlockEvents:
    """Numbers the blocks of one message and writes them as events, one after the other."""

    def __init__(self) -> None:
        self._index = -1
        self._open = ""
        self.called = False

    def add(self, part: Part) -> Iterator[_Event]:
        """The events of the next part."""
        if isinstance(part, CallOpened):
            self.called = True
            yield from self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        elif isinstance(part, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, Reasoning):
            if self._open != "thinking":
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": part.text})
        else:
            if self._open != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.text})

    def end(self) -> Iterator[_Event]:
        """The end of the last block. A message without any gets an empty one: clients look at the first."""
        if self._index < 0:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._stop()

    def _begin(self, block: dict[str, Any]) -> Iterator[_Event]:
        yield from self._stop()
        self._index, self._open = self._index + 1, block["type"]
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> _Event:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> Iterator[_Event]:
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._index)


def _event(name: str, **fields: Any) -> _Event:
    return name, {"type": name, **fields}


def _failure(error: ApiError) -> _Event:
    return "error", error.body(_PATH)


def _stop_reason(ended: Ended, blocks: _BlockEvents) -> str:
    if ended.stop_string is not None:
        return "stop_sequence"
    if ended.reason == "length":
        return "max_tokens"
    return "tool_use" if blocks.called else "end_turn"
