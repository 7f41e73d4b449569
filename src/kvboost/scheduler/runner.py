"""Continuous batching: one thread owns the model and repeats schedule, prefill, decode.

Implements :class:`kvboost.scheduler.jobs.JobRunner` for a server or any other caller with many threads. Prompts are
prefilled in steps by the model's rule, so that reuse stays bitwise; all jobs are decoded together. Invariants:
every ticket ends with ``Finished``; a job's resources are released in the step in which it ends, is cancelled or is
preempted; an error of one job ends that job only; the thread never waits for a slower tier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

import torch

from kvboost.errors import ClosedError, ConfigError
from kvboost.failures import log_failure
from kvboost.hf.adapters import AS_SET
from kvboost.scheduler.admission import checked_engine, checked_job
from kvboost.scheduler.decoding import JobDecoder
from kvboost.scheduler.fetching import KnownModels
from kvboost.scheduler.jobs import BatchEngine, Finished, Job, RunnerLoad, Ticket
from kvboost.scheduler.prefilling import JobPrefiller
from kvboost.scheduler.queue import Limits, Scheduler
from kvboost.scheduler.running import JobTicket, RunningJob
from kvboost.scheduler.sampler import sample_batch
from kvboost.scheduler.watch import StepWatch

_MAX_REPAIR_BUDGETS = 2  # chunk budgets that a repair may compute in its one step, beside other jobs
_PREFILL_BUDGET = 256  # prompt tokens between two decode steps: others wait for a step of so many
_FETCH_POLL_SECONDS = 0.05  # how late a load that takes too long is given up, while there is nothing else to do
_CLOSED = "the runner was closed"
_MODEL_CHANGED = "the model's adapter or weights were changed while this job ran; submit it again"

_log = logging.getLogger("kvboost.engine")


class BatchRunner:
    """Continuous batching over one engine.

    Running jobs hold at most the engine's ``kv_bytes`` of KV in total (if unset, two fifths of an accelerator's free
    memory, on the CPU 2 GiB); its idle workspaces come on top.

    Args:
        engine: The engine whose model and cache are used. Other callers may use it concurrently.
        max_running: Jobs that are prefilled and decoded concurrently.
        max_waiting: Jobs that may wait; one more is refused with BusyError, unless its tenant has less than an even
            share of them.
        chunk_budget: Prompt tokens prefilled between two decode steps, 256 if left out.
        max_wait_steps: After this many steps no other job overtakes a waiting one; after as many tokens a running job
            may be preempted for it.
        max_step_seconds: One prefill or decode step that takes longer hangs: the runner has failed then.
        deterministic: Run every job in the shapes of a single one and without non-prefix reuse. The same job, with a
            seed or temperature 0, then gives the same bytes, alone or among others. Decoding slows down in proportion
            to the number of jobs.
    """

    def __init__(
        self,
        engine: BatchEngine,
        *,
        max_running: int = 16,
        max_waiting: int = 256,
        chunk_budget: int | None = None,
        max_wait_steps: int = 256,
        max_step_seconds: float = 600.0,
        deterministic: bool = False,
    ) -> None:
        session, layout = checked_engine(engine, deterministic=deterministic)
        self._engine, self._parts = engine, engine.parts
        self._bytes_for = session.budget.bytes_for
        self._deterministic = deterministic
        limits = Limits(
            max_running=max_running,
            max_waiting=max_waiting,
            kv_bytes=session.budget.limit or session.budget.jobs_bytes,
            chunk_budget=_PREFILL_BUDGET if chunk_budget is None else chunk_budget,
            max_step=session.prefiller.rule.max_tokens,
            max_wait_steps=max_wait_steps,
        )
        self._vocab_size = int(engine.model.get_input_embeddings().weight.shape[0])
        self._decoder = JobDecoder(self._parts, layout, deterministic=deterministic)
        self._prefiller = JobPrefiller(self._parts, layout, deterministic=deterministic)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._scheduler = Scheduler(limits)
        self._jobs: dict[int, RunningJob] = {}
        self._models = KnownModels()
        self._closing = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._work, name="kvboost-batch", daemon=True)
        self._watch = StepWatch(self._thread, max_seconds=max_step_seconds, hung=self._give_up)
        self._thread.start()

    def submit(self, job: Job) -> Ticket:
        """Queue the job.

        Raises CapacityError if it can never fit, BusyError if too many are waiting, ClosedError after the runner was
        closed.
        """
        job, session = checked_job(job, self._engine, vocab_size=self._vocab_size, kv_bytes=self.kv_bytes)
        ticket = JobTicket(self._wake)
        running = RunningJob(
            job,
            session=session,
            ticket=ticket,
            device=self._parts.runner.device,
            max_step=self._scheduler.limits.chunk_budget,
        )
        running.epoch = self._parts.epoch
        # Keys of an adapter are not known before it is in use; then its first job begins to load in its turn.
        model = self._models.of(running.group, epoch=running.epoch)
        prompt = session.prefiller.chunk(list(job.token_ids), job.boundaries, model=model)
        chain = [chunk.prefix_key for chunk in prompt.usable]
        loading = running.has_tiers and model is not None
        nbytes, peak = (self._bytes_for(count) for count in (running.tokens, running.max_tokens))
        try:
            with self._changed:
                if self._closing:
                    raise ClosedError(f"{self._failure or _CLOSED}; make a new one")
                number = self._scheduler.add(
                    tenant=job.tenant, nbytes=nbytes, peak=peak, chain=chain, group=running.group, loading=loading
                )
                self._jobs[number] = running
                self._changed.notify()
        except BaseException:
            running.close()
            raise
        try:
            if loading:  # only now: a refused job loads nothing
                running.begin_fetch(prompt, approx=not self._deterministic, wake=self._wake)
        except BaseException:
            ticket.cancel()
            raise
        return ticket

    @property
    def single_decode_reason(self) -> str | None:
        """Why jobs are decoded one at a time; None if they are decoded together."""
        return self._decoder.single_reason

    @property
    def kv_bytes(self) -> int:
        """Total KV that running jobs may hold."""
        return self._scheduler.limits.kv_bytes

    def load(self) -> RunnerLoad:
        """How many jobs are running and waiting."""
        with self._lock:
            held = sum(job.cached_bytes for job in self._jobs.values())
            return RunnerLoad(
                self._scheduler.running,
                self._scheduler.waiting,
                held,
                one_by_one=self._decoder.single_reason is not None,
                failure=self._failure or (_CLOSED if self._closing else None),
                step_seconds=self._watch.seconds,
                preempted=self._scheduler.preempted,
                tenants=frozenset(job.job.tenant for job in self._jobs.values()),
            )

    def close(self) -> None:
        """Cancel all jobs, end every ticket and release everything; what a step that hangs holds, once it ends."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            while self._thread.is_alive() and not self._watch.hangs:
                self._thread.join(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                with self._lock:
                    group = self._scheduler.group()
                with ExitStack() as using:
                    try:
                        using.enter_context(self._parts.running(group or AS_SET))
                    except ConfigError as error:  # an adapter that is gone ends its own jobs only
                        for number, job in self._snapshot():
                            if job.group == group:
                                self._failed(number, error)
                        continue
                    self._watch.begin()
                    self._step(group)
                    self._watch.end()
        except BaseException as failure:  # noqa: BLE001 - told to everybody who waits or looks: a thread has nobody else
            log_failure(_log, failure, "the runner failed")
            self._failure = f"the runner failed ({type(failure).__name__}) and accepts no more jobs"
        finally:
            with self._lock:
                self._closing = True
            for number, _ in self._snapshot():
                self._end(number, "error" if self._failure else "cancelled", error=self._failure)
            self._watch.close()

    def _give_up(self, failure: str) -> None:
        """End every ticket. What the jobs hold is released by the runner's thread, if the step that hangs ends."""
        self._failure = failure
        with self._lock:
            self._closing = True
        for _, job in self._snapshot():
            job.ticket.put(Finished("error", None, error=failure))

    def _wait_for_work(self) -> bool:
        """Block until there is a job that need not wait for a tier. False if the runner is being closed."""
        with self._changed:
            while not self._closing and all(job.awaits_fetch for job in self._jobs.values()):
                self._changed.wait(_FETCH_POLL_SECONDS if self._jobs else None)
            return not self._closing

    def _step(self, group: str) -> None:
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
                        with self._lock:
                            self._scheduler.loaded(number)
        self._preempt()
        used = self._admit(group)
        with self._lock:
            decoding = bool(self._scheduler.decoding())
        self._prefill(used=used if decoding else 0)  # the budget protects decoding jobs; without any, it is not spent
        self._grow()
        self._decode()
        with self._lock:
            self._scheduler.tick()

    def _snapshot(self) -> list[tuple[int, RunningJob]]:
        with self._lock:
            return list(self._jobs.items())

    def _preempt(self) -> None:
        while True:
            with self._lock:
                number = self._scheduler.preempt()
                if number is None:
                    return
            self._close(number)

    def _close(self, number: int) -> None:
        """Release the resources of a job that continues later. If that fails, the job ends."""
        with self._own_errors(number):
            self._jobs[number].close()

    def _grow(self) -> None:
        """Ensure capacity for one more token of every job, preempting others if needed."""
        with self._lock:
            numbers = self._scheduler.decoding()
        for number in numbers:
            with self._own_errors(number):
                job = self._jobs.get(number)
                if job is None or not job.is_open or not job.must_grow:
                    continue
                wanted, preempted = self._bytes_for(job.tokens), -1
                while preempted != number:
                    with self._lock:
                        if self._scheduler.grow(number, wanted):
                            self._limit_spare()
                            break
                        preempted = self._scheduler.preempt_for(number, wanted)
                    self._close(preempted)
                if job.is_open:
                    job.grow()

    def _admit(self, group: str) -> int:
        """Open every job that may run now, or load its KV first. Returns the cost in tokens of the chunk budget."""
        used = 0
        while used < self._scheduler.limits.chunk_budget:
            with self._lock:
                number = self._scheduler.admit(group)
                if number is None:
                    break
                job, alone = self._jobs[number], self._scheduler.running == 1
                if must_fetch := job.must_fetch:
                    self._scheduler.postpone(number)
                self._limit_spare()
            with self._own_errors(number):
                if must_fetch:
                    job.begin_fetch(approx=not self._deterministic, wake=self._wake)
                    used += 1 + self._scheduler.cost_of_placing(len(job.job.token_ids))  # cutting the prompt takes time
                else:
                    self._open(number, job, alone=alone)
                    used += self._scheduler.cost_of_placing(job.state.plan.exact_tokens)
        return used

    def _limit_spare(self) -> None:
        """Free rows that nobody uses where a job needs their memory. Called with the lock."""
        self._decoder.limit_spare(self._scheduler.limits.kv_bytes - self._scheduler.reserved_bytes)

    def _open(self, number: int, job: RunningJob, *, alone: bool) -> None:
        budget = self._scheduler.limits.chunk_budget
        if job.adapters is None:
            job.adapters = self._parts.active_adapters
        job.open(
            approx=not self._deterministic,
            max_repaired=None if alone else _MAX_REPAIR_BUDGETS * budget,
            # Steps of other shapes round differently: what must give the same bytes repeats the steps it had.
            prefill_answer=not self._deterministic,
        )
        self._models.saw(job.group, job.state.prompt.snapshot.model, epoch=job.epoch)
        with self._lock:
            self._scheduler.opened(
                number,
                available=job.chunks_available(),
                will_provide=job.chunks_provided(),
                steps=job.steps_left(),
                held=job.cached_bytes,
            )

    def _prefill(self, *, used: int) -> None:
        """Prefill until this step's budget is spent."""
        while True:
            with self._lock:
                jobs = {self._jobs[number]: number for number in self._scheduler.next_prefill(used=used)}
            if not jobs:
                return
            for job in [job for job in jobs if job.ticket.cancelled]:
                self._end(jobs.pop(job), "cancelled")
            used += sum(job.steps_left()[0] for job in jobs)
            for (job, number), result in zip(jobs.items(), self._prefiller.run(list(jobs)), strict=True):
                self._watch.begin()  # the next forward may take as long again
                with self._own_errors(number):
                    if isinstance(result, Exception):
                        raise result
                    if result is not None:
                        job.start_decoding(result)
                    with self._lock:
                        self._scheduler.prefilled(number, available=job.chunks_available(), steps=job.steps_left())
                    self._end_if_done(number, job)

    def _decode(self) -> None:
        """One more token for every job whose prefill is complete."""
        with self._lock:
            jobs = {self._jobs[number]: number for number in self._scheduler.decoding()}
        for job in [job for job in jobs if job.ticket.cancelled]:
            self._end(jobs.pop(job), "cancelled")
        joint = self._decoder.next_joint() if jobs else None
        if joint is not None:
            with self._lock:
                self._limit_spare()
            self._move(jobs, [job for job in jobs if not job.has_joined], lambda job: job.join(joint.batch))
            found = self._decoder.together(joint, list(jobs)) if jobs else None
            if found is not None:
                self._accept(jobs, *found)
                return
            self._move(jobs, list(jobs), RunningJob.leave)
        for job, number in jobs.items():
            with self._own_errors(number):
                self._accept(jobs, [job], self._decoder.alone(job))

    def _move(
        self, jobs: dict[RunningJob, int], moving: Sequence[RunningJob], move: Callable[[RunningJob], None]
    ) -> None:
        """Let some of the jobs continue elsewhere: in the batch, or in caches of their own."""
        for job in moving:
            try:
                move(job)
                with self._lock:
                    self._scheduler.moved(jobs[job], held=job.cached_bytes)
            except Exception as error:  # noqa: BLE001 - an error of one job ends that job only
                self._failed(jobs.pop(job), error)

    def _accept(self, numbers: dict[RunningJob, int], jobs: Sequence[RunningJob], logits: torch.Tensor) -> None:
        """Sample the next token of each of ``jobs`` from its logits, [jobs, vocab]."""
        self._watch.begin()
        samplers = [job.fed() for job in jobs]
        for job, sampler, token in zip(jobs, samplers, sample_batch(samplers, logits), strict=True):
            number = numbers[job]
            if isinstance(token, Exception):
                self._failed(number, token)
                continue
            with self._own_errors(number):
                if sampler is not None:
                    job.ticket.put(token)
                    with self._lock:
                        self._scheduler.decoded(number)
                self._end_if_done(number, job)

    def _end_if_done(self, number: int, job: RunningJob) -> None:
        reason = job.end
        if reason is not None:
            if self._engine.config.reuse_generated:
                job.keep_decoded()
            prompt, checked = job.state.prompt, job.state.take_checked()
            self._parts.offer_check(job.prefiller, prompt, checked, job.decoded, job.group or AS_SET)
            self._end(number, reason)

    @contextmanager
    def _own_errors(self, number: int) -> Iterator[None]:
        """An error of one job ends that job only."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            self._failed(number, error)

    def _failed(self, number: int, error: Exception) -> None:
        if isinstance(error, ConfigError):  # what the job asked for cannot be done: no failure of ours
            self._end(number, "error", error=str(error), refused=True)
            return
        log_failure(_log, error, "a job failed")
        self._end(number, "error", error=f"{type(error).__name__}: {error}")

    def _end(self, number: int, reason: str, *, error: str | None = None, refused: bool = False) -> None:
        with self._lock:
            job = self._jobs.pop(number, None)
            self._scheduler.remove(number)
        if job is not None:
            job.finish(reason, error=error, refused=refused)
