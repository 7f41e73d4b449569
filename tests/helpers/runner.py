"""Runners of jobs for tests of the server: one that keeps what it was given, one that says a text, the slowest one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from kvboost import KVBoost
from kvboost.scheduler.jobs import Finished, Job, NewToken, RunnerLoad, Ticket
from kvboost.scheduler.runner import BatchRunner


class _Choosing(LogitsProcessor):
    """Applies what the job asks for and remembers the logits, for log-probabilities."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.logprobs: torch.Tensor = torch.zeros(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        produced = input_ids[0, len(self.job.token_ids) :].tolist()
        logits = scores[0].float().clone()
        for token in set(produced):
            sampling = self.job.sampling
            logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * produced.count(token)
        for token, bias in self.job.sampling.logit_bias.items():
            logits[token] += bias
        if self.job.constrain is not None:
            self.job.constrain(produced, logits)
        self.logprobs = torch.log_softmax(logits, -1)
        return logits[None]


Deliver = Callable[[NewToken | Finished], None]


class Scripted:
    """A ticket whose events are all known; subclasses say which."""

    def events(self) -> Iterator[NewToken | Finished]:
        raise NotImplementedError

    def listen(self, deliver: Deliver) -> None:
        for event in self.events():
            deliver(event)

    def cancel(self) -> None: ...


class _Ticket:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[NewToken | Finished] = queue.SimpleQueue()
        self.cancelled = threading.Event()

    def events(self) -> Iterator[NewToken | Finished]:
        while True:
            event = self.queue.get()
            yield event
            if isinstance(event, Finished):
                return

    def listen(self, deliver: Deliver) -> None:
        def work() -> None:
            for event in self.events():
                deliver(event)

        threading.Thread(target=work, daemon=True).start()

    def cancel(self) -> None:
        self.cancelled.set()


class _Streamer:
    def __init__(self, ticket: _Ticket, choosing: _Choosing) -> None:
        self._ticket, self._choosing, self._prompt_seen = ticket, choosing, False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        (token,) = value.flatten().tolist()
        asked, logprobs = self._choosing.job.top_logprobs, self._choosing.logprobs
        if asked is None:
            self._ticket.queue.put(NewToken(token))
            return
        top = logprobs.topk(asked) if asked else None
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top is not None else ()
        self._ticket.queue.put(NewToken(token, float(logprobs[token]), pairs))

    def end(self) -> None: ...


class OneByOne:
    """Runs jobs in the order they come, each in a thread of its own that waits for its turn."""

    def __init__(self, engine: KVBoost, *, pause: float = 0.0) -> None:
        self._engine = engine
        self.pause = pause  # before each token, for tests that need a job to last
        self._model_lock = threading.Lock()
        self._count = threading.Lock()
        self.alive = 0
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> _Ticket:
        ticket = _Ticket()
        with self._count:
            self.alive += 1
            self.jobs.append(job)
        threading.Thread(target=self._run, args=(job, ticket), daemon=True).start()
        return ticket

    def load(self) -> RunnerLoad:
        return RunnerLoad(running=min(1, self.alive), waiting=max(0, self.alive - 1), cached_bytes=0)

    def close(self) -> None:
        """Wait for jobs that are over or cancelled: a process that ends while one computes is aborted by torch."""
        while self.alive:
            time.sleep(0.01)

    def _run(self, job: Job, ticket: _Ticket) -> None:
        started = time.monotonic()
        finished = Finished("cancelled", None)
        try:
            with self._model_lock:
                if not ticket.cancelled.is_set():
                    finished = self._generate(job, ticket, started)
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            finished = Finished("error", None, error=repr(error))
        finally:
            with self._count:
                self.alive -= 1
            ticket.queue.put(finished)

    def _generate(self, job: Job, ticket: _Ticket, started: float) -> Finished:
        choosing = _Choosing(job)

        def stop(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            time.sleep(self.pause)
            return torch.full((len(input_ids),), ticket.cancelled.is_set())

        if job.sampling.seed is not None:
            torch.manual_seed(job.sampling.seed)
        result = self._engine.generate(
            job.token_ids,
            boundaries=job.boundaries,
            max_new_tokens=job.max_new_tokens,
            temperature=job.sampling.temperature,
            top_p=job.sampling.top_p if job.sampling.temperature > 0 else None,
            streamer=_Streamer(ticket, choosing),
            logits_processor=LogitsProcessorList([choosing]),
            stopping_criteria=StoppingCriteriaList([stop]),
            eos_token_id=sorted(job.stop_token_ids) or None,
        )
        waited = time.monotonic() - started - (result.total_ms - result.ttft_ms) / 1000
        reason = "cancelled" if ticket.cancelled.is_set() else result.finish_reason
        return Finished(reason, result.reuse, first_token_seconds=waited)  # type: ignore[arg-type]


class Recording:
    """Hands jobs to a real runner and remembers them."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> Ticket:
        self.jobs.append(job)
        return self._runner.submit(job)

    def load(self) -> RunnerLoad:
        return self._runner.load()

    def close(self) -> None:
        self._runner.close()


class Recorded(Scripted):
    """A runner that answers every job with a text recorded before: a random model calls no tools."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._ids = tokenizer(text)["input_ids"]
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> Any:
        self.jobs.append(job)
        return self

    def events(self) -> Any:
        yield from (NewToken(token) for token in self._ids)
        yield NewToken(2)
        yield Finished("stop", None)

    def load(self) -> RunnerLoad:
        return RunnerLoad(0, 0, 0)

    def close(self) -> None: ...
