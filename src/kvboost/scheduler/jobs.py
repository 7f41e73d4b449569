"""What a server hands to whoever runs the model, and what it gets back: the seam between HTTP and scheduling.

Made by :mod:`kvboost.serve`, run by a :class:`JobRunner`. Invariant: after ``submit`` every ticket ends, with
:class:`Finished` as its last event, whatever happens to the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from kvboost.types import ReuseReport

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. The defaults are greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sequence to continue."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    may_shorten: bool = False
    """Take fewer new tokens where there is no room for so many; otherwise such a job is refused."""
    sampling: Sampling = Sampling()
    boundaries: tuple[int, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Ends the job; the token itself is reported as its last."""
    top_logprobs: int | None = None
    """None for no log-probabilities, 0 for the chosen token's only."""
    constrain: Callable[[list[int], torch.Tensor], None] | None = None
    """Given the new tokens so far and the next one's logits (vocabulary,), forbids tokens in place."""
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
