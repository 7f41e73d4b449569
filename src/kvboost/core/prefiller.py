"""Prefills prompts: look up, place, compute what is missing, commit.

Used by the engine and by the scheduler for every kind of request: one prefill path, one commit point. Invariants: a
step is one chunk of the prompt's own grid or its tail, whatever was reused; only KV straight from such a step is
committed under an exact key, and only behind KV that came from such steps itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvboost.core.backend import Codec, KVCache, NoApprox, NonPrefixReuse, Runner
from kvboost.core.clock import StageClock
from kvboost.core.costs import CostModel
from kvboost.core.guarded import GuardedStore, loads_of
from kvboost.core.identity import PromptKeys
from kvboost.core.loader import KVLoader
from kvboost.core.prefill import ApproxSpans, ChunkedPrompt, ExactHits, PrefillState, tokens_by_tier
from kvboost.core.workspaces import WorkspacePool
from kvboost.extend import Lease
from kvboost.types import Chunk, KVBlock, PutOutcome, context_before

if TYPE_CHECKING:
    import torch


class RequestCancelled(Exception):
    """The caller closed the stream and no longer needs the result."""


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Prefiller:
    """Prefills with one model for one tenant. For another tenant, ``dataclasses.replace`` what is not shared."""

    runner: Runner
    codec: Codec
    keys: PromptKeys
    store: GuardedStore
    pool: WorkspacePool
    costs: CostModel = field(default_factory=CostModel)
    approx: NonPrefixReuse = field(default_factory=NoApprox)

    def exact_over(self, store: GuardedStore) -> Prefiller:
        """The same over another store with separate workspaces, exact reuse only: for measurements."""
        return replace(self, store=store, pool=self.pool.for_tenant(), costs=CostModel(), approx=NoApprox())

    def chunk(self, tokens: list[int], boundaries: Sequence[int]) -> ChunkedPrompt:
        """Cut the prompt into chunks, keyed by the model's current state."""
        snapshot = self.keys.snapshot()
        return ChunkedPrompt(tokens, boundaries, snapshot, self.keys.chunks(snapshot.root, tokens, boundaries))

    def open(
        self,
        tokens: list[int],
        *,
        boundaries: Sequence[int] = (),
        new_tokens: int = 0,
        clock: StageClock | None = None,
        approx: bool = False,
        using: Mapping[int, KVBlock] | None = None,
    ) -> PrefillState:
        """Place all stored KV of a prompt; the cache has capacity for ``new_tokens`` more.

        With ``approx``, chunks from other positions are reused too, where that is faster. ``using`` gives them by chunk
        index instead, to prefill a prompt as it was prefilled before.
        """
        clock = clock or StageClock()
        prompt = self.chunk(tokens, boundaries)
        clock.lap("plan")
        loader = KVLoader(prompt.usable, tokens=len(tokens) + new_tokens, codec=self.codec, pool=self.pool)
        lease = self.store.lease(prompt.usable, arrived=loader.arrived)
        spans: ApproxSpans | None = None
        reason: str | None = None
        try:
            blocks = lease.blocks
            if using is not None:
                blocks, spans = blocks[: min(using)], self.approx.replay(using)
            elif approx:
                spans, reason = self.approx.find(prompt.usable, available=len(blocks), prompt_tokens=len(tokens))
            clock.lap("lease")
            state = self._start(prompt, loader.finish(blocks), lease, blocks, clock)
            clock.lap("place")
        except BaseException:
            lease.release()
            if spans is not None:
                spans.lease.release()
            raise
        try:
            state.explain(reason)
            if spans is None:
                return state
            state.reposition(spans)
            try:
                self.approx.place(state)
            except Exception as error:  # noqa: BLE001 - a cache may only help: what cannot be placed is computed
                state.drop_approx(self.approx.failed(error))
            clock.lap("move")
            return state
        except BaseException:
            state.close()
            raise

    def _start(
        self, prompt: ChunkedPrompt, cache: KVCache, lease: Lease, blocks: Sequence[KVBlock], clock: StageClock
    ) -> PrefillState:
        hits = ExactHits(
            chunks=len(blocks),
            bitwise=all(block.bitwise for block in blocks),
            lease=lease,
            tiers=tokens_by_tier(blocks, loads_of(lease)),
        )
        state = PrefillState(prompt, cache, hits=hits, clock=clock, pool=self.pool)
        cache.set_length(state.num_computed)
        return state

    def knows(self, tokens: list[int]) -> bool:
        """Whether every chunk of this text, cut on its own, is stored somewhere."""
        return self.store.knows_content(self.chunk(tokens, [len(tokens)]).chunks)

    def advance(self, state: PrefillState, *, to: int, cancelled: Callable[[], bool] = _never) -> None:
        """Compute what is missing up to position ``to``, which may lie inside a step.

        Behind repositioned chunks there is one repair up to the last step, so ``to`` lies before them or not before
        the last step.
        """
        if state.awaits_repair and state.plan.approx_start < to < state.last_step:
            raise ValueError(f"a repair runs up to position {state.last_step}; it cannot stop at {to}")
        self._run_steps(state, to=min(to, state.plan.approx_start), cancelled=cancelled)
        if state.awaits_repair and to >= state.last_step:
            state.clock.lap("prefill")
            try:
                self.approx.repair(state)
            except Exception as error:  # noqa: BLE001 - a cache may only help: what cannot be repaired is computed
                state.drop_approx(self.approx.failed(error))
        self._run_steps(state, to=to, cancelled=cancelled)
        state.clock.lap("prefill")

    def _run_steps(self, state: PrefillState, *, to: int, cancelled: Callable[[], bool]) -> None:
        for step in state.plan.steps:
            if step.start >= to:
                break
            end = min(step.end, to)
            if end <= state.num_computed:
                continue
            if cancelled():
                raise RequestCancelled
            self.runner.append(state.tokens[state.num_computed : end], state.cache, logits=False)
            state.computed(end)
            if state.paged:
                self.commit(state)  # while most of these positions are in memory

    def advance_to_last_step(self, state: PrefillState, *, cancelled: Callable[[], bool] = _never) -> None:
        """Run every step but the one that holds the last token."""
        self.advance(state, to=state.last_step, cancelled=cancelled)

    def finish(self, state: PrefillState) -> torch.Tensor:
        """Run the last step, or what is missing of it, and return the last token's logits, [vocab]."""
        if state.num_computed < state.last_step:
            raise ValueError("the steps before the last one have not run; call advance_to_last_step first")
        logits = self.runner.append(state.tokens[state.num_computed :], state.cache, logits=True)
        assert logits is not None
        state.computed(len(state.tokens))
        state.clock.lap("first_token")
        return logits

    def commit(self, state: PrefillState) -> None:
        """Store every chunk computed since the last commit."""
        self._observe(state)
        if not self.keys.is_current(state.prompt.snapshot):
            return  # the weights changed meanwhile: this KV belongs to neither model
        self._store_exact(state)
        if state.spans is not None:
            state.kept(self.approx.keep(state))

    def commit_decoded(self, state: PrefillState, generated: Sequence[int]) -> int:
        """Store the chunks that decoding completed, marked as not bitwise. The last token has no KV yet."""
        if state.spans is not None or state.paged or not self.keys.is_current(state.prompt.snapshot):
            return 0  # behind approximate KV nothing is exact; paged KV would have to be loaded once more
        prompt = state.prompt
        tokens = [*prompt.tokens, *generated][: state.cache.get_seq_length()]
        chunks = self.keys.chunks(prompt.snapshot.root, tokens, prompt.boundaries)
        new, stored = 0, []
        for index, chunk in enumerate(chunks):
            if chunk.end > state.num_committed:
                outcome = self._put(state, chunk, context=context_before(chunks, index), bitwise=False)
                if outcome is PutOutcome.REFUSED:
                    break  # what follows could not be reached without it
                new += outcome is PutOutcome.STORED
            stored.append(chunk.prefix_key)
        self.store.used(stored)
        return new

    def _store_exact(self, state: PrefillState) -> None:
        chunks = state.prompt.chunks
        for index, chunk in enumerate(chunks):
            if chunk.end > state.num_exact:
                break
            if chunk.end <= state.num_committed:
                continue
            context = context_before(chunks, index)
            outcome = self._put(state, chunk, context=context, bitwise=state.hits.bitwise)
            if outcome is PutOutcome.REFUSED:
                break  # what follows could not be reached without it
            state.committed(chunk.end, new=outcome is PutOutcome.STORED)
        self.store.used([chunk.prefix_key for chunk in chunks if chunk.end <= state.num_committed])

    def _put(self, state: PrefillState, chunk: Chunk, *, context: bytes, bitwise: bool) -> PutOutcome:
        """Offer a copy of this chunk's KV to the store under its exact key."""
        tensors = self.codec.pack(state.cache.span(chunk.start, chunk.end), start=chunk.start)
        return self.store.put(KVBlock.of(chunk, tensors, context=context, bitwise=bitwise and self.codec.lossless))

    def _observe(self, state: PrefillState) -> None:
        """Update the cost model with this prefill's times, once its first token exists."""
        stages = state.clock.stages()
        if state.paged or "first_token" not in stages or not state.observe_once():
            return
        if state.spans is not None:
            self.approx.observe(state)
        elif "move" not in stages:
            seconds = (stages.get("prefill", 0.0) + stages["first_token"]) / 1000.0
            tokens = len(state.tokens) - state.plan.exact_tokens
            self.costs.observe_prefill(forwards=len(state.plan.steps), tokens=tokens, seconds=seconds)
