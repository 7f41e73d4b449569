"""The loop over running jobs: schedule, prefill, decode, one step at a time.

Driven by the thread of a :class:`BatchRunner`, or by the caller of ``generate_batch``. Invariants: a job's resources
are released in the step in which it ends, is cancelled or is preempted; an error of one job ends that job only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvboost.core.state import ChunkedPrompt
from kvboost.errors import ConfigError
from kvboost.failures import log_failure
from kvboost.scheduler.forwards import Forwards, JobDecoder, JobPrefiller
from kvboost.scheduler.jobs import ModelParts, sample_batch
from kvboost.scheduler.queue import Limits, Scheduler
from kvboost.scheduler.sequence import RunningJob
from kvboost.types import ModelSnapshot

_ALONE_SECONDS = 1.0  # of a step that nobody waits for now: somebody may come meanwhile
_MAX_REPAIR_BUDGETS = 2  # chunk budgets that a repair may compute in its one step, beside other jobs
_MODEL_CHANGED = "the model's adapter or weights were changed while this job ran; submit it again"

_log = logging.getLogger("kvboost.engine")


class KnownModels:
    """The model's state under each adapter, as the last job of that adapter found it: keys are derived from it.

    A state that is outdated costs a useless load only: a job is opened with the keys of the model as it is.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._models: dict[str, ModelSnapshot] = {}

    def of(self, group: str, *, epoch: int) -> ModelSnapshot | None:
        """The state for jobs of this group; None if none has run since the model changed."""
        return self._models.get(group) if epoch == self._epoch else None

    def saw(self, group: str, model: ModelSnapshot, *, epoch: int) -> None:
        """A job of the group runs with this state."""
        if epoch != self._epoch:
            self._models, self._epoch = {}, epoch
        self._models[group] = model


@dataclass(frozen=True, kw_only=True)
class LoopRules:
    """What differs between the loop of a server and that of a single call."""

    approx: bool
    """Whether text is reused from other positions."""
    repeats_steps: bool = False
    """Whether a job that was preempted repeats the steps it had: steps of other shapes round differently."""
    raises: bool = False
    """Whether an error is raised, which ends the loop, and does not end its own job only."""


