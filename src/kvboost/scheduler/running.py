"""One job while it runs: its reading, its sampler, and what of it has been computed.

Used by the batching, on its thread only. Invariant: ``close`` gives back the lease and the cache, whatever happened.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import torch

from kvboost.approx.shadow import Answered, ShadowChecks
from kvboost.core.clock import StageClock
from kvboost.core.plan import reusable_chunks
from kvboost.core.prefill import Prefiller, PrefillState
from kvboost.scheduler.jobs import Finished, Job, NewToken
from kvboost.scheduler.sampler import Sampler
from kvboost.types import Chunk, ReuseReport


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


_ROWS_AHEAD = 256  # room made for an answer to begin with; then twice as much, and so on


class RunningJob:
    """A job from ``submit`` to its end."""

    def __init__(self, job: Job, *, reader: Prefiller, ticket: JobTicket, device: torch.device) -> None:
        self.job = job
        self.ticket = ticket
        self.reader = reader
        self._since_submit = self._clock = StageClock()
        self._sampler = Sampler(job, device=device)
        self._reading: PrefillState | None = None
        self._report: ReuseReport | None = None
        self._fed = 0
        """New tokens that stand in the cache. The others are computed next, one per step, known or not."""
        self._first_token_seconds: float | None = None
        self._rows_ahead = min(_ROWS_AHEAD, job.max_new_tokens)
        self.fetching: Future[int] | None = None
        """What slower tiers bring up meanwhile."""

    @property
    def reading(self) -> PrefillState:
        """The open reading."""
        assert self._reading is not None
        return self._reading

    @property
    def is_open(self) -> bool:
        """Whether it holds a cache."""
        return self._reading is not None

    @property
    def cached_bytes(self) -> int:
        """Bytes of its cache. Any thread may ask."""
        reading = self._reading
        return reading.cache.nbytes if reading is not None else 0

    @property
    def rows(self) -> int:
        """How many rows there must be room for, as long as it does not grow."""
        return len(self.job.token_ids) + self._rows_ahead

    @property
    def most_rows(self) -> int:
        """How many there may come to be."""
        return len(self.job.token_ids) + self.job.max_new_tokens

    @property
    def must_grow(self) -> bool:
        """Whether there is no room for one more row; then ``rows`` says how many are wanted."""
        cache = self.reading.cache
        if cache.get_seq_length() < cache.capacity:
            return False
        while self.rows <= cache.capacity and self._rows_ahead < self.job.max_new_tokens:
            self._rows_ahead = min(2 * self._rows_ahead, self.job.max_new_tokens)
        return True

    def grow(self) -> None:
        """Make that room."""
        self.reading.grow(rows=self.rows)

    def open(self, *, move: bool, most_repaired: int | None) -> None:
        """Plan the prompt and place what is stored. More than ``most_repaired`` rows are not repaired in one go."""
        if self._report is not None:
            self._clock = StageClock()  # read again after a preemption: what that takes is counted on its own
        if self.fetching is not None:
            self.fetching.cancel()  # what has not begun is not needed any more
        self._clock.lap("waiting")
        tokens = list(self.job.token_ids)
        reading = self.reader.open(
            tokens, boundaries=self.job.boundaries, new_rows=self._rows_ahead, clock=self._clock, move=move
        )
        self._reading = reading
        if reading.moved is not None and most_repaired is not None:
            rows = reading.plan.steps[-1].start - reading.plan.untainted_end
            if rows > most_repaired:
                reading.stop_moving(
                    f"repairing {rows} tokens at once would hold up the other jobs, so they were computed"
                )

    def steps_left(self) -> list[int]:
        """Rows of the steps this prompt still needs, in order; a repair counts as one."""
        reading = self.reading
        done = reading.cache.get_seq_length()
        if done >= len(reading.tokens):
            return []
        plan, last = reading.plan, reading.plan.steps[-1]
        exact = [s.end - s.start for s in plan.steps if done <= s.start < min(plan.untainted_end, last.start)]
        repair = last.start - plan.untainted_end if reading.moved is not None and not reading.moved.repaired else 0
        return [*exact, *([repair] if repair else []), last.end - last.start]

    def chunks_at_hand(self) -> int:
        """Leading chunks that are stored, or were offered to the store."""
        done = self.reading.cache.get_seq_length()
        return sum(chunk.end <= min(done, self.reading.plan.untainted_end) for chunk in self._shareable())

    def chunks_provided(self) -> int:
        """Leading chunks that will be, once the prompt is read: none behind a moved one."""
        return sum(chunk.end <= self.reading.plan.untainted_end for chunk in self._shareable())

    def read_on(self) -> torch.Tensor | None:
        """Run the next step. Returns the logits of the last one, [vocab]."""
        reading, reader = self.reading, self.reader
        self._clock.lap("waiting")
        left = self.steps_left()
        if len(left) == 1:
            return reader.finish(reading)
        done, last = reading.cache.get_seq_length(), reading.plan.steps[-1]
        following = [s.end for s in reading.plan.steps if done <= s.start < reading.plan.untainted_end]
        # Behind moved chunks everything but the last step is one repair.
        reader.advance(reading, to=min(following[0], last.start) if following else last.start)
        reader.commit(reading)  # at once: others may wait for it
        self._clock.lap("commit")
        return None

    def begin(self, logits: torch.Tensor) -> NewToken | None:
        """The first new token, once the prompt is read; None if it was drawn before a preemption."""
        token = None
        if not self._sampler.drawn:
            token = self._draw(logits)
            self._first_token_seconds = self._since_submit.elapsed_ms / 1000.0
            self.ticket.put(token)
        self.reader.commit(self.reading)
        self._clock.lap("commit")
        if self._report is None:
            self._report = self.reading.report()
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
        token = self._draw(logits)
        self.ticket.put(token)
        return token

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
        if report is None and self._reading is not None and self._sampler.drawn:
            report = self._reading.report()
        return Finished(reason, report, self._first_token_seconds, error)  # type: ignore[arg-type]

    def keep_decoded(self) -> None:
        """Offer the KV of the new tokens to the store."""
        self.reader.commit_decoded(self.reading, self._sampler.drawn)

    def offer_to(self, shadow: ShadowChecks) -> None:
        """Perhaps answer this once more without moved chunks, as other requests are."""
        moved = self.reading.moved
        if moved is not None and moved.repaired:
            tokens, boundaries = list(self.job.token_ids), self.job.boundaries
            shadow.offer(Answered(tokens, boundaries, moved.blocks, list(self._sampler.drawn), self.reader))

    def close(self) -> None:
        """Give everything back. It may be opened again."""
        if self.fetching is not None:
            self.fetching.cancel()
        if self._reading is not None:
            reading, self._reading = self._reading, None
            reading.close()

    def shared_chain(self) -> Sequence[tuple[bytes, int]]:
        """Keys and ends of the leading chunks whose rows any other job with the same keys holds too, bit for bit."""
        if not self.reading.begins_bitwise:
            return ()
        end = self.reading.plan.untainted_end
        return [(chunk.prefix_key, chunk.end) for chunk in self._shareable() if chunk.end <= end]

    def _draw(self, logits: torch.Tensor) -> NewToken:
        return self._sampler.draw(logits)

    def _shareable(self) -> Sequence[Chunk]:
        return reusable_chunks(self.reading.chunks, prompt_tokens=len(self.reading.tokens))
