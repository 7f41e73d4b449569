"""POST /v1/completions: texts or token ids, continued as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvboost.scheduler.jobs import NewToken
from kvboost.serve.api.dependencies import AppService
from kvboost.serve.api.sse import DONE, EventStream, chained, while_connected
from kvboost.serve.errors import bad_request
from kvboost.serve.generation.service import GenerationRequest, Service, sampling_of
from kvboost.serve.generation.token_stream import Piece
from kvboost.serve.schemas.completions import CompletionRequest
from kvboost.serve.security.auth import caller_of

_DEFAULT_TOKENS = 16  # OpenAI's


async def completions(service: AppService, body: CompletionRequest, request: Request) -> Response:
    """Continue prompts, whole or as a stream."""
    service.check_model(body.model)
    sampling, stops = sampling_of(body, limits=service.limits, vocab_size=service.vocab_size)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream", param="stream_options")
    prompts = _prompts(body.prompt)
    if len(prompts) * (body.n or 1) > service.limits.max_prompts * service.limits.max_choices:
        raise bad_request("too many choices in all; ask for fewer prompts or choices", param="n")
    grammar = await service.grammar(body.response_format, param="response_format")
    encoded = await asyncio.to_thread(lambda: [(service.encode(prompt), ()) for prompt in prompts])
    generation = GenerationRequest(
        endpoint="completions",
        prompts=encoded,
        caller=caller_of(request),
        max_new_tokens=body.max_tokens,
        default_new_tokens=_DEFAULT_TOKENS,
        sampling=sampling,
        n=body.n or 1,
        stops=stops,
        top_logprobs=body.logprobs,
        grammar=grammar,
    )
    if not body.stream:
        return await while_connected(request, _whole(service, generation))
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    return EventStream(await chained(_stream(service, generation, with_usage=with_usage)))


def _prompts(given: str | list[Any]) -> Sequence[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("the prompt is empty; give a text or token ids", param="prompt")
    return [given] if isinstance(given[0], int) else given


async def _whole(service: Service, generation: GenerationRequest) -> Response:
    pieces: dict[int, list[Piece]] = {}
    choices: list[dict[str, Any]] = []
    async with service.generating(generation, prefix="cmpl-") as answer:
        async for event in answer.events():
            if isinstance(event, Piece):
                pieces.setdefault(event.index, []).append(event)
                continue
            choices.append(
                {
                    "index": event.index,
                    "text": event.text,
                    "logprobs": _logprobs(service, generation, pieces.get(event.index, [])),
                    "finish_reason": event.reason,
                }
            )
    choices.sort(key=lambda choice: int(choice["index"]))
    return JSONResponse({**answer.head("text_completion"), "choices": choices, "usage": answer.usage()})


async def _stream(service: Service, generation: GenerationRequest, *, with_usage: bool) -> AsyncIterator[Any]:
    async with service.generating(generation, prefix="cmpl-") as answer:
        yield None  # the jobs were taken
        async for event in answer.events():
            choice = {
                "index": event.index,
                "text": event.text if isinstance(event, Piece) else "",
                "logprobs": _logprobs(service, generation, [event]) if isinstance(event, Piece) else None,
                "finish_reason": None if isinstance(event, Piece) else event.reason,
            }
            yield {**answer.head("text_completion"), "choices": [choice], **({"usage": None} if with_usage else {})}
    if with_usage:
        yield {**answer.head("text_completion"), "choices": [], "usage": answer.usage()}
    yield DONE


def _logprobs(service: Service, generation: GenerationRequest, pieces: Sequence[Piece]) -> dict[str, Any] | None:
    """Log-probabilities in the shape of completions; None where they were not requested."""
    if generation.top_logprobs is None:
        return None

    def text(token_id: int) -> str:
        return service.token_bytes(token_id).decode(errors="replace")

    tokens = [token for piece in pieces for token in piece.tokens]
    return {
        "tokens": [text(token.token_id) for token in tokens],
        "token_logprobs": [max(token.logprob, -9999.0) if token.logprob is not None else None for token in tokens],
        "top_logprobs": [
            {text(token_id): max(logprob, -9999.0) for token_id, logprob in (*token.top, _chosen(token))}
            for token in tokens
        ],
        "text_offset": [offset for piece in pieces for offset in piece.offsets],
    }


def _chosen(token: NewToken) -> tuple[int, float]:
    """The sampled token is listed among the likeliest, whether it is one or not."""
    return token.token_id, token.logprob if token.logprob is not None else -9999.0