class JobLoop:
    """Runs the jobs of one model. Jobs may be added from any thread; one thread at a time takes steps."""

    def __init__(
        self,
        parts: ModelParts,
        forwards: Forwards,
        limits: Limits,
        *,
        bytes_for: Callable[[int], int],
        rules: LoopRules,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        """``begins`` is called before each forward."""
        self._parts, self._bytes_for, self._rules, self._begins = parts, bytes_for, rules, begins
        self.lock = threading.Lock()
        self.scheduler = Scheduler(limits)
        self.decoder = JobDecoder(forwards)
        self._prefiller = JobPrefiller(forwards)
        self._jobs: dict[int, RunningJob] = {}
        self.models = KnownModels()

    def add(self, job: RunningJob, prompt: ChunkedPrompt | None = None, *, loading: bool = False) -> None:
        """Queue a job, with its ``prompt`` if that is cut already. Called with the lock.

        With ``loading`` it waits until its KV is loaded. Raises CapacityError if the job can never fit, BusyError if
        too many are waiting.
        """
        number = self.scheduler.add(
            tenant=job.job.tenant,
            nbytes=self._bytes_for(job.tokens),
            peak=self._bytes_for(job.max_tokens),
            chain=[chunk.prefix_key for chunk in prompt.usable] if prompt is not None else (),
            group=job.group,
            loading=loading,
        )
        self._jobs[number] = job

    def run(self, jobs: Sequence[RunningJob]) -> None:
        """Run these jobs to their end, in this thread. Whatever fails, everything is released."""
        try:
            for job in jobs:
                self.add(job, job.prefiller.chunk(list(job.job.token_ids), job.job.boundaries))
            while self._jobs:
                self.step("")
        finally:
            self.end_all("cancelled")

    def jobs(self) -> list[RunningJob]:
        """All jobs that have not ended. Called with the lock."""
        return list(self._jobs.values())

    def end_all(self, reason: str, *, error: str | None = None) -> None:
        """End every job and release what they hold."""
        for number, _ in self._snapshot():
            self._end(number, reason, error=error)

    def fail_group(self, group: str, error: Exception) -> None:
        """End the jobs of a group that cannot run."""
        for number, job in self._snapshot():
            if job.group == group:
                self._failed(number, error)

    def step(self, group: str) -> None:
        """One step of the jobs of one adapter: schedule, prefill, decode."""
        active = self._parts.active_adapters
        for number, job in self._snapshot():
            if job.ticket.cancelled:
                self._end(number, "cancelled")
            elif job.epoch != self._parts.epoch or (job.group == group and job.adapters not in (None, active)):
                # Its KV is another model's: continuing would mix the two.
                self._end(number, "error", error=_MODEL_CHANGED)
            elif job.fetch is not None:
                with self._own_errors(number):
                    job.fetch.retry()
                    if job.fetch.is_over:
                        with self.lock:
                            self.scheduler.loaded(number)
        self._preempt()
        used = self._admit(group)
        with self.lock:
            decoding = bool(self.scheduler.decoding())
        self._prefill(used=used if decoding else 0)  # the budget protects decoding jobs; without any, it is not spent
        self._grow()
        self._decode()
        with self.lock:
            self.scheduler.tick()

    def _snapshot(self) -> list[tuple[int, RunningJob]]:
        with self.lock:
            return list(self._jobs.items())

    def _preempt(self) -> None:
        while True:
            with self.lock:
                number = self.scheduler.preempt()
                if number is None:
                    return
            self._close(number)

    def _close(self, number: int) -> None:
        """Release the resources of a job that continues later. If that fails, the job ends."""
        with self._own_errors(number):
            self._jobs[number].close()

    def _grow(self) -> None:
        """Ensure capacity for one more token of every job, preempting others if needed."""
        with self.lock:
            numbers = self.scheduler.decoding()
        for number in numbers:
            with self._own_errors(number):
                job = self._jobs.get(number)
                if job is None or not job.is_open or not job.must_grow:
                    continue
                wanted, preempted = self._bytes_for(job.tokens), -1
                while preempted != number:
                    with self.lock:
                        if self.scheduler.grow(number, wanted):
                            self._limit_spare()
                            break
                        preempted = self.scheduler.preempt_for(number, wanted)
                    self._close(preempted)
                if job.is_open:
                    job.grow()

    def _admit(self, group: str) -> int:
        """Open every job that may run now, or load its KV first. Returns the cost in tokens of the chunk budget."""
        used = 0
        while used < self.scheduler.limits.chunk_budget:
            with self.lock:
                number = self.scheduler.admit(group)
                if number is None:
                    break
                job, alone = self._jobs[number], self.scheduler.running == 1
                if must_fetch := job.must_fetch:
                    self.scheduler.postpone(number)
                self._limit_spare()
            with self._own_errors(number):
                if must_fetch:
                    job.begin_fetch(approx=self._rules.approx)
                    used += 1 + self.scheduler.cost_of_copying(len(job.job.token_ids))  # cutting the prompt takes time
                else:
                    self._open(number, job, alone=alone)
                    used += self.scheduler.cost_of_copying(job.state.plan.exact_tokens)
        return used

    def _limit_spare(self) -> None:
        """Free rows that nobody uses where a job needs their memory. Called with the lock."""
        self.decoder.limit_spare(self.scheduler.limits.kv_bytes - self.scheduler.reserved_bytes)

    def _open(self, number: int, job: RunningJob, *, alone: bool) -> None:
        budget = self.scheduler.limits.chunk_budget
        if job.adapters is None:
            job.adapters = self._parts.active_adapters
        job.open(
            approx=self._rules.approx,
            max_repaired=None if alone else _MAX_REPAIR_BUDGETS * budget,
            prefill_answer=not self._rules.repeats_steps,
        )
        self.models.saw(job.group, job.state.prompt.snapshot.model, epoch=job.epoch)
        with self.lock:
            self.scheduler.opened(
                number,
                available=job.chunks_available(),
                will_provide=job.chunks_provided(),
                steps=job.steps_left(),
                held=job.cached_bytes,
            )

    def _prefill(self, *, used: int) -> None:
        """Prefill until this step's budget is spent."""
        while True:
            with self.lock:
                budget = self._budget()
                for number in self.scheduler.prefilling():
                    job = self._jobs[number]
                    if job.max_step != budget:
                        job.max_step = budget
                        self.scheduler.prefilled(number, available=job.chunks_available(), steps=job.steps_left())
                next_ones = self.scheduler.next_prefill(used=used, budget=budget)
                jobs = {self._jobs[number]: number for number in next_ones}
            if not jobs:
                return
            for job in [job for job in jobs if job.ticket.cancelled]:
                self._end(jobs.pop(job), "cancelled")
            used += sum(job.steps_left()[0] for job in jobs)
            for (job, number), result in zip(jobs.items(), self._prefiller.run(list(jobs)), strict=True):
                self._begins()  # the next forward may take as long again
                with self._own_errors(number):
                    if isinstance(result, Exception):
                        raise result
                    if result is not None:
                        job.start_decoding(result)
                    with self.lock:
                        self.scheduler.prefilled(number, available=job.chunks_available(), steps=job.steps_left())
                    self._end_if_done(number, job)

    def _budget(self) -> int:
        """Prompt tokens to compute before the next decode step; while none waits for one, as many as a step takes."""
        limits = self.scheduler.limits
        if self.scheduler.decoding() or not self._jobs:
            return limits.chunk_budget
        within = next(iter(self._jobs.values())).prefiller.costs.tokens_within(_ALONE_SECONDS)
        if within is None:  # nothing was timed so far
            within = 0 if self._parts.runner.device.type == "cpu" else limits.max_step
        return max(limits.chunk_budget, min(within, limits.max_step))

    def _decode(self) -> None:
        """One more token for every job whose prefill is complete."""
        with self.lock:
            jobs = {self._jobs[number]: number for number in self.scheduler.decoding()}
        for job in [job for job in jobs if job.ticket.cancelled]:
            self._end(jobs.pop(job), "cancelled")
        joint = self.decoder.next_joint() if jobs else None
        if joint is not None:
            with self.lock:
                self._limit_spare()
            self._move(jobs, [job for job in jobs if not job.has_joined], lambda job: job.join(joint.batch))
            found = self.decoder.together(joint, list(jobs)) if jobs else None
            if found is not None:
                self._accept(jobs, *found)
                return
            self._move(jobs, list(jobs), RunningJob.leave)
        for job, number in jobs.items():
            with self._own_errors(number):
                self._accept(jobs, [job], self.decoder.alone(job))

    def _move(
        self, jobs: dict[RunningJob, int], moving: Sequence[RunningJob], move: Callable[[RunningJob], None]
    ) -> None:
        """Let some of the jobs continue in the batch, or in caches of their own."""
        for job in moving:
            try:
                move(job)
                with self.lock:
                    self.scheduler.moved(jobs[job], held=job.cached_bytes)
            except Exception as error:  # noqa: BLE001 - an error of one job ends that job only
                self._failed(jobs.pop(job), error)

    def _accept(self, numbers: dict[RunningJob, int], jobs: Sequence[RunningJob], logits: torch.Tensor) -> None:
        """Sample the next token of each of ``jobs`` from its logits, [jobs, vocab]."""
        self._begins()
        samplers = [job.fed() for job in jobs]
        for job, sampler, token in zip(jobs, samplers, sample_batch(samplers, logits), strict=True):
            number = numbers[job]
            if isinstance(token, Exception):
                self._failed(number, token)
                continue
            with self._own_errors(number):
                if sampler is not None:
                    job.ticket.put(token)
                    with self.lock:
                        self.scheduler.decoded(number)
                self._end_if_done(number, job)

    def _end_if_done(self, number: int, job: RunningJob) -> None:
        reason = job.end
        if reason is not None:
            job.keep_decoded()
            prompt, checked = job.state.prompt, job.state.take_checked()
            self._parts.offer_check(job.prefiller, prompt, checked, job.decoded, job.adapter)
            self._end(number, reason)

    @contextmanager
    def _own_errors(self, number: int) -> Iterator[None]:
        """An error of one job ends that job only."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            self._failed(number, error)

    def _failed(self, number: int, error: Exception) -> None:
        if self._rules.raises:
            raise error
        if isinstance(error, ConfigError):  # what the job asked for cannot be done: no failure of ours
            self._end(number, "error", error=str(error), refused=True)
            return
        log_failure(_log, error, "a job failed")
        self._end(number, "error", error=f"{type(error).__name__}: {error}")

    def _end(self, number: int, reason: str, *, error: str | None = None, refused: bool = False) -> None:
        with self.lock:
            job = self._jobs.pop(number, None)
            self.scheduler.remove(number)
        if job is not None:
            job.finish(reason, error=error, refused=refused)
