"""Jobs, their events, and how their tokens are drawn: the boundary between a server and the scheduler.

Made by :mod:`kvboost.serve`, run by :mod:`kvboost.scheduler.runner`, which cannot use Transformers' ``generate`` (see
docs/decisions/0014-continuous-batching.md). Invariants: after ``submit`` every ticket ends, with :class:`Finished` as
its last event, whatever happens to the job; a job's tokens depend on its own logits, settings and seed only, never on
other jobs; the device is waited for once per batch.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from typing import Any, Literal, Protocol, Self

import torch

from kvboost.config import EngineConfig
from kvboost.core.prefill import Prefiller
from kvboost.core.session import Session
from kvboost.core.spans import ApproxSpans
from kvboost.core.state import ChunkedPrompt
from kvboost.errors import ClosedError, ConfigError
from kvboost.hf.adapters import AdapterName, Adapters
from kvboost.hf.cache import KVLayout
from kvboost.hf.runner import ModelRunner
from kvboost.hf.sampling import Constraint, Drawing, Sampling, logits_processors
from kvboost.types import ReuseReport


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sequence to continue."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    may_shorten: bool = False
    """Generate fewer new tokens if there is no capacity for all; otherwise such a job is refused."""
    sampling: Sampling = field(default_factory=Sampling)
    boundaries: tuple[int, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the job; the token itself is reported as the last one."""
    top_logprobs: int | None = None
    """None for no log-probabilities, 0 for the chosen token's only."""
    constrain: Constraint | None = None
    drawing: Drawing | None = None
    """Draws the tokens, instead of ``sampling`` and ``constrain``."""
    tenant: str = ""
    adapter: str | None = None
    """A loaded adapter to run under; None for the model as it is set. Jobs of different adapters take turns."""


@dataclass(frozen=True)
class NewToken:
    """One more token."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    """Of a prompt's token among all that could stand there, 1 for the likeliest."""


@dataclass(frozen=True)
class Finished:
    """The end of a job."""

    reason: Literal["stop", "length", "cancelled", "error"]
    report: ReuseReport | None
    """None if the job ended before its prefill."""
    first_token_seconds: float | None = None
    """Time to first token, from ``submit``."""
    error: str | None = None
    refused: bool = False
    """Whether the error is the job's own, a ConfigError that says what to change."""
    queued_seconds: float | None = None
    """From ``submit`` until it was first admitted."""
    seconds: float | None = None
    """From ``submit`` to the end."""


