"""Runs jobs side by side: one thread owns the model and repeats schedule, read, decode.

Implements :class:`kvboost.scheduler.jobs.JobRunner` for a server or any other caller with many threads. Prompts are
read one chunk at a time on their own grid, so that reuse stays identical to the bit; new tokens of all jobs are
computed together. Invariants: every ticket ends with ``Finished``; what a job holds is given back in the step in
which it ends, is cancelled or is preempted; an error of one job ends that job only.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from kvboost.core.session import Session
from kvboost.errors import ClosedError, ConfigError, UnsupportedModelError
from kvboost.hf.ragged import RaggedRunner, SharedStart, probe_ragged
from kvboost.scheduler.admission import checked_job
from kvboost.scheduler.jobs import BatchEngine, Finished, Job, RunnerLoad, Ticket
from kvboost.scheduler.queue import Limits, Scheduler
from kvboost.scheduler.running import JobTicket, RunningJob
from kvboost.scheduler.sharing import shared_starts

_CHUNKS_REPAIRED_AT_ONCE = 2  # of the chunk budget, beside other jobs: about half of those rows are computed

DEFAULT_KV_BYTES = 2 * 2**30
"""KV that running jobs may come to hold together, for an engine without ``kv_bytes``."""

_MODEL_CHANGED = "the model's adapter or weights were changed while this job ran; submit it again"

_log = logging.getLogger("kvboost.engine")


class BatchRunner:
    """Continuous batching over one engine.

    Running jobs hold the engine's ``kv_bytes`` of KV together at most, 2 GiB if it has no such setting; its idle
    workspaces come on top.

    Args:
        engine: Whose model and cache are used. Others may go on using it; they take turns.
        max_running: Jobs that are read and decoded side by side.
        max_waiting: Jobs that may wait; one more is refused with BusyError, unless its tenant has less than an even
            share of them.
        chunk_budget: Prompt tokens read between two decode steps; at least one chunk is. The engine's chunk size
            if left out.
        patience: Steps after which a waiting job is passed by nobody, and tokens after which a running one may have
            to make room for it.
        deterministic: Every job in the shapes of a single one and without moved reuse: the same job, with a seed or
            temperature 0, then gives the same bytes, alone or among others. Decoding gets as much slower as there are
            jobs.
    """

    def __init__(
        self,
        engine: BatchEngine,
        *,
        max_running: int = 16,
        max_waiting: int = 256,
        chunk_budget: int | None = None,
        patience: int = 256,
        deterministic: bool = False,
    ) -> None:
        for name, value in (("max_running", max_running), ("max_waiting", max_waiting), ("patience", patience)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if chunk_budget is not None and chunk_budget < 1:
            raise ConfigError(f"chunk_budget={chunk_budget} must be at least 1 token")
        session, layout = engine.session, engine.parts.layout
        if session is None or layout is None:
            raise ConfigError(f"jobs cannot be batched with this model ({engine.parts.refusal}); use engine.generate")
        if deterministic and (engine.config.reuse_generated or engine.config.kv_cache_bits != 16):
            raise ConfigError(
                "deterministic needs an engine with reuse_generated=False and kv_cache_bits=16: otherwise an answer "
                "depends on what was stored before"
            )
        if engine.config.draft is not None:
            warnings.warn(
                "jobs that run side by side are decoded without the engine's draft; engine.generate uses it",
                RuntimeWarning,
                stacklevel=2,
            )
        self._engine, self._parts = engine, engine.parts
        self._bytes_for = session.budget.bytes_for
        self._deterministic = deterministic
        limits = Limits(
            max_running=max_running,
            max_waiting=max_waiting,
            kv_bytes=session.budget.limit or DEFAULT_KV_BYTES,
            chunk_budget=chunk_budget or engine.config.chunk_size,
            patience=patience,
        )
        self._vocab_size = int(engine.model.get_input_embeddings().weight.shape[0])
        self._ragged: RaggedRunner | None = None
        self.single_decode_reason: str | None = "as asked: deterministic" if deterministic else None
        """Why new tokens are computed job by job, if they are."""
        if not deterministic:
            try:
                with self._parts.running():
                    self._ragged = probe_ragged(self._parts.runner, layout)
            except UnsupportedModelError as error:
                self.single_decode_reason = str(error)
                _log.warning("jobs are decoded one by one: %s", error)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._scheduler = Scheduler(limits)
        self._jobs: dict[int, RunningJob] = {}
        self._together: tuple[list[int], list[SharedStart]] = ([], [])
        """Who decoded together last, and which of them begin alike."""
        self._closing = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._work, name="kvboost-batch", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Ticket:
        """Take the job.

        Raises CapacityError for one that can never fit, BusyError if too many wait, ClosedError if none is taken any
        more.
        """
        session = self.session_for(job.tenant)
        job = replace(job, token_ids=tuple(self._engine.encode(job.token_ids)))
        job = checked_job(job, session, vocab_size=self._vocab_size, kv_bytes=self._scheduler.limits.kv_bytes)
        tokens = list(job.token_ids)
        chain = [chunk.prefix_key for chunk in session.prefiller.chunk(tokens, job.boundaries).usable]
        ticket = JobTicket(self._wake)
        running = RunningJob(job, session=session, ticket=ticket, device=self._parts.runner.device)
        nbytes, peak = (self._bytes_for(count) for count in (running.tokens, running.max_tokens))
        try:
            with self._changed:
                if self._closing:
                    raise ClosedError(f"{self._failure or 'this runner was closed'}; make a new one")
                number = self._scheduler.add(tenant=job.tenant, nbytes=nbytes, peak=peak, chain=chain)
                self._jobs[number] = running
                self._changed.notify()
        except BaseException:
            running.close()
            raise
        try:
            # Slower tiers load while the job waits, so that the model's thread need not wait for them. Not for a job
            # that was refused; one that was opened meanwhile loads for itself.
            running.prefetching = session.prefetch(tokens, job.boundaries)
            if running.is_open:
                running.prefetching.cancel()
        except BaseException:
            ticket.cancel()
            raise
        return ticket

    def session_for(self, tenant: str) -> Session:
        """Whose keys, store and workspaces a tenant's jobs use; the engine's own for those that name none."""
        session = (self._engine.for_tenant(tenant) if tenant else self._engine).session
        assert session is not None
        return session

    @property
    def kv_bytes(self) -> int:
        """What running jobs may come to hold together."""
        return self._scheduler.limits.kv_bytes

    def load(self) -> RunnerLoad:
        """What is running and waiting."""
        with self._lock:
            held = sum(job.cached_bytes for job in self._jobs.values())
            return RunnerLoad(
                self._scheduler.running,
                self._scheduler.waiting,
                held,
                one_by_one=self._ragged is None,
                alive=not self._closing,
            )

    def close(self) -> None:
        """Cancel what runs, end every ticket and let go of everything."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                with self._parts.running():
                    self._step()
        except BaseException as failure:
            self._failure = f"the runner failed and takes no more jobs: {failure!r}"
            raise
        finally:
            with self._lock:
                self._closing = True
                left = list(self._jobs)
            for number in left:
                self._end(number, "error" if self._failure else "cancelled", error=self._failure)

    def _wait_for_work(self) -> bool:
        """Until there is something to do. False if the runner is being closed."""
        with self._changed:
            while not self._closing and not self._jobs:
                self._changed.wait()
            return not self._closing

    def _step(self) -> None:
        """Schedule, read, decode: one step."""
        for number, job in self._snapshot():
            if job.ticket.cancelled:
                self._end(number, "cancelled")
            elif job.epoch not in (None, self._parts.epoch):
                # What it has read is another model's: going on would mix the two.
                self._end(number, "error", error=_MODEL_CHANGED)
        self._preempt()
        used = self._admit()
        with self._lock:
            streams = bool(self._scheduler.decoding())
        self._read(used=used if streams else 0)  # the budget is there for streams; without any, nobody is held up
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
        """Give back what a job holds that goes on later. One that cannot give it back ends."""
        self._together = ([], [])  # it will come back with another cache
        try:
            self._jobs[number].close()
        except Exception as error:  # noqa: BLE001 - an error of one job ends that job only
            self._failed(number, error)

    def _grow(self) -> None:
        """Make room for one more token of every job, if need be by sending others back to wait."""
        with self._lock:
            numbers = self._scheduler.decoding()
        for number in numbers:
            job = self._jobs.get(number)
            if job is None or not job.is_open or not job.must_grow:
                continue
            wanted, sent_back = self._bytes_for(job.tokens), -1
            while sent_back != number:
                with self._lock:
                    if self._scheduler.grow(number, wanted):
                        break
                    sent_back = self._scheduler.yield_to(number, wanted)
                self._close(sent_back)
            if job.is_open:
                try:
                    job.grow()
                except Exception as error:  # noqa: BLE001 - an error of one job ends that job only
                    self._failed(number, error)

    def _admit(self) -> int:
        """Open whoever may run now. Returns what that cost, in rows of the chunk budget."""
        used = 0
        while used < self._scheduler.limits.chunk_budget:
            with self._lock:
                number = self._scheduler.admit()
                if number is None:
                    break
                job, alone = self._jobs[number], self._scheduler.running == 1
            try:
                job.epoch = self._parts.epoch if job.epoch is None else job.epoch
                self._open(number, job, alone=alone)
                used += self._scheduler.cost_of_placing(job.state.plan.exact_tokens)
            except Exception as error:  # noqa: BLE001 - an error of one job ends that job only
                self._failed(number, error)
        return used

    def _open(self, number: int, job: RunningJob, *, alone: bool) -> None:
        budget = self._scheduler.limits.chunk_budget
        job.open(
            approx=not self._deterministic,
            max_repaired=None if alone else _CHUNKS_REPAIRED_AT_ONCE * budget,
        )
        with self._lock:
            self._scheduler.opened(
                number,
                at_hand=job.chunks_at_hand(),
                provides=job.chunks_provided(),
                steps=job.steps_left(),
                held=job.cached_bytes,
            )

    def _read(self, *, used: int) -> None:
        """Read chunks until this step's budget is used up."""
        while True:
            with self._lock:
                number = self._scheduler.next_read(used=used)
                if number is None:
                    return
                job = self._jobs[number]
            if job.ticket.cancelled:
                self._end(number, "cancelled")
                continue
            used += job.steps_left()[0]
            try:
                logits = job.prefill_on()
                if logits is not None:
                    job.begin(logits)
                with self._lock:
                    self._scheduler.read(number, at_hand=job.chunks_at_hand(), steps=job.steps_left())
                self._end_if_done(number, job)
            except Exception as error:  # noqa: BLE001 - an error of one job ends that job only
                self._failed(number, error)

    def _decode(self) -> None:
        """One more token for every job that has read its prompt."""
        with self._lock:
            jobs = [(number, self._jobs[number]) for number in self._scheduler.decoding()]
        for number, job in [(number, job) for number, job in jobs if job.ticket.cancelled]:
            self._end(number, "cancelled")
            jobs.remove((number, job))
        if len(jobs) > 1 and self._ragged is not None:
            logits = self._joint_logits(self._ragged, jobs)
            if logits is not None:
                for (number, job), row in zip(jobs, logits, strict=True):
                    self._take(number, job, row)
                return
        for number, job in jobs:
            self._take(number, job, None)

    def _joint_logits(self, ragged: RaggedRunner, jobs: Sequence[tuple[int, RunningJob]]) -> torch.Tensor | None:
        """The logits of all jobs, [jobs, vocab]; None if that failed, and then from now on every job runs alone."""
        try:
            numbers = [number for number, _ in jobs]
            if self._together[0] != numbers:
                self._together = (numbers, shared_starts([job for _, job in jobs]))
            tokens, caches = [job.next_input for _, job in jobs], [job.state.cache for _, job in jobs]
            return ragged.decode(tokens, caches, shared=self._together[1])
        except Exception as error:  # noqa: BLE001 - it may be one job's: each is tried alone, and who fails again ends
            self._ragged, self.single_decode_reason = None, f"a joint step failed: {error!r}"
            _log.warning("jobs are decoded one by one from now on: %s", self.single_decode_reason)
            warnings.warn(f"{self.single_decode_reason}; jobs are decoded one by one", RuntimeWarning, stacklevel=2)
            return None

    def _take(self, number: int, job: RunningJob, logits: torch.Tensor | None) -> None:
        try:
            if logits is None:
                logits = self._parts.runner.append([job.next_input], job.state.cache, logits=True)
                assert logits is not None
            if job.take(logits) is not None:
                with self._lock:
                    self._scheduler.decoded(number)
            self._end_if_done(number, job)
        except Exception as error:  # noqa: BLE001 - an error of one job ends that job only
            self._failed(number, error)

    def _end_if_done(self, number: int, job: RunningJob) -> None:
        reason = job.end
        if reason is not None:
            if self._engine.config.reuse_generated:
                job.keep_decoded()
            self._parts.offer_check(job.prefiller, job.state, job.drawn)
            self._end(number, reason)

    def _failed(self, number: int, error: Exception) -> None:
        self._end(number, "error", error=f"{type(error).__name__}: {error}")

    def _end(self, number: int, reason: str, *, error: str | None = None) -> None:
        """Give back what the job holds, then say that it has ended."""
        with self._lock:
            job = self._jobs.pop(number, None)
            self._scheduler.remove(number)
        if job is None:
            return
        last: Finished = job.finished(reason, error=error)
        try:
            job.close()
        except Exception:  # noqa: BLE001 - what the job said stands, and the others have no part in this
            _log.exception("a job that ended (%s) could not give back what it held", reason)
        finally:
            job.ticket.put(last)
