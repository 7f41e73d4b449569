"""Checks an engine before its jobs are batched, and a job before it is queued; limits the job's new tokens.

Used by :mod:`kvboost.scheduler.runner`. Invariant: a refusal gives the reason and a remedy; an accepted job fits the
model's positions.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from dataclasses import replace

from kvboost.core.session import Session
from kvboost.errors import CapacityError, ConfigError
from kvboost.hf.cache import KVLayout
from kvboost.scheduler.jobs import BatchEngine, Job


def checked_engine(engine: BatchEngine, *, deterministic: bool) -> tuple[Session, KVLayout]:
    """The engine's session and the layout of its KV. Called by the runner's constructor, whose caller is warned."""
    session, layout = engine.session, engine.parts.layout
    if session is None or layout is None:
        raise ConfigError(f"jobs cannot be batched with this model ({engine.parts.refusal}); use engine.generate")
    if deterministic and (engine.config.reuse_generated or engine.config.kv_cache_bits != 16):
        raise ConfigError(
            "deterministic needs an engine with reuse_generated=False and kv_cache_bits=16: otherwise an answer "
            "depends on what was stored before"
        )
    if deterministic and not session.prefiller.rule.is_bitwise:
        raise ConfigError(
            "deterministic needs an engine with numerics='bitwise': with 'fast', the default on accelerators, an "
            "answer depends on what was stored before"
        )
    if engine.config.draft is not None:
        warnings.warn(
            "batched jobs are decoded without the engine's draft; engine.generate uses it", RuntimeWarning, stacklevel=3
        )
    return session, layout


def checked_job(job: Job, engine: BatchEngine, *, vocab_size: int, kv_bytes: int) -> tuple[Job, Session]:
    """The job, with its new tokens limited to the model's positions, and the session of its tenant."""
    engine.parts.check_open()
    if job.adapter is not None and job.adapter not in engine.parts.loaded_adapters:
        raise ConfigError(f"there is no adapter {job.adapter!r}; load it with engine.load_adapter()")
    session = (engine.for_tenant(job.tenant) if job.tenant else engine).session
    assert session is not None
    job = replace(job, token_ids=tuple(engine.encode(job.token_ids)))
    prompt = len(job.token_ids)
    if job.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={job.max_new_tokens} must be at least 1")
    if any(not 0 <= boundary <= prompt for boundary in job.boundaries):
        raise ConfigError(f"boundaries must lie in 0..{prompt}, the prompt's length in tokens")
    if job.top_logprobs is not None and job.top_logprobs < 0:
        raise ConfigError(f"top_logprobs={job.top_logprobs} is negative; give None for no log-probabilities")
    job.sampling.check(vocab_size=vocab_size)
    if job.may_shorten:
        job = replace(job, max_new_tokens=_max_new(prompt, job.max_new_tokens, session, kv_bytes=kv_bytes))
    limits = session.limits
    if limits.exact_limit is not None and prompt + job.max_new_tokens > limits.exact_limit:
        raise CapacityError(
            f"{prompt} tokens and {job.max_new_tokens} new ones are more than can be batched here "
            f"({limits.exact_limit_reason}); shorten the prompt, lower max_new_tokens or use engine.generate"
        )
    left = job.max_new_tokens if limits.max_positions is None else limits.max_positions - prompt
    if left < 1:
        raise CapacityError(
            f"the prompt fills all {limits.max_positions} positions of this model, so none is left for a reply; "
            "shorten it"
        )
    return replace(job, max_new_tokens=min(job.max_new_tokens, left)), session


def _max_new(prompt_tokens: int, requested: int, session: Session, *, kv_bytes: int) -> int:
    """How many of the requested new tokens fit; at least one, which is refused later if it does not."""
    exact_limit = session.limits.exact_limit

    def too_many(new: int) -> bool:
        tokens = prompt_tokens + new
        return (exact_limit is not None and tokens > exact_limit) or session.budget.bytes_for(tokens) > kv_bytes

    return max(1, bisect_left(range(1, requested + 1), True, key=too_many))