class Ticket:
    """The submitter's handle: delivers events, and cancels."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._early: list[NewToken | Finished] = []  # before anybody listened
        self._deliver: Callable[[NewToken | Finished], None] = self._early.append
        self._cancelled = threading.Event()
        self.wake = wake
        """Called when something has changed that the job may wait for."""

    def events(self) -> Iterator[NewToken | Finished]:
        """Each new token as it is generated, then :class:`Finished`. Blocks; called from one thread."""
        arrived: SimpleQueue[NewToken | Finished] = SimpleQueue()
        self.listen(arrived.put)
        while True:
            event = arrived.get()
            yield event
            if isinstance(event, Finished):
                return

    def listen(self, deliver: Callable[[NewToken | Finished], None]) -> None:
        """The same without a thread that waits: ``deliver`` is called with each event, by whoever makes it.

        Those that came before are delivered now. ``deliver`` returns at once and raises nothing. For one listener.
        """
        with self._lock:
            for event in self._early:
                deliver(event)
            self._early, self._deliver = [], deliver

    def cancel(self) -> None:
        """Stop within one step and release everything; harmless after the end."""
        self._cancelled.set()
        self.wake()

    @property
    def cancelled(self) -> bool:
        """Whether the submitter cancelled the job."""
        return self._cancelled.is_set()

    def put(self, event: NewToken | Finished) -> None:
        """Deliver an event to the submitter."""
        with self._lock:
            self._deliver(event)


@dataclass(frozen=True)
class RunnerLoad:
    """The current load of a runner."""

    running: int
    waiting: int
    cached_bytes: int
    """KV held by running jobs."""
    one_by_one: bool = False
    """Whether jobs are decoded one at a time; the log has the reason."""
    failure: str | None = None
    """Why it accepts no more jobs: it has failed, hangs or was closed. Has nothing of a job in it."""
    step_seconds: float = 0.0
    """Since the step that runs began; 0 if none runs."""
    preempted: int = 0
    """How often a running job was moved back to the queue."""
    tenants: frozenset[str] = frozenset()
    """Those with jobs that run or wait."""

    @property
    def alive(self) -> bool:
        """Whether it accepts jobs."""
        return self.failure is None


OfferCheck = Callable[[Prefiller, ChunkedPrompt, ApproxSpans | None, Sequence[int], AdapterName], None]
"""Offers a finished request for a shadow check: its prompt, what was or could have been repositioned in it, the tokens
generated after it, the adapter."""


class ModelParts:
    """What a runner shares with the other requests of its engine."""

    runner: ModelRunner
    refusal: str | None
    """Why a model reuses nothing."""
    layout: KVLayout | None
    """The layout of the model's KV; None for a model without reuse."""
    adapters: Adapters | None
    """None for a model without reuse."""
    running: Callable[..., AbstractContextManager[None]]
    """``with running(adapter)``: the model uses this adapter until the end of the block."""
    offer_check: OfferCheck
    closed: bool = False

    @property
    def epoch(self) -> int:
        """Changes with every known change of adapters or weights."""
        return self.adapters.epoch if self.adapters is not None else 0

    @property
    def active_adapters(self) -> tuple[str, ...]:
        """The adapters that the model uses now."""
        return self.adapters.active if self.adapters is not None and self.adapters.names else ()

    @property
    def loaded_adapters(self) -> tuple[str, ...]:
        """The adapters that requests may name."""
        return self.adapters.names if self.adapters is not None else ()

    def check_open(self) -> None:
        """Raise ClosedError once the engine was closed."""
        if self.closed:
            raise ClosedError("this engine was closed; make a new one around the model")


class BatchEngine(Protocol):
    """The part of :class:`kvboost.KVBoost` that a runner uses."""

    config: EngineConfig
    session: Session | None
    model: Any

    @property
    def parts(self) -> ModelParts:
        """What its tenants share, including the model."""
        ...

    def for_tenant(self, tenant: str) -> Self:
        """The same for another tenant."""
        ...

    def encode(self, prompt: Any) -> list[int]:
        """Validated token ids."""
        ...


