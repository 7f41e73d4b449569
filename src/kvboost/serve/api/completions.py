"""POST /v1/completions: texts or token ids, continued as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from kvboost.engine.text_stream import Detokenizer
from kvboost.scheduler.jobs import NewToken
from kvboost.serve.api.common import DONE, AppCaller, AppService, streamed, with_ignored
from kvboost.serve.errors import bad_request
from kvboost.serve.generation.requests import Answer, GenerationRequest, sampling_of
from kvboost.serve.generation.scores import prompt_tokens
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
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs does not go with stream; leave one of them out", param="prompt_logprobs")
    if body.max_tokens == 0 and body.prompt_logprobs is None and (not body.echo or body.logprobs is None):
        needs = "max_tokens=0 needs echo and logprobs, or prompt_logprobs; give 1 or more"
        raise bad_request(needs, param="max_tokens")
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
        shows_end=bool(body.echo),  # whoever evaluates counts tokens from the end
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


@dataclass
class _Writer:
    """Writes one answer."""

    _service: Service
    _body: CompletionRequest
    _generation: GenerationRequest
    _echoed: Sequence[str]
    """The texts of the prompts, if they are to be repeated."""
    _read: Sequence[Sequence[NewToken]] = ()
    """The tokens of the prompts, if their log-probabilities are wanted."""

    async def whole(self) -> Response:
        """The answer as one object."""
        pieces: dict[int, list[Piece]] = {}
        async with self._service.generating(self._generation, prefix="cmpl-") as answer:
            await self._score(answer)
            async for event in answer.events():
                if isinstance(event, Piece):
                    pieces.setdefault(event.index, []).append(event)

        def written() -> Response:
            choices: list[dict[str, Any]] = []
            for ended in sorted(answer.ended, key=lambda ended: ended.index):
                text = self._before(ended.index) + ended.text
                logprobs = self._logprobs(ended.index, pieces.get(ended.index, ()), begins=True)
                choice = {"index": ended.index, "text": text, "logprobs": logprobs, "finish_reason": ended.reason}
                if self._body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = self._prompt_logprobs(ended.index)
                choices.append(choice)
            return JSONResponse({**answer.head("text_completion"), "choices": choices, "usage": answer.usage()})

        response: Response = await self._threaded(written) if self._read else written()
        return response

    async def stream(self) -> AsyncIterator[Any]:
        """The answer in pieces."""
        usage = {"usage": None} if self._body.includes_usage else {}
        async with self._service.generating(self._generation, prefix="cmpl-") as answer:

            def chunk(index: int, text: str, reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
                choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
                return {**answer.head("text_completion"), "choices": [choice], **usage}

            await self._score(answer)
            yield None  # the jobs were taken
            for index in range(len(self._echoed) * self._generation.n):
                logprobs = await self._threaded(self._logprobs, index, (), begins=True) if self._read else None
                yield chunk(index, self._before(index), logprobs=logprobs)
            async for event in answer.events():
                if isinstance(event, Piece):
                    yield chunk(event.index, event.text, logprobs=self._logprobs(event.index, [event]))
                else:
                    yield chunk(event.index, "", event.reason)
        if self._body.includes_usage:
            yield {**answer.head("text_completion"), "choices": [], "usage": answer.usage()}
        yield DONE

    def _before(self, index: int) -> str:
        """The prompt of a choice, if it is to be repeated."""
        return self._echoed[index // self._generation.n] if self._echoed else ""

    async def _threaded(self, work: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Not on the event loop: a prompt has many tokens."""
        tenant, tokens = self._generation.caller.tenant, sum(map(len, self._read))
        return await self._service.tokenizing.finish(tenant, tokens, work, *arguments, **keywords)

    async def _score(self, answer: Answer) -> None:
        wanted = [self._body.logprobs if self._echoed else None, self._body.prompt_logprobs]
        if counts := [count for count in wanted if count is not None]:
            read = partial(prompt_tokens, self._service, answer, top=max(counts))
            self._read = [await read(ids) for ids, _ in self._generation.prompts]

    def _logprobs(self, index: int, pieces: Sequence[Piece], *, begins: bool = False) -> dict[str, Any] | None:
        """Log-probabilities in the shape of completions; None where they were not requested.

        ``begins``: those of an echoed prompt come first.
        """
        if self._body.logprobs is None:
            return None
        before = len(self._before(index))
        tokens: list[NewToken] = [token for piece in pieces for token in piece.tokens]
        offsets = [before + offset for piece in pieces for offset in piece.offsets]
        if begins and self._echoed:
            prompt = self._read[index // self._generation.n]
            tokens, offsets = [*prompt, *tokens], [*self._offsets(index, prompt), *offsets]
        return {
            "tokens": [self._text(token.token_id) for token in tokens],
            "token_logprobs": [max(token.logprob, -9999.0) if token.logprob is not None else None for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": offsets,
        }

    def _likeliest(self, token: NewToken) -> dict[str, float] | None:
        """With the token itself, whether it is one of them or not. Of those with the same text, the likeliest."""
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for of, logprob in (*token.top[: self._body.logprobs], (token.token_id, token.logprob)):
            found.setdefault(self._text(of), max(logprob, -9999.0))
        return found

    def _offsets(self, index: int, prompt: Sequence[NewToken]) -> list[int]:
        """Where each token of a prompt begins in its text, which may lack the token that begins every text."""
        decode = partial(self._service.chats.decode, special=isinstance(_prompts(self._body.prompt)[0], str))
        detokenizer, starts = Detokenizer(decode), [0]
        for token in prompt:
            starts.append(starts[-1] + len(detokenizer.add(token.token_id)))
        whole = starts.pop() + len(detokenizer.end())
        return [max(0, start + len(self._before(index)) - whole) for start in starts]

    def _prompt_logprobs(self, index: int) -> list[dict[str, Any] | None]:
        """Log-probabilities of a prompt in vLLM's shape."""

        def entry(token: NewToken) -> dict[str, Any] | None:
            if token.logprob is None:
                return None
            likeliest = enumerate(token.top[: self._body.prompt_logprobs], start=1)
            found = {of: (logprob, rank) for rank, (of, logprob) in likeliest if of != token.token_id}
            return {
                str(of): {"logprob": max(logprob, -9999.0), "rank": rank, "decoded_token": self._text(of)}
                for of, (logprob, rank) in [(token.token_id, (token.logprob, token.rank)), *found.items()]
            }

        return [entry(token) for token in self._read[index // self._generation.n]]

    def _text(self, token_id: int) -> str:
        return self._service.token_bytes(token_id).decode(errors="replace")
