"""Whether a job can run at all, and with how many new tokens: asked once, before it waits.

Used by :mod:`kvboost.scheduler.runner`. Invariant: what is refused is refused with a reason and what to do;
what passes fits the model's positions.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from kvboost.core.prefill import Prefiller
from kvboost.engine.assembly import Assembly
from kvboost.engine.engine import KVBoost
from kvboost.errors import CapacityError, ConfigError
from kvboost.scheduler.jobs import Job
from kvboost.scheduler.sampler import check_sampling
from kvboost.types import GenerationMode


def checked_job(job: Job, engine: KVBoost, *, parts: Assembly, vocab_size: int, kv_bytes: int) -> tuple[Prefiller, Job]:
    """Who reads the job, and the job with no more new tokens than there are positions."""
    tokens = engine.encode(job.token_ids)
    if job.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={job.max_new_tokens} must be at least 1")
    if any(not 0 <= boundary <= len(tokens) for boundary in job.boundaries):
        raise ConfigError(f"boundaries must lie in 0..{len(tokens)}, the prompt's length in tokens")
    if job.top_logprobs is not None and job.top_logprobs < 0:
        raise ConfigError(f"top_logprobs={job.top_logprobs} is negative; give None for no log-probabilities")
    check_sampling(job.sampling, vocab_size=vocab_size)
    if job.may_shorten:
        most = _most_new(len(tokens), job.max_new_tokens, engine, parts=parts, kv_bytes=kv_bytes)
        job = replace(job, max_new_tokens=most)
    facts = parts.facts
    if facts.exact_limit is not None and len(tokens) + job.max_new_tokens > facts.exact_limit:
        raise CapacityError(
            f"{len(tokens)} tokens and {job.max_new_tokens} new ones are more than can be batched here "
            f"({facts.exact_limit_reason}); shorten the prompt, lower max_new_tokens or use engine.generate"
        )
    reader, reason = engine._reader_for(tokens, GenerationMode.CHUNK_KV_REUSE)
    if reader is None:
        raise CapacityError(f"this prompt cannot be batched ({reason}); use engine.generate")
    room = job.max_new_tokens if facts.max_positions is None else facts.max_positions - len(tokens)
    if room < 1:
        raise CapacityError(
            f"the prompt fills all {facts.max_positions} positions of this model, so there is no room for a reply; "
            "shorten it"
        )
    new = min(job.max_new_tokens, room)
    engine._check_budget(len(tokens) + new, why="jobs side by side are not paged (engine.generate is)")
    return reader, replace(job, token_ids=tuple(tokens), max_new_tokens=new)


def _most_new(prompt_tokens: int, wanted: int, engine: KVBoost, *, parts: Assembly, kv_bytes: int) -> int:
    """How many of the wanted new tokens there is room for, and one where there is none: that is refused later."""
    exact_limit = parts.facts.exact_limit

    def too_many(new: int) -> bool:
        rows = prompt_tokens + new
        beyond = exact_limit is not None and rows > exact_limit
        return beyond or parts.pool.bytes_for(rows) > kv_bytes or engine._too_small(rows) is not None

    return max(1, bisect_left(range(1, wanted + 1), True, key=too_many))
