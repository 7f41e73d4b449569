"""What a server hands to whoever runs the model, and what it gets back: the boundary between HTTP and scheduling.

Made by :mod:`kvboost.serve`, run by a :class:`JobRunner`. Invariant: after ``submit`` every ticket ends, with
:class:`Finished` as its last event, whatever happens to the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from kvboost.config import EngineConfig
from kvboost.core.prefill import PrefillState
from kvboost.core.prefiller import Prefiller
from kvboost.core.session import Session
from kvboost.hf.cache import KVLayout
from kvboost.hf.runner import ModelRunner
from kvboost.hf.sampling import Constraint, Sampling
from kvboost.types import ReuseReport

__all__ = [
    "BatchEngine",
    "Constraint",
    "Finished",
    "Job",
    "JobRunner",
    "ModelParts",
    "NewToken",
    "RunnerLoad",
    "Sampling",
    "Ticket",
]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sequence to continue."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    may_shorten: bool = False
    """Take fewer new tokens where there is no capacity for so many; otherwise such a job is refused."""
    sampling: Sampling = field(default_factory=Sampling)
    boundaries: tuple[int, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Ends the job; the token itself is reported as its last."""
    top_logprobs: int | None = None
    """None for no log-probabilities, 0 for the chosen token's only."""
    constrain: Constraint | None = None
    tenant: str = ""


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
    """None if the job ended before its prompt was read."""
    first_token_seconds: float | None = None
    """From ``submit``."""
    error: str | None = None


class Ticket(Protocol):
    """A job under way."""

    def events(self) -> Iterator[NewToken | Finished]:
        """Each new token as it comes, then :class:`Finished`. Blocks; called from one thread."""
        ...

    def cancel(self) -> None:
        """Stop within one step and let go of everything; harmless when it has ended."""
        ...


@dataclass(frozen=True)
class RunnerLoad:
    """What a runner has to do at the moment."""

    running: int
    waiting: int
    cached_bytes: int
    """Of KV held by running jobs."""
    one_by_one: bool = False
    """Whether new tokens are computed job by job; the log says why."""
    alive: bool = True
    """False once the runner was closed or has failed for good: it takes no more jobs."""


class JobRunner(Protocol):
    """Runs jobs side by side. Thread-safe."""

    def submit(self, job: Job) -> Ticket:
        """Take the job.

        Raises CapacityError for one that can never fit, BusyError if too many wait, ClosedError if none is taken any
        more.
        """
        ...

    def load(self) -> RunnerLoad:
        """What is running and waiting."""
        ...

    def close(self) -> None:
        """Cancel what runs, end every ticket and let go of everything."""
        ...


class ModelParts(Protocol):
    """What runs side by side with other requests of an engine has to share with them."""

    runner: ModelRunner
    refusal: str | None

    @property
    def running(self) -> Callable[..., AbstractContextManager[None]]:
        """``with running()``: nobody changes the model's adapters meanwhile."""
        ...

    @property
    def epoch(self) -> int:
        """Changes with every change of adapters or weights that the engine was told of."""
        ...

    @property
    def layout(self) -> KVLayout | None:
        """Of the model's KV; None for a model without reuse."""
        ...

    def offer_check(self, prefiller: Prefiller, state: PrefillState, produced: Sequence[int]) -> None:
        """Perhaps answer a request once more without repositioned chunks."""
        ...


class BatchEngine(Protocol):
    """An engine as a runner of jobs uses it; :class:`kvboost.KVBoost` is one."""

    config: EngineConfig
    session: Session | None
    model: Any

    @property
    def parts(self) -> ModelParts:
        """What its tenants share."""
        ...

    def for_tenant(self, tenant: str) -> Self:
        """The same for another tenant."""
        ...

    def encode(self, prompt: Any) -> list[int]:
        """Token ids, checked."""
        ...