class Sampler:
    """The sampler of one job. Keeps the generated tokens."""

    def __init__(self, job: Job, *, device: torch.device) -> None:
        self._top_logprobs = job.top_logprobs
        self.generated: list[int] = []
        seen: tuple[int, ...] = ()
        if (drawing := job.drawing) is not None:
            self._processors, seed, samples = drawing.processors, drawing.seed, drawing.seed is not None
            seen = job.token_ids if self._processors else ()
        else:
            seed, samples = job.sampling.seed, job.sampling.temperature > 0.0
            self._processors = logits_processors(
                job.sampling,
                job.constrain,
                self.generated,
                prompt=job.token_ids,
                end_token_ids=job.stop_token_ids,
                device=device,
            )
        # What the processors see: a copy on the device, which grows by tokens that were drawn there.
        self._ids = torch.tensor([seen], dtype=torch.long, device=device)
        self._drawn: torch.Tensor | None = None
        self._generator: torch.Generator | None = None
        if samples:
            self._generator = torch.Generator(device)
            if seed is not None:
                self._generator.manual_seed(seed)
            else:
                self._generator.seed()

    @property
    def takes_likeliest(self) -> bool:
        """Whether nothing but the likeliest token is wanted, which a batch finds for all at once."""
        return self._generator is None and not self._processors and self._top_logprobs is None

    def sample(self, logits: torch.Tensor) -> NewToken:
        """The next token from the model's logits [vocab], which are not modified."""
        [found] = sample_batch([self], logits[None])
        if isinstance(found, Exception):
            raise found
        return found

    def draw(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Integers for :meth:`accept`, as tensors [n] on the device."""
        scores = logits.float()[None]
        allowed = torch.ones(1, dtype=torch.long, device=scores.device)
        if self._processors:
            scores = self._processors(self._ids, scores)
            allowed = (scores.max() > -torch.inf).long()[None]  # not so for NaN either
        if self._generator is None:
            token = scores.max(dim=-1).indices
        else:
            # Where nothing is allowed there is nothing to draw from; accept() says so.
            weights = torch.where(allowed.bool(), scores, 0.0).softmax(dim=-1)
            token = torch.multinomial(weights, 1, generator=self._generator)[0]
        self._drawn = token
        if self._top_logprobs is None:
            return [allowed, token]
        # From the model's own logits, before any processor.
        logprobs = logits.float().log_softmax(dim=-1)
        values, ids = logprobs.topk(min(self._top_logprobs, len(logprobs)))
        return [allowed, token, _bits(logprobs[token]), ids, _bits(values)]

    def accept(self, drawn: Iterator[int]) -> NewToken:
        """The next token, from what was drawn."""
        if not next(drawn):
            raise ConfigError("no token is allowed here; the constraint or logit_bias forbids them all")
        token = next(drawn)
        if self._top_logprobs is None:
            return NewToken(token)
        logprob, *rest = drawn
        ids, values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        return NewToken(token, _number(logprob), tuple(zip(ids, map(_number, values), strict=True)))

    def keep(self, token_id: int) -> None:
        """The next token is this one, which was accepted."""
        self.generated.append(token_id)
        if self._processors and self._drawn is not None:
            self._ids = torch.cat([self._ids, self._drawn[None].to(self._ids.device)], dim=1)


def sample_batch(samplers: Sequence[Sampler | None], logits: torch.Tensor) -> list[NewToken | Exception]:
    """The next token of every sampler from its row of ``logits`` [batch, vocab], or why there is none.

    Rows without a sampler are passed over; their token means nothing.
    """
    drawn: list[list[torch.Tensor] | Exception] = []
    try:
        likeliest = logits.max(dim=-1).indices  # the first of equal ones; faster than argmax for bfloat16
        for sampler, row in zip(samplers, logits, strict=True):
            try:
                drawn.append([] if sampler is None or sampler.takes_likeliest else sampler.draw(row))
            except Exception as error:  # noqa: BLE001 - a constraint of one job fails for that job only
                drawn.append(error)
        pieces = [piece for found in drawn if not isinstance(found, Exception) for piece in found]
        numbers = iter(torch.cat([likeliest, *pieces]).tolist())  # the one wait for the device
    except Exception as error:  # noqa: BLE001 - without its logits no job of the batch has a next token
        return [error] * len(samplers)
    tokens = list(islice(numbers, len(samplers)))
    results: list[NewToken | Exception] = []
    for sampler, token, found in zip(samplers, tokens, drawn, strict=True):
        if isinstance(found, Exception):
            results.append(found)
            continue
        own = list(islice(numbers, sum(len(piece) for piece in found)))
        try:
            new = sampler.accept(iter(own)) if own and sampler is not None else NewToken(token)
            if sampler is not None:
                sampler.keep(new.token_id)
        except Exception as error:  # noqa: BLE001 - likewise
            results.append(error)
            continue
        results.append(new)
    return results


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Float32 numbers as integers of the same bits, so that they travel with token ids."""
    return numbers.view(torch.int32).long()


def _number(bits: int) -> float:
    (number,) = struct.unpack("<f", struct.pack("<i", bits))
    return float(number)
