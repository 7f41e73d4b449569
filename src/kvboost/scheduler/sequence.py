"""One running job: its prefill, its sampler and its progress.

Used by the batch runner, on its thread only. Invariant: ``close`` releases the lease and the cache in every case.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import closing

import torch

from kvboost.core.costs import StageClock
from kvboost.core.session import Session
from kvboost.core.state import ChunkedPrompt, PrefillState
from kvboost.failures import log_failure
from kvboost.hf.adapters import AS_SET, AdapterName
from kvboost.hf.rows import Row, RowBatch
from kvboost.scheduler.fetching import JobFetch
from kvboost.scheduler.jobs import Finished, Job, ModelParts, NewToken, Sampler, Ticket
from kvboost.types import ReuseReport

_log = logging.getLogger("kvboost.engine")

_INITIAL_NEW_TOKENS = 256  # initial capacity for new tokens; doubled whenever it is full


class RunningJob:
    """A job from ``submit`` to its end."""

    def __init__(
        self,
        job: Job,
        *,
        session: Session,
        ticket: Ticket,
        parts: ModelParts,
        max_step: int = sys.maxsize,
        waits_for_tiers: bool = True,
    ) -> None:
        """Without ``waits_for_tiers`` what lies in slower tiers is loaded when the job is opened."""
        self.max_step = max_step
        """Tokens that a prefill step takes at most, where its length is free."""
        self.adapter: AdapterName = job.adapter or AS_SET
        self.job = job
        self.ticket = ticket
        self._session, self.prefiller = session, session.prefiller
        self._since_submit = self._clock = StageClock()
        self._sampler = Sampler(job, device=parts.runner.device)
        self._state: PrefillState | None = None
        self._report: ReuseReport | None = None
        self._batch: RowBatch | None = None
        self._row: Row | None = None
        self._fed = 0
        """New tokens whose KV is in the cache. The others are computed next, one per step."""
        self._prefilled = 0
        """New tokens that the open prefill has as part of its prompt: those from before a preemption."""
        self._first_token_seconds: float | None = None
        self._queued_seconds: float | None = None
        self._reserved_tokens = min(_INITIAL_NEW_TOKENS, job.max_new_tokens)
        self.epoch = parts.epoch
        """The model's when the job was submitted: all its tokens must come from one model."""
        self.adapters: tuple[str, ...] | None = None
        """Those in use when it was first opened."""
        self.has_tiers = waits_for_tiers and session.fetches(len(job.token_ids))
        """Whether its KV may lie in slower tiers, which the model's thread does not wait for."""
        self.fetch: JobFetch | None = None
        """What is loaded from them while the job waits."""

    @property
    def state(self) -> PrefillState:
        """The open prefill."""
        assert self._state is not None
        return self._state

    @property
    def group(self) -> str:
        """Jobs of one group may run together: those of one adapter."""
        return self.job.adapter or ""

    @property
    def is_open(self) -> bool:
        """Whether it holds a cache."""
        return self._state is not None

    @property
    def cached_bytes(self) -> int:
        """Bytes of its cache. Thread-safe."""
        state = self._state
        return state.cache.nbytes if state is not None else 0

    @property
    def tokens(self) -> int:
        """Tokens it needs capacity for until it grows."""
        return len(self.job.token_ids) + self._reserved_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens it may need capacity for in the end."""
        return len(self.job.token_ids) + self.job.max_new_tokens

    @property
    def must_grow(self) -> bool:
        """Whether its cache is full; then ``tokens`` is the capacity it needs."""
        cache = self.state.cache
        if cache.get_seq_length() < cache.capacity:
            return False
        while self.tokens <= cache.capacity and self._reserved_tokens < self.job.max_new_tokens:
            self._reserved_tokens = min(2 * self._reserved_tokens, self.job.max_new_tokens)
        return True

    def grow(self) -> None:
        """Continue in a larger cache."""
        if self._batch is None:
            self.state.move_to(self.prefiller.pool.make(tokens=self.tokens))
        else:
            self.join(self._batch)

    @property
    def row(self) -> Row:
        """Its row of the batch that it has joined."""
        assert self._row is not None
        return self._row

    @property
    def has_joined(self) -> bool:
        """Whether its KV lies in a batch."""
        return self._row is not None

    def join(self, batch: RowBatch) -> None:
        """Continue in a row of ``batch``."""
        row = batch.add(tokens=self.tokens, filled=self.state.cache.get_seq_length())
        try:
            self.state.move_to(row)
        except BaseException:
            batch.remove(row)
            raise
        self._remove_row()
        self._batch, self._row = batch, row

    def leave(self) -> None:
        """Continue in a cache of its own."""
        if self._row is not None:
            self.state.move_to(self.prefiller.pool.make(tokens=self.tokens))
            self._remove_row()

    def _remove_row(self) -> None:
        if self._batch is not None and self._row is not None:
            self._batch.remove(self._row)
        self._batch = self._row = None

    def open(self, *, approx: bool, max_repaired: int | None, prefill_answer: bool = False) -> None:
        """Place stored KV. Repairs that compute more than ``max_repaired`` tokens are dropped.

        After a preemption, ``prefill_answer`` prefills the new tokens along with the prompt, as far as there is
        capacity reserved for them.
        """
        if self._queued_seconds is None:
            self._queued_seconds = self._since_submit.elapsed_ms / 1000.0
        if self._report is not None:
            self._clock = StageClock()  # prefilled again after a preemption: timed separately
        fetch, self.fetch = self.fetch, None
        fetched = fetch.result() if fetch is not None else None
        self._clock.lap("waiting")
        prompt = list(self.job.token_ids)
        answered = self._sampler.generated[: self._reserved_tokens - 1] if prefill_answer else []
        self._prefilled = len(answered)
        state = self.prefiller.open(
            prompt + answered,
            boundaries=(*self.job.boundaries, len(prompt)) if answered else self.job.boundaries,
            new_tokens=self._reserved_tokens - len(answered),
            clock=self._clock,
            approx=approx,
            fetched=fetched,
        )
        self._state = state
        if state.awaits_repair and max_repaired is not None and state.repair_tokens > max_repaired:
            state.drop_approx(
                f"a repair that computes {state.repair_tokens} tokens in one step would delay the other jobs (limit "
                f"{max_repaired}), so the prompt was computed in several; lower recompute_ratio (quality='fast' has "
                "less), store more of the text, or give BatchRunner a larger chunk_budget"
            )

    @property
    def must_fetch(self) -> bool:
        """Whether its KV has to be loaded before it is opened."""
        return self.has_tiers and self.fetch is None

    @property
    def awaits_fetch(self) -> bool:
        """Whether nothing is to be done for it before its KV is loaded."""
        return self.fetch is not None and not self.fetch.is_over and not self.ticket.cancelled

    def begin_fetch(self, prompt: ChunkedPrompt | None = None, *, approx: bool) -> None:
        """Load its KV, while it waits: under the keys of ``prompt``, or of the model as it is now."""
        prompt = prompt or self.prefiller.chunk(list(self.job.token_ids), self.job.boundaries)
        self.fetch = JobFetch(self._session, prompt, approx=approx, wake=self.ticket.wake)

    def steps_left(self) -> list[int]:
        """Tokens of the remaining prefill steps, in order; a repair counts as one step."""
        state = self.state
        if state.num_computed >= len(state.tokens):
            return []
        exact = [end - start for start, end in self._exact_steps()]
        if state.awaits_repair:
            return [*exact, state.last_step - state.plan.approx_start, len(state.tokens) - state.last_step]
        return exact

    def _exact_steps(self) -> list[tuple[int, int]]:
        """The remaining steps before the first repositioned chunk, or all of them. The last one has the last token."""
        state, steps = self.state, []
        start, limit = state.num_computed, state.plan.approx_start if state.awaits_repair else len(state.tokens)
        while start < limit:
            end = state.step_end(limit, start=start)
            if state.rule.grid is None:  # steps of any length: no longer than other jobs should wait
                end = min(end, start + self.max_step)
            steps.append((start, end))
            start = end
        return steps

    def chunks_available(self) -> int:
        """Leading chunks that are stored, or were offered to the store."""
        end = min(self.state.num_computed, self.state.plan.approx_start, len(self.job.token_ids))
        return sum(chunk.end <= end for chunk in self.state.prompt.usable)

    def chunks_provided(self) -> int:
        """Leading chunks that will be stored after the prefill: none after a repositioned one."""
        end = min(self.state.plan.approx_start, len(self.job.token_ids))
        return sum(chunk.end <= end for chunk in self.state.prompt.usable)

    def prefill_step(self) -> torch.Tensor | None:
        """Run the next step. Returns the logits of the last one, [vocab]."""
        state, prefiller = self.state, self.prefiller
        self._clock.lap("waiting")
        if len(self.steps_left()) == 1:
            return prefiller.finish(state)
        following = self._exact_steps()
        if following:
            prefiller.advance(state, to=following[0][1])
        else:  # after repositioned chunks everything but the last step is one repair
            prefiller.advance_to_last_step(state)
        prefiller.commit(state)  # immediately: other jobs may wait for it
        self._clock.lap("commit")
        return None

    def start_decoding(self, logits: torch.Tensor) -> NewToken | None:
        """Sample the next new token after the prefill; None if it was sampled before a preemption."""
        token = None
        self._fed = self._prefilled
        if len(self._sampler.generated) == self._prefilled:
            token = self._sampler.sample(logits)
            if self._first_token_seconds is None:
                self._first_token_seconds = self._since_submit.elapsed_ms / 1000.0
            self.ticket.put(token)
        self.prefiller.commit(self.state)
        self._clock.lap("commit")
        if self._report is None:
            self._report = self.state.report()
        return token

    @property
    def next_input(self) -> int:
        """The token whose logits are needed next."""
        return self._sampler.generated[self._fed]

    def fed(self) -> Sampler | None:
        """The KV of ``next_input`` is in the cache. What samples the next token, unless that is known already."""
        self._fed += 1
        return self._sampler if self._fed == len(self._sampler.generated) else None

    @property
    def generated(self) -> list[int]:
        """The new tokens."""
        return self._sampler.generated

    @property
    def decoded(self) -> list[int]:
        """The new tokens after those that the open prefill has as part of its prompt."""
        return self._sampler.generated[self._prefilled :]

    @property
    def end(self) -> str | None:
        """``stop`` or ``length`` once the job is done."""
        generated = self._sampler.generated
        if generated and (generated[-1] in self.job.stop_token_ids or self._meets_criterion()):
            return "stop"
        return "length" if len(generated) >= self.job.max_new_tokens else None

    def _meets_criterion(self) -> bool:
        drawing = self.job.drawing
        if drawing is None or not drawing.criteria:
            return False
        ids = torch.tensor([[*self.job.token_ids, *self._sampler.generated]])
        return bool(drawing.criteria(ids, None).all())

    def finish(self, reason: str, *, error: str | None, refused: bool) -> None:
        """Release everything, then deliver the last event, whatever fails meanwhile."""
        last = Finished("error", None, error=error, refused=refused)
        try:
            with closing(self):
                last = self._finished(reason, error=error, refused=refused)
        except Exception as failure:  # noqa: BLE001 - other jobs are unaffected
            log_failure(_log, failure, "a job that ended (%s) could not report or release its resources", reason)
        finally:
            self.ticket.put(last)

    def _finished(self, reason: str, *, error: str | None, refused: bool) -> Finished:
        report = self._report
        if report is None and self._state is not None and self._sampler.generated:
            report = self._state.report()
        return Finished(
            reason,  # type: ignore[arg-type]
            report,
            self._first_token_seconds,
            error,
            refused=refused,
            queued_seconds=self._queued_seconds,
            seconds=self._since_submit.elapsed_ms / 1000.0,
        )

    def keep_decoded(self) -> None:
        """Offer the KV of the new tokens to the store, if the engine keeps that."""
        if self._session.keeps_decoded:
            self.prefiller.commit_decoded(self.state, self.decoded)

    def close(self) -> None:
        """Release everything. The job may be opened again."""
        if self.fetch is not None:
            self.fetch.cancel()
            self.fetch = None
        if self._state is not None:
            state, self._state = self._state, None
            try:
                self._remove_row()
            finally:
                state.close()

    def shared_chain(self) -> Sequence[tuple[bytes, int]]:
        """Keys and ends of the leading chunks whose KV is bitwise the same in every job with the same keys."""
        if not self.state.hits.bitwise:
            return ()
        end = self.state.plan.approx_start
        return [(chunk.prefix_key, chunk.end) for chunk in self.state.prompt.usable if chunk.end <= end]
