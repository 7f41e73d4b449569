"""Generates after several prompts together, in the loop of the batch runner, driven by the caller's thread.

Used by ``generate_batch``. Invariants: each prompt has the tokens it would have alone, up to rounding; what the loop
cannot serve is answered one by one; whatever fails, everything is released.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kvboost.core.costs import StageClock
from kvboost.core.session import Session
from kvboost.engine.single import Generator, Request
from kvboost.errors import KVBoostError
from kvboost.hf.generate import end_token_ids
from kvboost.hf.joint import JointPrefill
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

    def run(
        self,
        session: Session | None,
        requests: Sequence[Request],
        mode: GenerationMode,
        *,
        done: Callable[[], Any] = lambda: None,
    ) -> list[GenerationResult]:
        """A result for each prompt. ``done`` is called after each, in whatever order they end."""
        found: dict[int, GenerationResult] = {}
        if session is not None:
            joint = {
                number: request
                for number, request in enumerate(requests)
                if self._generator.usable(session, request.tokens, mode, request)[0] and _fits(session, request)
            }
            found = self._together(session, joint, approx=mode is GenerationMode.CHUNK_KV_REUSE, done=done)
        for number, request in enumerate(requests):
            if number not in found:
                found[number] = self._generator.run(session, request, mode, StageClock())
                done()
        return [found[number] for number in range(len(requests))]

    def _together(
        self, session: Session, requests: dict[int, Request], *, approx: bool, done: Callable[[], Any]
    ) -> dict[int, GenerationResult]:
        """The results of those requests that can run together, by number.

        None with arguments that want Transformers' own loop, such as beams.
        """
        if len(requests) < 2:
            return {}
        drawn = drawings(
            self._model,
            [request.tokens for request in requests.values()],
            [request.arguments for request in requests.values()],
            tokenizer=self._tokenizer,
        )
        joint = [
            (number, request, drawing)
            for (number, request), drawing in zip(requests.items(), drawn, strict=True)
            if drawing is not None
        ]
        if len(joint) < 2:
            return {}
        finished: dict[RunningJob, Finished] = {}
        jobs = {number: self._job(session, request, drawing) for number, request, drawing in joint}
        for job in jobs.values():
            job.ticket.listen(partial(_keep_last, finished, job, done))
        limits = Limits(
            max_running=_MAX_JOINT,
            max_waiting=len(jobs),
            kv_bytes=_kv_bytes(session),
            chunk_budget=sys.maxsize,  # nobody waits for a token: prompts are prefilled first
            max_step=session.prefiller.rule.max_tokens,
            max_wait_steps=sys.maxsize,
        )
        rules = LoopRules(approx=approx, raises=True)
        loop = JobLoop(self._parts, self._probed(), limits, bytes_for=session.budget.bytes_for, rules=rules)
        loop.run(list(jobs.values()))
        return {number: self._result(job, finished[job]) for number, job in jobs.items()}

    def _job(self, session: Session, request: Request, drawing: Drawing) -> RunningJob:
        job = Job(
            token_ids=tuple(request.tokens),
            boundaries=tuple(request.boundaries),
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=frozenset(end_token_ids(self._model, request.arguments)),
            drawing=drawing,
            tenant=session.tenant,
        )
        running = RunningJob(
            job, session=session, ticket=Ticket(lambda: None), parts=self._parts, waits_for_tiers=False
        )
        running.adapter = request.adapter
        return running

    @property
    def joint_prefill(self) -> JointPrefill | None:
        """What prefills several prompts in one forward; None where each is prefilled alone."""
        return self._probed().prefill

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


def _kv_bytes(session: Session) -> int:
    """What requests that run together may hold."""
    return session.budget.limit or session.budget.jobs_bytes


def _fits(session: Session, request: Request) -> bool:
    limit = session.limits.exact_limit
    if limit is not None and request.total_tokens > limit:
        return False
    return session.budget.bytes_for(request.total_tokens) <= _kv_bytes(session)


def _keep_last(
    finished: dict[RunningJob, Finished], job: RunningJob, done: Callable[[], Any], event: NewToken | Finished
) -> None:
    if isinstance(event, Finished):
        finished[job] = event
        done()
