"""One job while it runs: its prefill, its sampler, and what of it has been computed.

Used by the batching, on its thread only. Invariant: ``close`` gives back the lease and the cache, whatever happened.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import torch

from kvboost.core.clock import StageClock
from kvboost.core.prefill import PrefillState
from kvboost.core.session import Session
from kvboost.scheduler.jobs import Finished, Job, NewToken
from kvboost.scheduler.sampler import Sampler
from kvboost.types import ReuseReport


class JobTicket:
    """What the submitter holds: events in, a wish to stop out."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: queue.SimpleQueue[NewToken | Finished] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._wake = wake

    def events(self) -> Iterator[NewToken | Finished]:
        """Each new token as it comes, then :class:`Finished`. Blocks; called from one thread."""
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, Finished):
                return

    def cancel(self) -> None:
        """Stop within one step and let go of everything; harmless when it has ended."""
        self._cancelled.set()
        self._wake()

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the rest."""
        return self._cancelled.is_set()

    def put(self, event: NewToken | Finished) -> None:
        """Tell the submitter."""
        self._events.put(event)


_TOKENS_AHEAD = 256  # capacity made for an answer to begin with; then twice as much, and so on


class RunningJob:
    """A job from ``submit`` to its end."""

    def __init__(self, job: Job, *, session: Session, ticket: JobTicket, device: torch.device) -> None:
        self.job = job
        self.ticket = ticket
        self.prefiller = session.prefiller
        self._since_submit = self._clock = StageClock()
        self._sampler = Sampler(job, device=device)
        self._state: PrefillState | None = None
        self._report: ReuseReport | None = None
        self._fed = 0
        """New tokens that stand in the cache. The others are computed next, one per step, known or not."""
        self._first_token_seconds: float | None = None
        self._tokens_ahead = min(_TOKENS_AHEAD, job.max_new_tokens)
        self.epoch: int | None = None
        """Of the model when it was first opened: what it draws must all be one model's."""
        self.prefetching: Future[int] | None = None
        """What slower tiers bring up meanwhile."""

    @property
    def state(self) -> PrefillState:
        """The open prefill."""
        assert self._state is not None
        return self._state

    @property
    def is_open(self) -> bool:
        """Whether it holds a cache."""
        return self._state is not None

    @property
    def cached_bytes(self) -> int:
        """Bytes of its cache. Any thread may ask."""
        state = self._state
        return state.cache.nbytes if state is not None else 0

    @property
    def tokens(self) -> int:
        """How many tokens there must be capacity for, as long as it does not grow."""
        return len(self.job.token_ids) + self._tokens_ahead

    @property
    def max_tokens(self) -> int:
        """How many there may come to be."""
        return len(self.job.token_ids) + self.job.max_new_tokens

    @property
    def must_grow(self) -> bool:
        """Whether its cache is full; then ``tokens`` says how many are wanted."""
        cache = self.state.cache
        if cache.get_seq_length() < cache.capacity:
            return False
        while self.tokens <= cache.capacity and self._tokens_ahead < self.job.max_new_tokens:
            self._tokens_ahead = min(2 * self._tokens_ahead, self.job.max_new_tokens)
        return True

    def grow(self) -> None:
        """Go on in a larger cache."""
        self.state.grow(self.prefiller.pool.make(tokens=self.tokens))

    def open(self, *, approx: bool, max_repaired: int | None) -> None:
        """Place what is stored. More than ``max_repaired`` positions are not repaired in one go."""
        if self._report is not None:
            self._clock = StageClock()  # prefilled again after a preemption: what that takes is counted on its own
        if self.prefetching is not None:
            self.prefetching.cancel()  # what has not begun is not needed any more
        self._clock.lap("waiting")
        state = self.prefiller.open(
            list(self.job.token_ids),
            boundaries=self.job.boundaries,
            new_tokens=self._tokens_ahead,
            clock=self._clock,
            approx=approx,
        )
        self._state = state
        repaired = state.last_step - state.plan.approx_start
        if state.awaits_repair and max_repaired is not None and repaired > max_repaired:
            state.drop_approx(
                f"repairing {repaired} tokens at once would hold up the other jobs, so they were computed"
            )

    def steps_left(self) -> list[int]:
        """Tokens of the steps this prompt still needs, in order; a repair counts as one."""
        state = self.state
        if state.num_computed >= len(state.tokens):
            return []
        plan, last = state.plan, state.last_step
        exact = [
            step.end - step.start
            for step in plan.steps
            if state.num_computed <= step.start < min(plan.approx_start, last)
        ]
        repair = [last - plan.approx_start] if state.awaits_repair else []
        return [*exact, *repair, len(state.tokens) - last]

    def chunks_at_hand(self) -> int:
        """Leading chunks that are stored, or were offered to the store."""
        end = min(self.state.num_computed, self.state.plan.approx_start)
        return sum(chunk.end <= end for chunk in self.state.prompt.usable)

    def chunks_provided(self) -> int:
        """Leading chunks that will be, once the prompt is prefilled: none behind a repositioned one."""
        return sum(chunk.end <= self.state.plan.approx_start for chunk in self.state.prompt.usable)

    def prefill_on(self) -> torch.Tensor | None:
        """Run the next step. Returns the logits of the last one, [vocab]."""
        state, prefiller = self.state, self.prefiller
        self._clock.lap("waiting")
        if len(self.steps_left()) == 1:
            return prefiller.finish(state)
        plan, done = state.plan, state.num_computed
        following = [step.end for step in plan.steps if done <= step.start < plan.approx_start]
        # Behind repositioned chunks everything but the last step is one repair.
        prefiller.advance(state, to=min(following[0], state.last_step) if following else state.last_step)
        prefiller.commit(state)  # at once: others may wait for it
        self._clock.lap("commit")
        return None

    def begin(self, logits: torch.Tensor) -> NewToken | None:
        """The first new token, once the prompt is prefilled; None if it was drawn before a preemption."""
        token = None
        if not self._sampler.drawn:
            token = self._sampler.draw(logits)
            self._first_token_seconds = self._since_submit.elapsed_ms / 1000.0
            self.ticket.put(token)
        self.prefiller.commit(self.state)
        self._clock.lap("commit")
        if self._report is None:
            self._report = self.state.report()
        self._fed = 0
        return token

    @property
    def next_input(self) -> int:
        """The token whose logits are needed next."""
        return self._sampler.drawn[self._fed]

    def take(self, logits: torch.Tensor) -> NewToken | None:
        """The logits behind ``next_input``: draw the next token, unless it is known from before a preemption."""
        self._fed += 1
        if self._fed < len(self._sampler.drawn):
            return None
        token = self._sampler.draw(logits)
        self.ticket.put(token)
        return token

    @property
    def drawn(self) -> list[int]:
        """The new tokens."""
        return self._sampler.drawn

    @property
    def end(self) -> str | None:
        """``stop`` or ``length`` once the job is done."""
        drawn = self._sampler.drawn
        if drawn and drawn[-1] in self.job.stop_token_ids:
            return "stop"
        return "length" if len(drawn) >= self.job.max_new_tokens else None

    def finished(self, reason: str, *, error: str | None = None) -> Finished:
        """The last event."""
        report = self._report
        if report is None and self._state is not None and self._sampler.drawn:
            report = self._state.report()
        return Finished(reason, report, self._first_token_seconds, error)  # type: ignore[arg-type]

    def keep_decoded(self) -> None:
        """Offer the KV of the new tokens to the store."""
        self.prefiller.commit_decoded(self.state, self._sampler.drawn)

    def close(self) -> None:
        """Give everything back. It may be opened again."""
        if self.prefetching is not None:
            self.prefetching.cancel()
        if self._state is not None:
            state, self._state = self._state, None
            state.close()

    def shared_chain(self) -> Sequence[tuple[bytes, int]]:
        """Keys and ends of the leading chunks whose KV any other job with the same keys holds too, bit for bit."""
        if not self.state.hits.bitwise:
            return ()
        end = self.state.plan.approx_start
        return [(chunk.prefix_key, chunk.end) for chunk in self.state.prompt.usable if chunk.end <= end]
