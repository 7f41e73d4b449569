"""Scores: how probable texts are after a context, with the context's KV reused and stored.

Called by :class:`kvboost.KVBoost`. What is missing of a context and all its continuations run in one forward over one
copy of its KV, if the model's numerics allow it. Invariants: a score has the same bits warm and cold, alone and beside
others, where prefills have; no approximate KV is ever used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.core.costs import StageClock
from kvboost.core.session import Session
from kvboost.engine.parts import EngineParts
from kvboost.engine.single import open_prefill
from kvboost.errors import ConfigError
from kvboost.hf.prompt import Prompt, PromptEncoder
from kvboost.types import GenerationMode, ReuseReport, Score

_Top = tuple[tuple[int, float], ...]
"""Token ids with their log-probabilities."""


def score_many(
    parts: EngineParts,
    session: Session | None,
    pairs: Sequence[tuple[Prompt, Sequence[Prompt]]],
    *,
    progress: bool,
    top: int | None,
) -> list[list[Score]]:
    """The scores of each pair's continuations, in their order; with ranks and the ``top`` likeliest, if not None."""
    if top is not None and top < 0:
        raise ConfigError(f"top_logprobs={top} is no number of tokens; give 0 or more, or None for no ranks")
    # By context, whoever gave it: which pair, which place in it, and the tokens of the continuation.
    jobs: dict[tuple[int, ...], list[tuple[int, int, list[int]]]] = {}
    for number, (text, continuations) in enumerate(pairs):
        for place, (context, tokens) in enumerate(_encoded(parts.encoder, text, continuations)):
            jobs.setdefault(tuple(context), []).append((number, place, tokens))
    found: list[dict[int, Score]] = [{} for _ in pairs]
    for context, wanted in tqdm(sorted(jobs.items()), unit="context", desc="scoring", disable=not progress, delay=2):
        following = [tokens for _, _, tokens in wanted]
        # Plain Transformers reads a context and what follows it at once: with the frequencies of that length.
        whole = [*context, *max(following, key=len)]
        usable, refusal = parts.generator.usable(session, whole, GenerationMode.PREFIX_CACHE)
        if parts.layout is not None and parts.layout.indexed:
            usable, refusal = None, "its sparse attention chooses other positions behind a cache"
        scores = _score(parts, usable, list(context), following, refusal=refusal, top=top)
        for (number, place, _), score in zip(wanted, scores, strict=True):
            found[number][place] = score
    return [[of_pair[place] for place in range(len(of_pair))] for of_pair in found]


def _encoded(
    encoder: PromptEncoder, context: Prompt, continuations: Sequence[Prompt]
) -> Iterator[tuple[list[int], list[int]]]:
    """The tokens of the context and of each continuation: texts may end a context at different tokens."""
    if isinstance(continuations, str):
        raise ConfigError("continuations is a list of texts; give [text] for a single one")
    for place, continuation in enumerate(continuations):
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


def _score(
    parts: EngineParts,
    session: Session | None,
    context: list[int],
    continuations: Sequence[list[int]],
    *,
    refusal: str | None,
    top: int | None,
) -> list[Score]:
    """The score of each continuation. Without a session nothing is reused, for the reason ``refusal``."""
    clock = StageClock()
    # Those that differ in their last token only, as single tokens do, are read once.
    wanted: dict[tuple[int, ...], list[int]] = {}
    for number, following in enumerate(continuations):
        wanted.setdefault((context[-1], *following[:-1]), []).append(number)
    read = list(wanted)
    found: list[list[tuple[float, bool, int, _Top]]] = [[] for _ in continuations]

    def take(index: int, start: int, logprobs: torch.Tensor) -> None:
        best, likeliest = logprobs.argmax(dim=-1), _likeliest(logprobs, top or 0)
        for number in wanted[read[index]]:
            ids = torch.tensor(continuations[number][start : start + len(logprobs)], device=logprobs.device)
            each = logprobs.gather(1, ids[:, None])
            ranks = (1 + (logprobs > each).sum(dim=-1) if top is not None else ids).tolist()
            found[number] += zip(each[:, 0].tolist(), (best == ids).tolist(), ranks, likeliest, strict=True)

    if session is None:
        for index, tokens in enumerate(read):
            logits = parts.runner.last_logits([*context[:-1], *tokens], None, keep=len(tokens))
            take(index, 0, logits.float().log_softmax(dim=-1))
        report = ReuseReport(0, 0, 0, len(context), bitwise=True, timings_ms=clock.stages(), reason=refusal)
    else:
        longest = max(map(len, read), default=0)
        session.budget.check(len(context) + longest, why="scores read all of it at once")
        with open_prefill(session, context, boundaries=(), clock=clock, new_tokens=longest) as state:
            if len(context) - state.num_computed > parts.scorer.most:
                session.prefiller.advance(state, to=len(context) - 1)
            missing, after = context[state.num_computed :], [tokens[1:] for tokens in read]
            for part in parts.scorer.score(missing, after, state.cache):
                take(part.sequence, part.start, part.logprobs)
            if state.cache.get_seq_length() == len(context):
                state.computed(len(context))
            session.prefiller.commit(state)
            clock.lap("score")
            report = state.report()
    scores = []
    for following, each in zip(continuations, found, strict=True):
        logprobs, greedy, places, likeliest = zip(*each, strict=True)
        more = {"ranks": places, "top": likeliest} if top is not None else {}
        scores.append(Score(tuple(following), logprobs, all(greedy), report, **more))
    return scores


def _likeliest(logprobs: torch.Tensor, count: int) -> list[_Top]:
    """For each row of [tokens, vocab] its likeliest ids."""
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
