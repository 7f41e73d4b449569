"""POST /v1/chat/completions.

Invariant: a stream and a whole answer come from the same events, so they say the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvboost.scheduler.jobs import NewToken
from kvboost.serve.api.dependencies import AppService
from kvboost.serve.api.sse import DONE, EventStream, chained, while_connected
from kvboost.serve.errors import bad_request
from kvboost.serve.generation.prompts import ChatPrompt, to_turn
from kvboost.serve.generation.service import GenerationRequest, Service, sampling_of
from kvboost.serve.generation.token_stream import Piece
from kvboost.serve.generation.tools import ToolReader, make_forced_reader, make_reader
from kvboost.serve.schemas.base import Message, NamedChoice
from kvboost.serve.schemas.chat import ChatRequest
from kvboost.serve.schemas.tokens import TokenizeRequest, WarmRequest
from kvboost.serve.security.auth import Caller, caller_of
from kvboost.serve.security.limits import check_json


class _Chat:
    """One request: what was generation, and how to write what comes."""

    def __init__(self, service: Service, body: ChatRequest, caller: Caller) -> None:
        self.service, self.body, self.caller = service, body, caller
        self.prompt: ChatPrompt
        self.tools = _usable_tools(service, body)
        self.forced = _forced_functions(body)
        self.readers: dict[int, ToolReader] = {}

    async def ask(self) -> GenerationRequest:
        """Check everything and tokenise the chat."""
        service, body = self.service, self.body
        service.check_model(body.model)
        sampling, stops = sampling_of(body, limits=service.limits, vocab_size=service.vocab_size)
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise bad_request("give max_completion_tokens or max_tokens, not both", param="max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs", param="top_logprobs")
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream", param="stream_options")
        if self.tools and body.response_format is not None and body.response_format.type != "text":
            raise bad_request("tools and a JSON format do not go together here", param="response_format")
        grammar = await service.grammar(body.response_format, param="response_format")
        if self.forced:
            grammar = await asyncio.to_thread(service.grammars.compile_call, self.forced)
        self.prompt = await asyncio.to_thread(
            encode_messages, service, body.messages, self.caller, body.prompt_cache_key, self.tools
        )
        return GenerationRequest(
            endpoint="chat",
            prompts=[(self.prompt.token_ids, self.prompt.boundaries)],
            caller=self.caller,
            max_new_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
            max_param="max_completion_tokens" if body.max_tokens is None else "max_tokens",
            prompt_param="messages",
            sampling=sampling,
            n=body.n or 1,
            stops=stops,
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar,
            special=bool(self.tools),
        )

    def reader(self, index: int) -> ToolReader | None:
        """What tells the tool calls of one choice from its text; None without tools."""
        if not self.tools:
            return None
        if index not in self.readers:
            self.readers[index] = (
                make_forced_reader()
                if self.forced
                else make_reader(self.service.tokenizer, prompt=self.prompt.text, tools=self.tools)
            )
        return self.readers[index]

    def calls_of(self, reader: ToolReader) -> tuple[str, list[dict[str, Any]]]:
        """What is left of a choice's text, and its tool calls."""
        text, calls = reader.end()
        return text, calls[:1] if self.body.parallel_tool_calls is False else calls


async def chat_completions(service: AppService, body: ChatRequest, request: Request) -> Response:
    """Answer a chat, whole or as a stream."""
    chat = _Chat(service, body, caller_of(request))
    generation = await chat.ask()
    if not body.stream:
        return await while_connected(request, _whole(chat, generation))
    return EventStream(await chained(_stream(chat, generation)))


async def _whole(chat: _Chat, generation: GenerationRequest) -> Response:
    tokens: dict[int, list[NewToken]] = {}
    choices: list[dict[str, Any]] = []
    async with chat.service.generating(generation, prefix="chatcmpl-") as answer:
        async for event in answer.events():
            if isinstance(event, Piece):
                tokens.setdefault(event.index, []).extend(event.tokens)
                continue
            await chat.service.remember(chat.prompt, event)
            message: dict[str, Any] = {"role": "assistant", "content": event.text, "refusal": None}
            reason = event.reason
            if (reader := chat.reader(event.index)) is not None:
                text = reader.add(event.text)
                more, calls = chat.calls_of(reader)
                message["content"] = text + more
                if calls:
                    message |= {"content": message["content"].strip() or None, "tool_calls": calls}
                    reason = "tool_calls" if reason == "stop" else reason
            choices.append(
                {
                    "index": event.index,
                    "message": message,
                    "logprobs": _logprobs(chat.service, tokens.get(event.index, []))
                    if generation.top_logprobs is not None
                    else None,
                    "finish_reason": reason,
                }
            )
    choices.sort(key=lambda choice: int(choice["index"]))
    return JSONResponse({**answer.head("chat.completion"), "choices": choices, "usage": answer.usage()})


