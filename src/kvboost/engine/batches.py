"""Generates after several prompts together, in the loop of the batch runner, driven by the caller's thread.

Used by ``generate_batch``. Invariants: each prompt has the tokens it would have alone, up to rounding; what the loop
cannot serve is answered one by one; whatever fails, everything is released.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvboost.core.costs import StageClock
from kvboost.core.session import Session
from kvboost.engine.single import Generator, Request
from kvboost.errors import ConfigError, KVBoostError
from kvboost.hf.generate import end_token_ids, speculates
from kvboost.hf.prompt import PromptEncoder
from kvboost.hf.sampling import Drawing, drawings
from kvboost.scheduler.forwards import Forwards
from kvboost.scheduler.jobs import Finished, Job, ModelParts, NewToken, Ticket
from kvboost.scheduler.loop import JobLoop, LoopRules
from kvboost.scheduler.queue import Limits
from kvboost.scheduler.sequence import RunningJob
from kvboost.types import GenerationMode, GenerationResult

_MAX_JOINT = 256  # sequences of one forward


class Batches:
    """Generates together with one model. Thread-safe."""

    def __init__(self, generator: Generator, *, encoder: PromptEncoder, tokenizer: Any, parts: ModelParts) -> None:
        self._generator, self._model, self._parts = generator, parts.runner.model, parts
        self._encoder, self._tokenizer = encoder, tokenizer
        self._lock = threading.Lock()
        self._forwards: Forwards | None = None

    def run(self, session: Session | None, requests: Sequence[Request], mode: GenerationMode) -> list[GenerationResult]:
        """A result for each prompt. The requests have the same arguments."""
        arguments = requests[0].arguments
        if len(requests) > 1 and speculates(self._model, arguments):
            raise ConfigError(
                "a draft proposes for one prompt at a time; leave it out of the batch (prompt_lookup_num_tokens=None "
                "if the model's generation_config enables it), or use generate()"
            )
        if (allowed := arguments.get("prefix_allowed_tokens_fn")) is not None:
            requests = [_with_number(request, allowed, number) for number, request in enumerate(requests)]
        usable, _ = self._generator.usable(session, [], mode, requests[0])
        found: dict[int, GenerationResult] = {}
        if usable is not None:
            found = self._together(usable, requests, approx=mode is GenerationMode.CHUNK_KV_REUSE)
        for number, request in enumerate(requests):
            if number not in found:
                found[number] = self._generator.run(session, request, mode, StageClock())
        return [found[number] for number in range(len(requests))]

    def _together(self, session: Session, requests: Sequence[Request], *, approx: bool) -> dict[int, GenerationResult]:
        """The results of those requests that can run together, by number.

        None of them can with arguments that want Transformers' own loop, such as beams.
        """
        kv_bytes = session.budget.limit or session.budget.jobs_bytes
        joint = {number: request for number, request in enumerate(requests) if _fits(session, request, kv_bytes)}
        if len(joint) < 2:
            return {}
        drawn = drawings(
            self._model,
            [request.tokens for request in joint.values()],
            [request.arguments for request in joint.values()],
            tokenizer=self._tokenizer,
        )
        if drawn is None:
            return {}
        ends = frozenset(end_token_ids(self._model, requests[0].arguments))
        jobs = [self._job(session, *each, ends) for each in zip(joint.values(), drawn, strict=True)]
        finished: dict[RunningJob, Finished] = {}
        for job in jobs:
            job.ticket.listen(partial(_keep_last, finished, job))
        limits = Limits(
            max_running=_MAX_JOINT,
            max_waiting=len(jobs),
            kv_bytes=kv_bytes,
            chunk_budget=sys.maxsize,  # nobody waits for a token: prompts are prefilled first
            max_step=session.prefiller.rule.max_tokens,
            max_wait_steps=sys.maxsize,
        )
        rules = LoopRules(approx=approx, raises=True)
        loop = JobLoop(self._parts, self._probed(), limits, bytes_for=session.budget.bytes_for, rules=rules)
        loop.run(jobs)
        return {number: self._result(job, finished[job]) for number, job in zip(joint, jobs, strict=True)}

    def _job(self, session: Session, request: Request, drawing: Drawing, ends: frozenset[int]) -> RunningJob:
        job = Job(
            token_ids=tuple(request.tokens),
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=ends,
            drawing=drawing,
            tenant=session.tenant,
        )
        running = RunningJob(
            job, session=session, ticket=Ticket(lambda: None), parts=self._parts, waits_for_tiers=False
        )
        running.adapter = request.adapter
        return running

    def _probed(self) -> Forwards:
        with self._lock:
            if self._forwards is None:
                layout = self._parts.layout
                assert layout is not None
                self._forwards = Forwards.probe(self._parts.runner, layout)
            return self._forwards

    def _result(self, job: RunningJob, end: Finished) -> GenerationResult:
        if end.error is not None or end.report is None:
            raise KVBoostError(end.error or "a prompt of the batch has no answer")
        new, prompt = job.generated, job.job.token_ids
        return GenerationResult(
            output_text=self._encoder.decode(new),
            token_ids=tuple(new),
            prompt_token_ids=prompt,
            finish_reason=end.reason,
            ttft_ms=1000.0 * (end.first_token_seconds or 0.0),
            total_ms=1000.0 * (end.seconds or 0.0),
            reuse=end.report,
            raw=torch.tensor([[*prompt, *new]], device=self._parts.runner.device),
        )


def _fits(session: Session, request: Request, kv_bytes: int) -> bool:
    limit = session.limits.exact_limit
    if limit is not None and request.total_tokens > limit:
        return False
    return session.budget.bytes_for(request.total_tokens) <= kv_bytes


def _keep_last(finished: dict[RunningJob, Finished], job: RunningJob, event: NewToken | Finished) -> None:
    if isinstance(event, Finished):
        finished[job] = event


def _with_number(request: Request, allowed: Callable[[int, Any], Any], number: int) -> Request:
    """The request with its number among the prompts, which Transformers gives to ``prefix_allowed_tokens_fn``."""

    def of_this_prompt(_: int, ids: Any) -> Any:
        return allowed(number, ids)

    return replace(request, arguments={**request.arguments, "prefix_allowed_tokens_fn": of_this_prompt})
