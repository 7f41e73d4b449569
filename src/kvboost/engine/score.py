"""Scores: how probable texts are after a context, with the context's KV reused and stored.

Called by :class:`kvboost.KVBoost`. What is missing of some contexts and all their continuations run in one forward,
over one copy of each one's KV, if the model's numerics allow it. Invariants: a score has the same bits warm and cold,
alone and beside others, where prefills have; no approximate KV is ever used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import ExitStack

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.capacity import MAX_IDLE
from kvboost.core.costs import StageClock
from kvboost.core.session import Session
from kvboost.engine.parts import EngineParts
from kvboost.engine.single import open_prefill
from kvboost.errors import ConfigError
from kvboost.hf.prompt import Prompt, PromptEncoder
from kvboost.hf.scoring import Text
from kvboost.types import GenerationMode, ReuseReport, Score

_Top = tuple[tuple[int, float], ...]
"""Token ids with their log-probabilities."""

_AT_ONCE = MAX_IDLE  # contexts in one forward: each needs a cache, and so many are kept
_ROWS_AT_ONCE = 512  # of one forward; with more of them a row is hardly cheaper
_COMPUTED_AGAIN = 32  # tokens that contexts share and that are not worth a forward of their own


class _Job:
    """A context, and all that may follow it."""

    def __init__(self, context: list[int], continuations: list[list[int]], *, top: int) -> None:
        """Of the likeliest tokens ``top`` are found, too."""
        self.context, self.continuations, self._top = context, continuations, top
        self.found: list[list[tuple[float, bool, int, _Top]]] = [[] for _ in continuations]
        # Those that differ in their last token only, as single tokens do, are read once.
        self._numbers: dict[tuple[int, ...], list[int]] = {}
        for number, tokens in enumerate(continuations):
            self._numbers.setdefault(tuple(tokens[:-1]), []).append(number)
        self.following = dict(enumerate(self._numbers))

    @property
    def total(self) -> int:
        """Tokens of the context and the longest that follows it."""
        return len(self.context) + max(map(len, self.following.values()))

    def take(self, index: int, start: int, logprobs: torch.Tensor) -> None:
        """What follows the context and some tokens of a sequence."""
        best, likeliest = logprobs.argmax(dim=-1), _likeliest(logprobs, self._top)
        for number in self._numbers[self.following[index]]:
            ids = torch.tensor(self.continuations[number][start : start + len(logprobs)], device=logprobs.device)
            each = logprobs.gather(1, ids[:, None])
            ranks = 1 + (logprobs > each).sum(dim=-1)
            told = each[:, 0].tolist(), (best == ids).tolist(), ranks.tolist(), likeliest
            self.found[number] += zip(*told, strict=True)

    def scores(self, report: ReuseReport) -> list[Score]:
        """Of its continuations."""
        scores = []
        for tokens, each in zip(self.continuations, self.found, strict=True):
            logprobs, greedy, ranks, likeliest = zip(*each, strict=True)
            scores.append(Score(tuple(tokens), logprobs, all(greedy), report, ranks, likeliest))
        return scores


def _likeliest(logprobs: torch.Tensor, count: int) -> list[_Top]:
    """For each row of [tokens, vocab] its likeliest ids."""
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


def score_many(
    parts: EngineParts,
    session: Session | None,
    pairs: Sequence[tuple[Prompt, Sequence[Prompt]]],
    *,
    progress: bool,
    top: int,
) -> list[list[Score]]:
    """The scores of each pair's continuations, in their order, with the ``top`` likeliest tokens."""
    if top < 0:
        raise ConfigError(f"top_logprobs={top} is no number of tokens; give 0 or more")
    for number, pair in enumerate(pairs):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ConfigError(f"entry {number} is not a pair of a context and a list of its continuations")
    # By context, whoever gave it: which pair, which place in it, and the tokens of the continuation.
    wanted: dict[tuple[int, ...], list[tuple[int, int, list[int]]]] = {}
    for number, (text, continuations) in enumerate(pairs):
        for place, (context, tokens) in enumerate(_encoded(parts.encoder, text, continuations)):
            wanted.setdefault(tuple(context), []).append((number, place, tokens))
    found: list[dict[int, Score]] = [{} for _ in pairs]
    with tqdm(total=len(wanted), unit="context", desc="scoring", disable=not progress, delay=2) as bar:
        for jobs, scores in _scored(parts, session, sorted(wanted.items()), top=top):
            for job, of_job in zip(jobs, scores, strict=True):
                for (number, place, _), score in zip(wanted[tuple(job.context)], of_job, strict=True):
                    found[number][place] = score
            bar.update(len(jobs))
    return [[of_pair[place] for place in range(len(of_pair))] for of_pair in found]