async def _stream(chat: _Chat, generation: GenerationRequest) -> AsyncIterator[Any]:
    with_usage = chat.body.stream_options is not None and chat.body.stream_options.include_usage
    async with chat.service.generating(generation, prefix="chatcmpl-") as answer:

        def chunk(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            usage = {"usage": None} if with_usage else {}
            return {**answer.head("chat.completion.chunk"), "choices": [choice], **usage}

        for index in range(generation.n):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for event in answer.events():
            reader = chat.reader(event.index)
            if isinstance(event, Piece):
                text = event.text if reader is None else reader.add(event.text)
                logprobs = _logprobs(chat.service, event.tokens) if generation.top_logprobs is not None else None
                if text or (logprobs and event.tokens):
                    yield chunk(event.index, {"content": text}, logprobs=logprobs)
                continue
            await chat.service.remember(chat.prompt, event)
            reason = event.reason
            if reader is not None:
                text, calls = chat.calls_of(reader)
                if text and not (calls and not text.strip()):
                    yield chunk(event.index, {"content": text})
                if calls:
                    numbered = [{"index": number, **call} for number, call in enumerate(calls)]
                    yield chunk(event.index, {"tool_calls": numbered})
                    reason = "tool_calls" if reason == "stop" else reason
            yield chunk(event.index, {}, reason)
    if with_usage:
        yield {**answer.head("chat.completion.chunk"), "choices": [], "usage": answer.usage()}
    yield DONE


def _logprobs(service: Service, tokens: Sequence[NewToken]) -> dict[str, Any]:
    """Log-probabilities in the shape of chats."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = service.token_bytes(token_id)
        # The lowest is what OpenAI writes for a token that was impossible; JSON has no infinity.
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}

    content = [
        {
            **entry(token.token_id, token.logprob if token.logprob is not None else -9999.0),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def encode_messages(
    service: Service,
    messages: Sequence[Message],
    caller: Caller,
    cache_key: str | None,
    tools: list[dict[str, Any]] | None = None,
    *,
    param: str = "messages",
) -> ChatPrompt:
    """A chat as ids, checked; ``param`` is the field it came in. For worker threads."""
    prompt = service.chats.encode(
        [to_turn(message) for message in messages], tenant=caller.tenant, cache_key=cache_key or "", tools=tools
    )
    return replace(prompt, token_ids=service.encode(prompt.token_ids, param=param))


async def encode_either(
    service: Service, body: TokenizeRequest | WarmRequest, caller: Caller
) -> tuple[list[int], list[int]]:
    """Token ids and boundaries of a body that has a prompt or messages."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give prompt or messages, one of them", param="prompt")
    if body.messages is not None:
        chat = await asyncio.to_thread(encode_messages, service, body.messages, caller, None)
        return chat.token_ids, chat.boundaries
    return await asyncio.to_thread(service.encode, body.prompt or ""), []


def _usable_tools(service: Service, body: ChatRequest) -> list[dict[str, Any]]:
    """The tools, as templates take them; none if the client wants none used."""
    if body.tools is None:
        if body.tool_choice not in (None, "none") or body.parallel_tool_calls is not None:
            field = "tool_choice" if body.tool_choice is not None else "parallel_tool_calls"
            raise bad_request(f"{field} needs tools", param=field)
        return []
    check_json([tool.function.parameters for tool in body.tools], limits=service.limits, param="tools")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    check_json(tools, limits=service.limits, param="tools")  # descriptions count as well
    if body.tool_choice == "none":
        return []
    if not service.chats.takes_tools:
        raise bad_request("this model's chat template takes no tools", param="tools", code="unsupported_parameter")
    return tools


def _forced_functions(body: ChatRequest) -> dict[str, dict[str, Any] | None]:
    """The functions one of which the answer has to call, with the schemas of their arguments; empty if it is free."""
    functions = {tool.function.name: tool.function.parameters for tool in body.tools or []}
    if isinstance(body.tool_choice, NamedChoice):
        name = body.tool_choice.function.name
        if name not in functions:
            raise bad_request("tool_choice names a function that is not in tools", param="tool_choice")
        return {name: functions[name]}
    if body.tool_choice != "required":
        return {}
    if not functions:
        raise bad_request("tool_choice needs tools", param="tool_choice")
    return functions
