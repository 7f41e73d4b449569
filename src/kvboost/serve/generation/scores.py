"""Log-probabilities of texts that clients give, from the engine's scorer: exact KV only, the same bits warm and cold.

Used by the endpoints that score prompts and pairs, inside of ``Service.generating``. Invariants: one thread reads one
piece of a request after another, and other tenants have their turns between two; it takes the model as every caller of
the engine does, beside the runner's jobs; a piece that nobody waits for any more is not begun.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvboost.errors import CapacityError, ConfigError
from kvboost.hf.adapters import AS_SET
from kvboost.scheduler.jobs import NewToken
from kvboost.serve.errors import ApiError, bad_request
from kvboost.serve.generation.requests import Answer
from kvboost.serve.generation.service import Service
from kvboost.serve.generation.token_stream import Ended
from kvboost.types import ReuseReport, Score

_PIECE = 1024  # tokens, or one longer text
_MAX_EXPONENT = 700.0  # e to a larger number is no float


@dataclass(frozen=True)
class Question:
    """What is asked of several documents."""

    shared: list[int]
    """What all prompts begin with: the instruction and the query."""
    tails: list[list[int]]
    """How each goes on, up to the answer."""
    yes: int
    no: int
    """The first token of each answer."""


@dataclass(frozen=True)
class PromptToken(NewToken):
    """A token of a prompt."""

    rank: int | None = None
    """Among all that could stand there; None for the first of a prompt, which follows nothing."""


async def prompt_tokens(service: Service, answer: Answer, ids: Sequence[int], *, top: int) -> list[PromptToken]:
    """The tokens of a prompt with their log-probabilities. All of it is computed: reused tokens have none."""
    found = [PromptToken(ids[0])]
    for start in range(1, len(ids), _PIECE):
        tokens = ids[start : start + _PIECE]
        [score] = await _scores(service, answer, ids[:start], [tokens], top=top)
        found += map(PromptToken, tokens, score.logprobs, score.top, score.ranks)
    if answer.request.max_new_tokens == 0:
        report = ReuseReport(0, 0, 0, len(ids), bitwise=True, reason="log-probabilities of a prompt need all of it")
        answer.read += [report] * answer.request.n
    return found


async def relevances(service: Service, answer: Answer, question: Question) -> list[float]:
    """For each document p(yes) / (p(yes) + p(no)). What the prompts share is read once, and stored."""
    found: list[float] = []
    for tails in _pieces(question.tails):
        both = [[*tail, word] for tail in tails for word in (question.yes, question.no)]
        scores = await _scores(service, answer, question.shared, both)
        for tail, yes, no in zip(tails, scores[::2], scores[1::2], strict=True):
            difference = min(no.logprobs[-1] - yes.logprobs[-1], _MAX_EXPONENT)
            found.append(1 / (1 + math.exp(difference)))
            answer.read.append(_report(yes.reuse, len(question.shared), len(tail), first=tail is tails[0]))
    return found


def _pieces(tails: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    piece: list[list[int]] = []
    for tail in tails:
        if piece and sum(map(len, piece)) + len(tail) > _PIECE:
            yield piece
            piece = []
        piece.append(tail)
    yield piece


def _report(shared: ReuseReport, tokens: int, tail: int, *, first: bool) -> ReuseReport:
    """Of one prompt: only the first of a piece may have computed what they share; the others repeat its last token."""
    if first:
        return replace(shared, fresh_tokens=shared.fresh_tokens + tail, segments=())
    return ReuseReport(tokens - 1, 0, 0, tail + 1, bitwise=shared.bitwise, reason=shared.reason)


async def _scores(
    service: Service,
    answer: Answer,
    context: Sequence[int],
    continuations: Sequence[Sequence[int]],
    *,
    top: int | None = None,
) -> list[Score]:
    """One piece. Raises ApiError."""
    request = answer.request
    adapter = request.model if request.model in service.adapters else AS_SET

    def score() -> list[Score]:
        engine = service.engine.for_tenant(request.caller.tenant)
        return engine.score(context, continuations, adapter=adapter, top_logprobs=top)

    try:
        return await service.scoring.run(request.caller.tenant, score)
    except (CapacityError, ConfigError) as error:
        answer.ended.append(Ended(reason="error", report=None, refused=True, index=0))
        if isinstance(error, ConfigError):
            raise bad_request(str(error)) from error
        message = f"{request.prompt_param} needs more memory than this server gives to one request; shorten it"
        raise ApiError(413, message, param=request.prompt_param, code="too_large") from error
