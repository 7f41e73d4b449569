"""POST /v1/responses: the part of OpenAI's newer interface that is text and functions.

Invariant: a whole response is the last event of its stream, so both say the same.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response

from kvboost.serve.api.chat import asked_holds, encode_turns
from kvboost.serve.api.common import AppCaller, AppService, streamed, unread, with_ignored
from kvboost.serve.errors import bad_request
from kvboost.serve.generation.answers import AnswerReader, answer_parts
from kvboost.serve.generation.parts import CallArguments, CallOpened, Part, Reasoning
from kvboost.serve.generation.prompts import ChatPrompt, effort_variables
from kvboost.serve.generation.requests import Answer, GenerationRequest, Offer, drawn_by, make_offer
from kvboost.serve.generation.service import Service
from kvboost.serve.generation.token_stream import Ended
from kvboost.serve.generation.turns import Turn, as_function, check_arguments, turns_of_items
from kvboost.serve.schemas.responses import FunctionCall, FunctionTool, InputItem, NamedTool, ResponsesRequest
from kvboost.serve.security.auth import Caller
from kvboost.serve.security.bodies import add_remembered_bytes

Event = tuple[str, dict[str, Any]]
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


async def responses(service: AppService, body: ResponsesRequest, caller: AppCaller) -> Response:
    """Answer, whole or as a stream of events."""
    service.check_model(body.model)
    offer = _offered(service, body)
    wanted = body.text.format if body.text is not None else None
    grammar = await service.grammar(wanted, offer=offer, param="text.format", tenant=caller.tenant)
    if body.previous_response_id is not None:
        add_remembered_bytes(service.responses.nbytes(body.previous_response_id, tenant=caller.tenant))
    turns = await service.tokenizing.run(caller.tenant, _conversation, service, body, caller)
    variables = effort_variables(body.reasoning.effort if body.reasoning is not None else None)

    def encode() -> ChatPrompt:
        system = [Turn({"role": "system", "content": body.instructions})] if body.instructions is not None else []
        said, key, tools = [*system, *turns], body.prompt_cache_key, list(offer.tools)
        return encode_turns(service, said, caller, key, tools, param="input", template_kwargs=variables)

    prompt = await service.tokenizing.run(caller.tenant, encode)
    reader = service.answers.make(
        prompt=prompt.text, offer=offer, constrained=grammar is not None, parallel=body.parallel_tool_calls
    )
    generation = GenerationRequest(
        endpoint="responses",
        prompts=[(prompt.token_ids, prompt.boundaries)],
        caller=caller,
        max_new_tokens=body.max_output_tokens,
        max_param="max_output_tokens",
        prompt_param="input",
        model=body.model,
        sampling=drawn_by(body),
        grammar=grammar,
        special=grammar is None and service.answers.needs_special(tools=bool(offer.tools)),
        holds=asked_holds(prompt, body.prompt_cache_retention),
    )
    writing = _ResponseWriter(service, body, reader, prompt, turns)
    ignored = [*body.ignored(), *unread(service.chats, {"reasoning.effort": variables})]
    events = writing.stream(generation)
    return with_ignored(await (streamed(events) if body.stream else writing.whole(events)), ignored)


def _conversation(service: Service, body: ResponsesRequest, caller: Caller) -> list[Turn]:
    """What was said, and what is said now. Instructions are not part of it: each response has its own."""
    before: Sequence[Turn] = ()
    if body.previous_response_id is not None:
        found = service.responses.find(body.previous_response_id, tenant=caller.tenant)
        if found is None:
            raise bad_request(
                "this server does not remember that response: it keeps the latest of each key until it is restarted, "
                "and none with store=false; send the whole conversation in input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        before = found
    items = body.input if isinstance(body.input, list) else []
    calls = (item for item in items if isinstance(item, FunctionCall))
    check_arguments((call.arguments for call in calls), service.limits, param="input")
    return [*before, *turns_of_items(body.input)]


def _offered(service: Service, body: ResponsesRequest) -> Offer:
    choice = body.tool_choice
    return make_offer(
        [as_function(tool) for tool in body.tools or []],
        choice="required" if isinstance(choice, NamedTool) else choice or "auto",
        named=choice.name if isinstance(choice, NamedTool) else None,
        chats=service.chats,
        limits=service.limits,
    )


class _ResponseWriter:
    """Writes one response."""

    def __init__(
        self, service: Service, body: ResponsesRequest, reader: AnswerReader, prompt: ChatPrompt, turns: list[Turn]
    ) -> None:
        self._service, self._body, self._reader, self._prompt, self._turns = service, body, reader, prompt, turns
        self._items = ItemEvents()

    async def whole(self, events: AsyncIterator[Event]) -> Response:
        """The response as one object."""
        last: dict[str, Any] = {}
        async for _, event in events:
            last = event
        return JSONResponse(last["response"])

    async def stream(self, generation: GenerationRequest) -> AsyncIterator[Event]:
        """The response as events, numbered from 0."""
        number = 0
        async for name, fields in self._events(generation):
            yield name, {"type": name, "sequence_number": number, **fields}
            number += 1

    async def _events(self, generation: GenerationRequest) -> AsyncIterator[Event]:
        async with self._service.generating(generation, prefix="resp_") as answer:
            yield "response.created", {"response": self._object(answer)}
            yield "response.in_progress", {"response": self._object(answer)}
            async for part in answer_parts(answer, self._reader):
                if isinstance(part, Ended):
                    shown = (self._reader.reasoning, self._reader.content)
                    await self._service.remember(self._prompt, part, shown=shown)
                    events = self._items.end(_status(part))
                else:
                    events = self._items.add(part)
                for event in events:
                    yield event
            if self._body.store is not False:  # inside the block: a server that drains waits for it
                said = [*self._turns, *turns_of_items(self._items.as_input())]
                tenant, size = generation.caller.tenant, len(self._prompt.text)
                remember = self._service.responses.remember
                await self._service.tokenizing.finish(tenant, size, remember, answer.id, said, tenant=tenant)
        end = self._object(answer)
        yield f"response.{end['status']}", {"response": end}

    def _object(self, answer: Answer) -> dict[str, Any]:
        body = self._body
        ended = answer.ended[0] if answer.ended else None
        status = _status(ended) if ended is not None else "in_progress"
        format_ = {"type": "text"} if body.text is None or body.text.format is None else _dumped(body.text.format)
        return {
            "id": answer.id,
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": answer.model,
            "output": self._items.output if ended is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": format_},
            "tool_choice": self._choice(),
            "tools": [_shown(tool) for tool in body.tools or []],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": _usage(answer) if ended is not None else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _choice(self) -> Any:
        choice = self._body.tool_choice
        return _dumped(choice) if isinstance(choice, NamedTool) else choice or "auto"


def _shown(tool: FunctionTool) -> dict[str, Any]:
    """A tool as clients read it: these two fields are there whatever they hold."""
    return {"parameters": tool.parameters, "strict": tool.strict, **_dumped(tool)}


def _dumped(given: Any) -> Any:
    return given.model_dump(by_alias=True, exclude_none=True)


def _status(ended: Ended) -> str:
    return "incomplete" if ended.reason == "length" else "completed"


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "kvboost": usage["kvboost"],
    }


class ItemEvents:
    """Writes parts of an answer as items, and events that tell how they grow.

    One item is open at a time, and each is closed by the event that gives it whole.
    """

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
