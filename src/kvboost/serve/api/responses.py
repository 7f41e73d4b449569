"""POST /v1/responses: the part of OpenAI's newer interface that is text."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvboost.scheduler.jobs import Sampling
from kvboost.serve.api.chat import encode_messages
from kvboost.serve.api.dependencies import AppService
from kvboost.serve.api.sse import EventStream, chained, while_connected
from kvboost.serve.generation.prompts import ChatPrompt
from kvboost.serve.generation.service import Answer, GenerationRequest, Service
from kvboost.serve.generation.token_stream import Ended, Piece
from kvboost.serve.schemas.base import Message
from kvboost.serve.schemas.responses import ResponsesRequest
from kvboost.serve.security.auth import caller_of


async def responses(service: AppService, body: ResponsesRequest, request: Request) -> Response:
    """Answer, whole or as a stream of events."""
    service.check_model(body.model)
    wanted = body.text.format if body.text is not None else None
    grammar = await service.grammar(wanted, param="text.format")
    caller = caller_of(request)
    prompt = await service.tokenizing.run(
        caller.tenant, encode_messages, service, _messages(body), caller, body.prompt_cache_key, param="input"
    )

    generation = GenerationRequest(
        endpoint="responses",
        prompts=[(prompt.token_ids, prompt.boundaries)],
        caller=caller,
        max_new_tokens=body.max_output_tokens,
        max_param="max_output_tokens",
        prompt_param="input",
        model=body.model,
        sampling=Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
        ),
        grammar=grammar,
    )
    writing = _ResponseWriter(service, body, prompt)
    if not body.stream:
        return await while_connected(request, writing.whole(generation))
    return EventStream(await chained(writing.stream(generation)))


def _messages(body: ResponsesRequest) -> list[Message]:
    given = [Message(role="user", content=body.input)] if isinstance(body.input, str) else []
    if not isinstance(body.input, str):
        given = [Message(role=message.role, content=message.content) for message in body.input]
    if body.instructions is not None:
        given.insert(0, Message(role="system", content=body.instructions))
    return given


class _ResponseWriter:
    """Writes one response."""

    def __init__(self, service: Service, body: ResponsesRequest, prompt: ChatPrompt) -> None:
        self._service, self._body, self._prompt = service, body, prompt
        self._item_id = "msg_" + secrets.token_hex(12)

    async def whole(self, generation: GenerationRequest) -> Response:
        """The response as one object."""
        async with self._service.generating(generation, prefix="resp_") as answer:
            async for event in answer.events():
                if isinstance(event, Ended):
                    await self._service.remember(self._prompt, event)
        return JSONResponse(self._object(answer))

    async def stream(self, generation: GenerationRequest) -> AsyncIterator[Any]:
        """The response as events, numbered from 0."""
        number = 0

        def numbered(name: str, **fields: Any) -> tuple[str, dict[str, Any]]:
            nonlocal number
            number += 1
            return name, {"type": name, "sequence_number": number - 1, **fields}

        location = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        async with self._service.generating(generation, prefix="resp_") as answer:
            yield numbered("response.created", response=self._object(answer))
            yield numbered("response.in_progress", response=self._object(answer))
            yield numbered("response.output_item.added", output_index=0, item=self._item("", "in_progress"))
            yield numbered("response.content_part.added", **location, part=_part(""))
            async for event in answer.events():
                if isinstance(event, Piece):
                    if event.text:
                        yield numbered("response.output_text.delta", **location, delta=event.text, logprobs=[])
                    continue
                await self._service.remember(self._prompt, event)
                status = _status(event)
                yield numbered("response.output_text.done", **location, text=event.text, logprobs=[])
                yield numbered("response.content_part.done", **location, part=_part(event.text))
                yield numbered("response.output_item.done", output_index=0, item=self._item(event.text, status))
        end = self._object(answer)
        yield numbered(f"response.{end['status']}", response=end)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        content = [_part(text)] if status != "in_progress" else []
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

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
            "model": answer.model,
            "output": [self._item(ended.text, status)] if ended is not None else [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": format_},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": _usage(answer) if ended is not None else None,
            "metadata": {},
        }


def _dumped(format_: Any) -> Any:
    return format_.model_dump(by_alias=True, exclude_none=True)


def _status(ended: Ended) -> str:
    return "incomplete" if ended.reason == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


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
