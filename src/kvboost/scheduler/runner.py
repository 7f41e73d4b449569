"""Continuous batching: one thread owns the model and takes the steps of a :class:`JobLoop`.

For a server, or any other caller with many threads. Invariants: every ticket ends with ``Finished``; the thread never
waits for a slower tier; a refusal gives the reason and a remedy.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from kvboost.core.session import Session
from kvboost.errors import CapacityError, ClosedError, ConfigError
from kvboost.failures import at_work, log_failure
from kvboost.hf.adapters import AS_SET
from kvboost.hf.cache import KVLayout
from kvboost.scheduler.forwards import Forwards
from kvboost.scheduler.jobs import BatchEngine, Finished, Job, RunnerLoad, Ticket
from kvboost.scheduler.loop import JobLoop, LoopRules
from kvboost.scheduler.queue import Limits
from kvboost.scheduler.sequence import RunningJob

# Prompt tokens between two decode steps, on CPUs and elsewhere: others wait for a step of so many. The second is as
# many as vLLM computes; it was not measured on any device.
_PREFILL_BUDGETS = 256, 2048
_FETCH_POLL_SECONDS = 0.05  # how late a load that takes too long is given up, while there is nothing else to do
_CLOSED = "the runner was closed"

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
        chunk_budget: Prompt tokens prefilled between two decode steps, by default 256 on CPUs and 2,048 elsewhere.
            While nobody decodes, a step is as long as the device has memory for and takes a second at most.
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
        on_cpu = self._parts.runner.device.type == "cpu"
        limits = Limits(
            max_running=max_running,
            max_waiting=max_waiting,
            kv_bytes=session.budget.limit or session.budget.jobs_bytes,
            chunk_budget=_PREFILL_BUDGETS[not on_cpu] if chunk_budget is None else chunk_budget,
            max_step=session.prefiller.rule.max_tokens,
            max_wait_steps=max_wait_steps,
        )
        self._vocab_size = int(engine.model.get_input_embeddings().weight.shape[0])
        runner = self._parts.runner
        if deterministic:  # the shapes of joint forwards depend on the other jobs
            forwards = Forwards(runner, layout, single_reason="deterministic")
        else:
            with self._parts.running():
                forwards = Forwards.probe(runner, layout)
        rules = LoopRules(approx=not deterministic, repeats_steps=deterministic)
        self._loop = JobLoop(
            self._parts,
            forwards,
            limits,
            bytes_for=session.budget.bytes_for,
            rules=rules,
            begins=lambda: self._watch.begin(),  # each forward may take as long as the one before
        )
        self._approx = not deterministic
        self._changed = threading.Condition(self._loop.lock)
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
        ticket = Ticket(self._wake)
        running = RunningJob(
            job, session=session, ticket=ticket, parts=self._parts, max_step=self._loop.scheduler.limits.chunk_budget
        )
        # Keys of an adapter are not known before it is in use; then its first job begins to load in its turn.
        model = self._loop.models.of(running.group, epoch=running.epoch)
        prompt = session.prefiller.chunk(list(job.token_ids), job.boundaries, model=model)
        loading = running.has_tiers and model is not None
        try:
            with self._changed:
                if self._closing:
                    raise ClosedError(f"{self._failure or _CLOSED}; make a new one")
                self._loop.add(running, prompt, loading=loading)
                self._changed.notify()
        except BaseException:
            running.close()
            raise
        try:
            if loading:  # only now: a refused job loads nothing
                running.begin_fetch(prompt, approx=self._approx)
        except BaseException:
            ticket.cancel()
            raise
        return ticket

    @property
    def single_decode_reason(self) -> str | None:
        """Why jobs are decoded one at a time; None if they are decoded together."""
        return self._loop.decoder.single_reason

    @property
    def kv_bytes(self) -> int:
        """Total KV that running jobs may hold."""
        return self._loop.scheduler.limits.kv_bytes

    def load(self) -> RunnerLoad:
        """How many jobs are running and waiting."""
        scheduler = self._loop.scheduler
        with self._changed:
            jobs = self._loop.jobs()
            return RunnerLoad(
                scheduler.running,
                scheduler.waiting,
                sum(job.cached_bytes for job in jobs),
                one_by_one=self.single_decode_reason is not None,
                failure=self._failure or (_CLOSED if self._closing else None),
                step_seconds=self._watch.seconds,
                preempted=scheduler.preempted,
                tenants=frozenset(job.job.tenant for job in jobs),
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
                with self._changed:
                    group = self._loop.scheduler.group()
                with ExitStack() as using:
                    try:
                        using.enter_context(self._parts.running(group or AS_SET))
                    except ConfigError as error:  # an adapter that is gone ends its own jobs only
                        self._loop.fail_group(group, error)
                        continue
                    self._watch.begin()
                    self._loop.step(group)
                    self._watch.end()
        except BaseException as failure:  # noqa: BLE001 - every ticket and load() have it: a thread has no caller
            log_failure(_log, failure, "the runner failed")
            self._failure = f"the runner failed ({type(failure).__name__}) and accepts no more jobs"
        finally:
            with self._changed:
                self._closing = True
            self._loop.end_all("error" if self._failure else "cancelled", error=self._failure)
            self._watch.close()

    def _give_up(self, failure: str) -> None:
        """End every ticket. What the jobs hold is released by the runner's thread, if the step that hangs ends."""
        self._failure = failure
        with self._changed:
            self._closing = True
            jobs = self._loop.jobs()
        for job in jobs:
            job.ticket.put(Finished("error", None, error=failure))

    def _wait_for_work(self) -> bool:
        """Block until there is a job that need not wait for a tier. False if the runner is being closed."""
        with self._changed:
            while not self._closing:
                jobs = self._loop.jobs()
                if not all(job.awaits_fetch for job in jobs):
                    return True
                self._changed.wait(_FETCH_POLL_SECONDS if jobs else None)
            return False


def checked_engine(engine: BatchEngine, *, deterministic: bool) -> tuple[Session, KVLayout]:
    """The engine's session and the layout of its KV."""
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


class StepWatch:
    """Times the steps of one thread."""

    def __init__(self, thread: threading.Thread, *, max_seconds: float, hung: Callable[[str], None]) -> None:
        """``hung`` is called, with what to say, once a step has taken longer than ``max_seconds``."""
        if not 0 < max_seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(f"max_step_seconds={max_seconds} is no time that a step may take; give 600 or so")
        self._thread, self._max_seconds, self._hung = thread, max_seconds, hung
        self._began: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="kvboost-watch", daemon=True).start()

    def begin(self) -> None:
        """A step begins now."""
        self._began = time.monotonic()

    def end(self) -> None:
        """It has ended; the next one may be long in coming."""
        self._began = None

    @property
    def seconds(self) -> float:
        """Since the step that runs began; 0 if none runs."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def hangs(self) -> bool:
        """Whether that is too long."""
        return self.seconds >= self._max_seconds

    def close(self) -> None:
        """There are no more steps."""
        self.end()
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(max(0.0, self._max_seconds - self.seconds)):
            if self.hangs:
                failure = f"a step took more than {self._max_seconds:g} s, so the runner accepts no more jobs"
                _log.error("%s; it is at %s", failure, at_work(self._thread))
                return self._hung(failure)