def _scored(
    parts: EngineParts,
    session: Session | None,
    wanted: Sequence[tuple[tuple[int, ...], Sequence[tuple[int, int, list[int]]]]],
    *,
    top: int,
) -> Iterator[tuple[list[_Job], list[list[Score]]]]:
    """Contexts with their scores, as many at a time as are read together."""
    ready: list[_Job] = []
    for context, following in wanted:
        job = _Job(list(context), [tokens for _, _, tokens in following], top=top)
        # Plain Transformers reads a context and what follows it at once: with the frequencies of that length.
        whole = [*context, *max(job.following.values(), key=len)]
        usable, refusal = parts.generator.usable(session, whole, GenerationMode.PREFIX_CACHE)
        if parts.layout is not None and parts.layout.indexed:
            usable, refusal = None, "its sparse attention chooses other positions behind a cache"
        if usable is None:
            yield [job], [_plain(parts, job, refusal)]
        else:
            ready.append(job)
    if session is not None:
        for group in _groups(parts, session, ready):
            yield group, _read(parts, session, group)


def _groups(parts: EngineParts, session: Session, jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Contexts that are read together, in their order: none of them waits for what another one computes."""
    group: list[_Job] = []
    stored = rows = 0
    before: list[int] = []
    memory = session.budget.limit if session.budget.limit is not None else session.budget.jobs_bytes
    for job in jobs:
        shared = next((at for at, (a, b) in enumerate(zip(job.context, before, strict=False)) if a != b), len(before))
        more = len(job.context) - shared + sum(map(len, job.following.values()))
        needed = sum(session.budget.bytes_for(other.total) for other in [*group, job])
        full = len(group) == _AT_ONCE or rows + more > min(_ROWS_AT_ONCE, parts.scorer.most) or needed > memory
        if group and (full or shared > stored + _COMPUTED_AGAIN):
            yield group
            group, rows = [], 0
        if not group:
            stored = shared
        group.append(job)
        rows += more
        before = job.context
    if group:
        yield group


def _read(parts: EngineParts, session: Session, jobs: Sequence[_Job]) -> list[list[Score]]:
    """The scores of contexts that are read together."""
    clock = StageClock()
    with ExitStack() as opened:
        states = []
        for job in jobs:
            session.budget.check(job.total, why="scores read all of it at once")
            new = job.total - len(job.context)
            state = open_prefill(session, job.context, boundaries=(), clock=clock, new_tokens=new)
            states.append(opened.enter_context(state))
        for job, state in zip(jobs, states, strict=True):
            if len(job.context) - state.num_computed > parts.scorer.most:
                session.prefiller.advance(state, to=len(job.context) - 1)
        texts = [
            Text(state.cache, job.context[state.num_computed :], job.following)
            for job, state in zip(jobs, states, strict=True)
        ]
        for part in parts.scorer.score(texts):
            jobs[part.text].take(part.sequence, part.start, part.logprobs)
        for job, state in zip(jobs, states, strict=True):
            if state.cache.get_seq_length() == len(job.context):
                state.computed(len(job.context))
            session.prefiller.commit(state)
        clock.lap("score")
        return [job.scores(state.report()) for job, state in zip(jobs, states, strict=True)]


def _plain(parts: EngineParts, job: _Job, refusal: str | None) -> list[Score]:
    """The scores of a context that reuses nothing, for this reason."""
    clock = StageClock()
    for index, tokens in job.following.items():
        logits = parts.runner.last_logits([*job.context, *tokens], None, keep=len(tokens) + 1)
        job.take(index, 0, logits.float().log_softmax(dim=-1))
    report = ReuseReport(0, 0, 0, len(job.context), bitwise=True, timings_ms=clock.stages(), reason=refusal)
    return job.scores(report)


def _encoded(
    encoder: PromptEncoder, context: Prompt, continuations: Sequence[Prompt]
) -> Iterator[tuple[list[int], list[int]]]:
    """The tokens of the context and of each continuation: texts may end a context at different tokens."""
    if isinstance(continuations, str):
        raise ConfigError("continuations is a list of texts; give [text] for a single one")
    for place, continuation in enumerate(continuations):
        if not isinstance(context, Sized) or not isinstance(continuation, Sized):
            raise ConfigError("a context and a continuation are texts or lists of token ids")
        if not len(context):
            raise ConfigError("a score needs a context of at least one token; begin with the tokenizer's bos_token")
        before, tokens = encode_pair(encoder, context, continuation) if len(continuation) else ([0], [])
        if not before or not tokens:
            raise ConfigError(f"continuation {place} has no tokens of its own after the context; leave it out")
        yield before, tokens


def encode_pair(encoder: PromptEncoder, context: Prompt, continuation: Prompt) -> tuple[list[int], list[int]]:
    """The tokens of a context and of what follows it, cut where lm-eval cuts them: texts are encoded as one."""
    if not isinstance(context, str) or not isinstance(continuation, str):
        return encoder.encode(context), encoder.encode_part(continuation)
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation, context = context[-spaces:] + continuation, context[:-spaces]
    before, whole = encoder.encode(context), encoder.encode(context + continuation)
    return before, whole[len(before) :]
