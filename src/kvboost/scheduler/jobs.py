"""Jobs and their events: the boundary between a server and the scheduler.

Made by :mod:`kvboost.serve`, run by :mod:`kvboost.scheduler.runner`. Invariant: after ``submit`` every ticket ends,
with :class:`Finished` as its last event, whatever happens to the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal, Protocol, Self

from kvboost.config import EngineConfig
from kvboost.core.prefill import Prefiller
from kvboost.core.session import Session
from kvboost.core.spans import ApproxSpans
from kvboost.core.state import ChunkedPrompt
from kvboost.hf.adapters import AS_SET, AdapterName
from kvboost.hf.cache import KVLayout
from kvboost.hf.runner import ModelRunner
from kvboost.hf.sampling import Constraint, Drawing, Sampling
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


class ModelParts(Protocol):
    """What a runner shares with the other requests of its engine."""

    runner: ModelRunner
    refusal: str | None

    @property
    def running(self) -> Callable[..., AbstractContextManager[None]]:
        """``with running()`` keeps the model's adapters from changing."""
        ...

    @property
    def epoch(self) -> int:
        """Changes with every known change of adapters or weights."""
        ...

    @property
    def active_adapters(self) -> tuple[str, ...]:
        """The adapters that the model uses now."""
        ...

    @property
    def loaded_adapters(self) -> tuple[str, ...]:
        """The adapters that jobs may name."""
        ...

    def check_open(self) -> None:
        """Raise ClosedError once the engine was closed."""
        ...

    @property
    def layout(self) -> KVLayout | None:
        """The layout of the model's KV; None for a model without reuse."""
        ...

    def offer_check(
        self,
        prefiller: Prefiller,
        prompt: ChunkedPrompt,
        spans: ApproxSpans | None,
        produced: Sequence[int],
        adapter: AdapterName = AS_SET,
    ) -> None:
        """Offer a finished request for a shadow check, if anything was or could have been repositioned in it."""
        ...


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
