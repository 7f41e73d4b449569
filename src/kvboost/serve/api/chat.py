"""POST /v1/chat/completions.

Invariant: a stream and a whole answer come from the same events, so they say the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from kvboost.scheduler.jobs import NewToken
from kvboost.serve.api.common import DONE, AppCaller, AppService, streamed, unread, with_ignored
from kvboost.serve.errors import bad_request
from kvboost.serve.generation.answers import AnswerReader
from kvboost.serve.generation.parts import CallOpened, Content, Part, Reasoning
from kvboost.serve.generation.prompts import ChatPrompt, Hold, effort_variables
from kvboost.serve.generation.requests import GenerationRequest, Offer, make_offer, sampling_of
from kvboost.serve.generation.service import Service
from kvboost.serve.generation.token_stream import Ended, Piece
from kvboost.serve.generation.turns import Turn, as_function, check_arguments, to_turn
from kvboost.serve.schemas.base import Message, NamedChoice
from kvboost.serve.schemas.chat import ChatRequest
from kvboost.serve.security.auth import Caller
from kvboost.serve.security.limits import check_json


class _Chat:
    """One request: what to generate, and how to read what comes."""

    def __init__(self, service: Service, body: ChatRequest, caller: Caller) -> None:
        self.service, self.body, self.caller = service, body, caller
        self.prompt: ChatPrompt
        self.offer = _offered(service, body)
        self.tools = list(self.offer.tools)
        self.constrained = body.response_format is not None and body.response_format.type != "text"
        self.ignored = body.ignored()
        self.template_kwargs = self._template_kwargs()
        self._readers: dict[int, AnswerReader] = {}

    async def ask(self) -> GenerationRequest:
        """Check everything and tokenise the chat."""
        service, body, offer = self.service, self.body, self.offer
        service.check_model(body.model)
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise bad_request("give max_completion_tokens or max_tokens, not both", param="max_tokens")
        max_new_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        sampling, stops = sampling_of(
            body, limits=service.limits, vocab_size=service.vocab_size, max_new_tokens=max_new_tokens
        )
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs", param="top_logprobs")
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream", param="stream_options")
        if offer.forced and body.min_tokens:
            raise bad_request("min_tokens and a forced call do not go together", param="min_tokens")
        grammar = await service.grammar(
            body.response_format, offer=offer, param="response_format", tenant=self.caller.tenant
        )
        self.prompt = await service.tokenizing.run(
            self.caller.tenant,
            encode_messages,
            service,
            body.messages,
            self.caller,
            body.prompt_cache_key,
            self.tools,
            template_kwargs=self.template_kwargs,
        )
        return GenerationRequest(
            endpoint="chat",
            prompts=[(self.prompt.token_ids, self.prompt.boundaries)],
            caller=self.caller,
            max_new_tokens=max_new_tokens,
            max_param="max_completion_tokens" if body.max_tokens is None else "max_tokens",
            prompt_param="messages",
            sampling=sampling,
            model=body.model,
            n=body.n or 1,
            stops=stops,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar,
            special=grammar is None and service.answers.needs_special(tools=bool(self.tools)),
            holds=asked_holds(self.prompt, body.prompt_cache_retention),
        )

    def reader(self, index: int) -> AnswerReader:
        """What tells reasoning, text and tool calls of one choice apart."""
        if index not in self._readers:
            self._readers[index] = self.service.answers.make(
                prompt=self.prompt.text,
                offer=self.offer,
                constrained=self.constrained,
                parallel=self.body.parallel_tool_calls,
            )
        return self._readers[index]

    async def end(self, ended: Ended) -> tuple[list[Part], str]:
        """The last parts of a choice, and why it ended. Remembers the reply as the client will send it back."""
        reader = self.reader(ended.index)
        parts = reader.end()
        await self.service.remember(self.prompt, ended, shown=(reader.reasoning, reader.content))
        return parts, "tool_calls" if reader.calls and ended.reason == "stop" else ended.reason

    def _template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template; those it does not mention have no effect."""
        given = self.body.chat_template_kwargs or {}
        check_json(given, limits=self.service.limits, param="chat_template_kwargs")
        self.service.chats.check_kwargs(given, param="chat_template_kwargs")
        effort = effort_variables(self.body.reasoning_effort)
        fields = {f"chat_template_kwargs.{name}": {name: value} for name, value in given.items()}
        self.ignored += unread(self.service.chats, {"reasoning_effort": effort, **fields})
        return {**effort, **given}


async def chat_completions(service: AppService, body: ChatRequest, caller: AppCaller) -> Response:
    """Answer a chat, whole or as a stream."""
    chat = _Chat(service, body, caller)
    generation = await chat.ask()
    answer = await (streamed(_stream(chat, generation)) if body.stream else _whole(chat, generation))
    return with_ignored(answer, chat.ignored)


