"""POST /v1/completions: texts or token ids, continued as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from kvboost.scheduler.jobs import NewToken
from kvboost.serve.api.common import DONE, AppCaller, AppService, streamed, with_ignored
from kvboost.serve.errors import bad_request
from kvboost.serve.generation.requests import GenerationRequest, sampling_of
from kvboost.serve.generation.service import Service
from kvboost.serve.generation.token_stream import Piece
from kvboost.serve.schemas.chat import CompletionRequest

_DEFAULT_TOKENS = 16  # OpenAI's


async def completions(service: AppService, body: CompletionRequest, caller: AppCaller) -> Response:
    """Continue prompts, whole or as a stream."""
    service.check_model(body.model)
    sampling, stops = sampling_of(
        body, limits=service.limits, vocab_size=service.vocab_size, max_new_tokens=body.max_tokens
    )
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream", param="stream_options")
    if body.echo and body.logprobs is not None:
        raise bad_request(
            "echo and logprobs do not go together: reused tokens of a prompt are not computed, so they have no "
            "log-probabilities; leave one of them out",
            param="echo",
        )
    made = body.n or 1
    prompts = _prompts(body.prompt)
    if len(prompts) * made > service.limits.max_prompts * service.limits.max_choices:
        raise bad_request("too many choices in all; ask for fewer prompts or choices", param="n")
    grammar = await service.grammar(body.response_format, param="response_format", tenant=caller.tenant)
    encoded = [(await service.tokenizing.run(caller.tenant, service.encode, prompt), ()) for prompt in prompts]
    generation = GenerationRequest(
        endpoint="completions",
        prompts=encoded,
        caller=caller,
        max_new_tokens=body.max_tokens,
        default_new_tokens=max(_DEFAULT_TOKENS, body.min_tokens or 0),
        sampling=sampling,
        model=body.model,
        n=made,
        stops=stops,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=body.logprobs,
        grammar=grammar,
    )
    echoed = [
        prompt if isinstance(prompt, str) else await service.tokenizing.run(caller.tenant, service.chats.decode, prompt)
        for prompt in (prompts if body.echo else ())
    ]
    writer = _Writer(service, body, generation, echoed)
    answer = await (streamed(writer.stream()) if body.stream else writer.whole())
    return with_ignored(answer, body.ignored())


def _prompts(given: str | list[Any]) -> Sequence[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("the prompt is empty; give a text or token ids", param="prompt")
    return [given] if isinstance(given[0], int) else given


@dataclass(frozen=True)
class _Writer:
    """Writes one answer."""

    _service: Service
    _body: CompletionRequest
    _generation: GenerationRequest
    _echoed: Sequence[str]
    """The texts of the prompts, if they are to be repeated."""

    async def whole(self) -> Response:
        """The answer as one object."""
        pieces: dict[int, list[Piece]] = {}
        choices: list[dict[str, Any]] = []
        async with self._service.generating(self._generation, prefix="cmpl-") as answer:
            async for event in answer.events():
                if isinstance(event, Piece):
                    pieces.setdefault(event.index, []).append(event)
                    continue
                choices.append(
                    {
                        "index": event.index,
                        "text": self._before(event.index) + event.text,
                        "logprobs": self._logprobs(pieces.get(event.index, [])),
                        "finish_reason": event.reason,
                    }
                )
        choices.sort(key=lambda choice: int(choice["index"]))
        return JSONResponse({**answer.head("text_completion"), "choices": choices, "usage": answer.usage()})

    async def stream(self) -> AsyncIterator[Any]:
        """The answer in pieces."""
        usage = {"usage": None} if self._body.includes_usage else {}
        async with self._service.generating(self._generation, prefix="cmpl-") as answer:

            def chunk(index: int, text: str, reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
                choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
                return {**answer.head("text_completion"), "choices": [choice], **usage}

            yield None  # the jobs were taken
            for index in range(len(self._echoed) * self._generation.n):
                yield chunk(index, self._before(index))
            async for event in answer.events():
                if isinstance(event, Piece):
                    yield chunk(event.index, event.text, logprobs=self._logprobs([event]))
                else:
                    yield chunk(event.index, "", event.reason)
        if self._body.includes_usage:
            yield {**answer.head("text_completion"), "choices": [], "usage": answer.usage()}
        yield DONE

    def _before(self, index: int) -> str:
        """The prompt of a choice, if it is to be repeated."""
        return self._echoed[index // self._generation.n] if self._echoed else ""

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Log-probabilities in the shape of completions; None where they were not requested."""
        if self._body.logprobs is None:
            return None

        def text(token_id: int) -> str:
            return self._service.token_bytes(token_id).decode(errors="replace")

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
