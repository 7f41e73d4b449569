"""Log-probabilities of texts that clients give, from the engine's scorer: exact KV only, the same bits warm and cold.

Used by the endpoints that score prompts and pairs, inside of ``Service.generating``. Invariants: one thread reads one
piece of a request after another, and other tenants have their turns between two; it takes the model as every caller of
the engine does, beside the runner's jobs; a piece that nobody waits for any more is not begun.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


async def prompt_tokens(service: Service, answer: Answer, ids: Sequence[int], *, top: int) -> list[NewToken]:
    """The tokens of a prompt with their log-probabilities. All of it is computed: reused tokens have none."""
    found = [NewToken(ids[0])]
    for start in range(1, len(ids), _PIECE):
        tokens = ids[start : start + _PIECE]
        [score] = await _scores(service, answer, ids[:start], [tokens], top=top)
        found += map(NewToken, tokens, score.logprobs, score.top, score.ranks)
    report = ReuseReport(0, 0, 0, len(ids), bitwise=True, reason="log-probabilities of a prompt need all of it")
    answer.read += [report] * answer.request.n
    return found


async def relevances(service: Service, answer: Answer, question: Question) -> list[float]:
    """For each document p(yes) / (p(yes) + p(no)). What the prompts share is read once, and stored."""
    found: list[float] = []
    step = max(1, _PIECE // (1 + max(map(len, question.tails))))
    for start in range(0, len(question.tails), step):
        tails = question.tails[start : start + step]
        both = [[*tail, word] for tail in tails for word in (question.yes, question.no)]
        scores = await _scores(service, answer, question.shared, both)
        for tail, yes, no in zip(tails, scores[::2], scores[1::2], strict=True):
            likelier = max(yes.logprobs[-1], no.logprobs[-1])
            chances = [math.exp(score.logprobs[-1] - likelier) for score in (yes, no)]
            found.append(chances[0] / sum(chances))
            reuse = yes.reuse
            if tail is not tails[0]:  # the first may have computed what they share; the others repeat its last token
                reuse = ReuseReport(len(question.shared) - 1, 0, 0, 1, bitwise=reuse.bitwise, reason=reuse.reason)
            answer.read.append(replace(reuse, fresh_tokens=reuse.fresh_tokens + len(tail), segments=()))
    return found


async def _scores(
    service: Service, answer: Answer, context: Sequence[int], continuations: Sequence[Sequence[int]], *, top: int = 0
) -> list[Score]:
    """One piece. Raises ApiError."""
    request = answer.request
    adapter = request.model if request.model in service.adapters else AS_SET

    def score() -> list[Score]:
        engine = service.engine.for_tenant(request.caller.tenant)
        return engine.score_many([(context, continuations)], adapter=adapter, top_logprobs=top, progress=False)[0]

    try:
        return await service.scoring.run(request.caller.tenant, score)
    except (CapacityError, ConfigError) as error:
        answer.ended.append(Ended(reason="error", report=None, refused=True, index=0))
        if isinstance(error, ConfigError):
            raise bad_request(str(error)) from error
        message = f"{request.prompt_param} needs more memory than this server gives to one request; shorten it"
        raise ApiError(413, message, param=request.prompt_param, code="too_large") from error