async def _whole(chat: _Chat, generation: GenerationRequest) -> Response:
    tokens: dict[int, list[NewToken]] = {}
    choices: list[dict[str, Any]] = []
    async with chat.service.generating(generation, prefix="chatcmpl-") as answer:
        async for event in answer.events():
            reader = chat.reader(event.index)
            if isinstance(event, Piece):
                tokens.setdefault(event.index, []).extend(event.tokens)
                reader.add(event.text)
                continue
            _, reason = await chat.end(event)
            choices.append(
                {
                    "index": event.index,
                    "message": _message(reader),
                    "logprobs": _logprobs(chat.service, tokens.get(event.index, []))
                    if generation.top_logprobs is not None
                    else None,
                    "finish_reason": reason,
                }
            )
    choices.sort(key=lambda choice: int(choice["index"]))
    return JSONResponse({**answer.head("chat.completion"), "choices": choices, "usage": answer.usage()})


def _message(reader: AnswerReader) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reader.content, "refusal": None}
    if reader.reasoning:
        message["reasoning_content"] = reader.reasoning
    if reader.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reader.calls
        ]
    if reader.reasoning or reader.calls:
        message["content"] = reader.content or None
    return message


async def _stream(chat: _Chat, generation: GenerationRequest) -> AsyncIterator[Any]:
    async with chat.service.generating(generation, prefix="chatcmpl-") as answer:

        def chunk(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            usage = {"usage": None} if chat.body.includes_usage else {}
            return {**answer.head("chat.completion.chunk"), "choices": [choice], **usage}

        for index in range(generation.n):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for event in answer.events():
            if isinstance(event, Piece):
                deltas = [_delta(part) for part in chat.reader(event.index).add(event.text)]
                if generation.top_logprobs is not None and event.tokens:
                    first = deltas.pop(0) if deltas else {"content": ""}
                    yield chunk(event.index, first, logprobs=_logprobs(chat.service, event.tokens))
                for delta in deltas:
                    yield chunk(event.index, delta)
                continue
            parts, reason = await chat.end(event)
            for part in parts:
                yield chunk(event.index, _delta(part))
            yield chunk(event.index, {}, reason)
    if chat.body.includes_usage:
        yield {**answer.head("chat.completion.chunk"), "choices": [], "usage": answer.usage()}
    yield DONE


def _delta(part: Part) -> dict[str, Any]:
    """A part of an answer in the shape of a stream."""
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, CallOpened):
        function = {"name": part.name, "arguments": ""}
        return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


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
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """The field ``messages`` as ids, checked. For worker threads."""
    calls = (call for message in messages for call in message.tool_calls or ())
    check_arguments((call.function.arguments for call in calls), service.limits, param="messages")
    turns = [to_turn(message) for message in messages]
    return encode_turns(service, turns, caller, cache_key, tools, param="messages", template_kwargs=template_kwargs)


def encode_turns(
    service: Service,
    turns: Sequence[Turn],
    caller: Caller,
    cache_key: str | None,
    tools: list[dict[str, Any]] | None = None,
    *,
    param: str,
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """The same for a chat that is in turns already; ``param`` is the field it came in."""
    service.lengths.check_characters(sum(len(turn.content) + len(turn.reasoning) for turn in turns), param=param)
    prompt = service.chats.encode(
        turns,
        tenant=caller.tenant,
        cache_key=cache_key or "",
        tools=tools,
        template_kwargs=template_kwargs,
        param=param,
    )
    return replace(prompt, token_ids=service.encode(prompt.token_ids, param=param))


def asked_holds(prompt: ChatPrompt, retention: str | None) -> tuple[Hold, ...]:
    """What a client of OpenAI's wants to find again: what it marked, and for a day the whole prompt."""
    whole = Hold(len(prompt.token_ids), 24 * 60 * 60, prompt.cache_key or None)
    return (*prompt.holds, whole) if retention == "24h" else prompt.holds


def _offered(service: Service, body: ChatRequest) -> Offer:
    """The tools of a chat."""
    if not body.tools and body.tool_choice not in (None, "none"):
        raise bad_request("tool_choice needs tools", param="tool_choice")
    named = body.tool_choice if isinstance(body.tool_choice, NamedChoice) else None
    return make_offer(
        [as_function(tool.function) for tool in body.tools or []],
        choice="auto" if body.tool_choice is None or isinstance(body.tool_choice, NamedChoice) else body.tool_choice,
        named=named.function.name if named is not None else None,
        chats=service.chats,
        limits=service.limits,
    )
