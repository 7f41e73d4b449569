"""Prefills prompts: look up, place, compute what is missing, commit.

Used by the engine and by the scheduler for every kind of request: one prefill path, one commit point. Invariants:
steps follow the rule of the model's numerics, whatever was reused; only KV straight from such a step is committed under
an exact key, and only behind KV that came from such steps itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvboost.core.backend import Codec, KVCache, Runner
from kvboost.core.costs import CostModel, StageClock
from kvboost.core.guarded import EmptyLease, GuardedStore, JoinedLease, loads_of
from kvboost.core.keys import PromptKeys
from kvboost.core.non_prefix import NonPrefixReuse
from kvboost.core.spans import ApproxSpans
from kvboost.core.state import ChunkedPrompt, ExactHits, PrefillState, tokens_by_tier
from kvboost.core.states import StateLookup, state_chunk
from kvboost.core.workspaces import KVLoader, WorkspacePool
from kvboost.extend import Lease
from kvboost.steps import StepRule
from kvboost.types import NOTHING_LOADED, Chunk, Fetched, KVBlock, ModelSnapshot, PutOutcome, context_before

if TYPE_CHECKING:
    import torch

_ASKED_AT_ONCE = 256  # chunks

AppendTogether = Callable[[Sequence[Sequence[int]], Sequence[Any]], "torch.Tensor"]
"""Computes tokens of several sequences behind what their caches hold. Returns their last logits, [n, vocab]."""


class RequestCancelled(Exception):
    """The caller closed the stream and no longer needs the result."""


def _never() -> bool:
    return False


class _Chosen(NamedTuple):
    """What a prefill reuses of what is stored."""

    blocks: Sequence[KVBlock]
    """Those of its leading chunks."""
    spans: ApproxSpans | None = None
    """Those from other positions."""
    reason: str | None = None
    """Why there are none of those."""


@dataclass(frozen=True, kw_only=True)
class Prefiller:
    """Prefills with one model for one tenant. For another tenant, ``dataclasses.replace`` what is not shared."""

    runner: Runner
    codec: Codec
    keys: PromptKeys
    store: GuardedStore
    pool: WorkspacePool
    rule: StepRule
    """Where forward steps begin and end."""
    costs: CostModel = field(default_factory=CostModel)
    approx: NonPrefixReuse = field(default_factory=NonPrefixReuse)
    state_tokens: int = 0
    """Tokens whose KV is as large as the states of the model's recurrent layers; 0 if it has none."""

    def exact_over(self, store: GuardedStore) -> Prefiller:
        """The same over another store with separate workspaces, exact reuse only: for measurements."""
        return replace(self, store=store, pool=self.pool.for_tenant(), costs=CostModel(), approx=NonPrefixReuse())

    def chunk(
        self, tokens: list[int], boundaries: Sequence[int], *, model: ModelSnapshot | None = None
    ) -> ChunkedPrompt:
        """Cut the prompt into chunks, at documents that are known too, keyed by the model as it is, or ``model``."""
        return self._cut(tokens, sorted({*boundaries, *self.approx.boundaries(tokens)}), model=model)

    def _cut(
        self, tokens: list[int], boundaries: Sequence[int], *, model: ModelSnapshot | None = None
    ) -> ChunkedPrompt:
        snapshot = self.keys.snapshot(model)
        cuts = self._with_grid(boundaries, len(tokens))
        chunks, tail = self.keys.chunks_and_tail(snapshot.root, tokens, cuts)
        # Where a prompt can be resumed anywhere, its end is worth storing.
        anywhere = self.rule.grid is None and not self.state_tokens
        return ChunkedPrompt(tokens, cuts, snapshot, chunks, tail if anywhere else None, boundaries)

    def _with_grid(self, boundaries: Sequence[int], tokens: int) -> Sequence[int]:
        """The boundaries and the grid's: a chunk across a step's end would leave the whole step to compute."""
        if self.rule.grid is None:
            return boundaries
        return sorted({*boundaries, *range(self.rule.grid, tokens + 1, self.rule.grid)})

    def leading(self, prompt: ChunkedPrompt) -> list[Chunk]:
        """The chunks to look up for a prefill. For recurrent layers they end with the last state that is stored."""
        return self._states.leading(prompt.usable) if self.state_tokens else prompt.lookup

    @property
    def _states(self) -> StateLookup:
        return StateLookup(self.store, self.rule, self.state_tokens)

    def open(
        self,
        tokens: list[int],
        *,
        boundaries: Sequence[int] = (),
        new_tokens: int = 0,
        clock: StageClock | None = None,
        approx: bool = False,
        fetched: Fetched | None = None,
    ) -> PrefillState:
        """Place all stored KV of a prompt; the cache has capacity for ``new_tokens`` more.

        With ``approx``, chunks from other positions are reused too, where that is faster. ``fetched`` is what was
        loaded for this prompt before: then no slower tier is asked.
        """
        clock = clock or StageClock()
        prompt = self.chunk(tokens, boundaries)

        def choose(blocks: Sequence[KVBlock]) -> _Chosen:
            if not approx:
                return _Chosen(blocks)
            spans, reason = self.approx.find(
                prompt.usable,
                available=min(len(blocks), len(prompt.usable)),
                prompt_tokens=len(tokens),
                fetched=fetched.content if fetched else None,
            )
            return _Chosen(blocks, spans, reason)

        return self._open(prompt, choose, clock=clock, new_tokens=new_tokens, fetched=fetched)

    def replay(
        self, tokens: list[int], *, boundaries: Sequence[int], new_tokens: int, using: Mapping[int, KVBlock]
    ) -> PrefillState:
        """As :meth:`open`, with the chunks from other positions that an earlier prefill used, by chunk index."""
        # They fit the chunks of that time: documents that became known since must not cut them.
        prompt = self._cut(tokens, boundaries)

        def choose(blocks: Sequence[KVBlock]) -> _Chosen:
            return _Chosen(blocks[: min(using)], self.approx.replay(using))

        return self._open(prompt, choose, clock=StageClock(), new_tokens=new_tokens)

    def _open(
        self,
        prompt: ChunkedPrompt,
        choose: Callable[[Sequence[KVBlock]], _Chosen],
        *,
        clock: StageClock,
        new_tokens: int,
        fetched: Fetched | None = None,
    ) -> PrefillState:
        """Place what ``choose`` takes of the leading blocks that are stored, and what it adds from other positions."""
        self.costs.settle()
        clock.mark = self.runner.mark
        clock.lap("plan")
        lookup = prompt.usable if self.state_tokens else prompt.lookup
        loader = KVLoader(lookup, tokens=len(prompt.tokens) + new_tokens, codec=self.codec, pool=self.pool)
        states: KVBlock | None = None
        if self.state_tokens:
            lease, held, states = self._states.lease(lookup, arrived=loader.arrived, fetched=fetched)
        else:
            lease = self.store.lease(lookup, arrived=loader.arrived, fetched=fetched.exact if fetched else None)
            held = lease.blocks
        spans: ApproxSpans | None = None
        trial: ApproxSpans | None = None
        try:
            blocks, spans, reason = choose(held)
            if spans is not None and spans.on_trial:
                spans.lease.release()
                trial, spans = replace(spans, lease=EmptyLease()), None
            tail = self.stored_tail(prompt, len(blocks), in_memory=fetched is not None) if spans is None else None
            if tail is not None:
                more = self.store.lease([tail], fetched=NOTHING_LOADED if fetched else None)
                lookup, lease = [*lookup[: len(blocks)], tail], JoinedLease(lease, more)
                blocks = lease.blocks
            clock.lap("lease")
            cache = loader.finish(blocks, lookup)
            hits = self._hits(prompt, lease, lookup[: len(blocks)], blocks, states)
            state = self._start(prompt, cache, hits, clock)
            if states is not None:
                cache.place_states(states.tensors)
            clock.lap("place")
        except BaseException:
            lease.release()
            for found in (spans, trial):
                if found is not None:
                    found.release()
            raise
        try:
            state.explain(reason)
            state.trial = trial
            if spans is not None:
                state.reposition(spans)
            return state
        except BaseException:
            state.close()
            raise

    def stored_tail(self, prompt: ChunkedPrompt, found: int, *, in_memory: bool = False) -> Chunk | None:
        """The stored end of an earlier prompt behind the first ``found`` chunks; None if there is none."""
        if found >= len(prompt.lookup) or self.rule.grid is not None or self.state_tokens:
            return None
        behind, missed = prompt.lookup[found - 1] if found else None, prompt.lookup[found]
        tails = self.keys.tails(prompt.snapshot.root, prompt.tokens, behind=behind)
        tails = [tail for tail in tails if tail.end != missed.end]  # it was looked up
        return self.store.first_stored(tails, where="memory" if in_memory else "near") if tails else None

    def _hits(
        self,
        prompt: ChunkedPrompt,
        lease: Lease,
        placed: Sequence[Chunk],
        blocks: Sequence[KVBlock],
        states: KVBlock | None,
    ) -> ExactHits:
        end = placed[-1].end if placed else 0
        reused = self.rule.resume(min(end, len(prompt.tokens) - 1))  # the rest of the last block is computed again
        borrowed = bool(placed) and placed[-1].end != prompt.lookup[len(placed) - 1].end  # only the last one can be
        return ExactHits(
            tokens=end,
            borrowed=end - placed[-1].start if borrowed else 0,
            bitwise=all(block.bitwise for block in blocks),
            lease=lease,
            tiers=tokens_by_tier(blocks, loads_of(lease), limit=reused),
            state=states.key if states is not None else None,
            state_ends=self._states.ends(prompt, start=reused) if self.state_tokens else (),
        )

    def _start(self, prompt: ChunkedPrompt, cache: KVCache, hits: ExactHits, clock: StageClock) -> PrefillState:
        plain = self.expected_seconds(len(prompt.tokens))
        state = PrefillState(prompt, cache, hits=hits, rule=self.rule, clock=clock, pool=self.pool)
        state.plain_ms = None if plain is None else 1000.0 * plain
        cache.set_length(state.num_computed)
        return state

    def expected_seconds(self, tokens: int) -> float | None:
        """How long computing a whole prompt should take; None before anything was observed."""
        if not self.costs.in_seconds:
            return None
        return self.costs.prefill_seconds(forwards=self.rule.count(tokens), tokens=tokens)

    def knows(self, texts: Iterable[tuple[list[int], Sequence[int]]]) -> list[bool]:
        """For each text with its cuts whether all its chunks are stored somewhere."""
        chunks = [self._cut(tokens, cuts).chunks for tokens, cuts in texts]
        every = list(chain.from_iterable(chunks))
        # Many in one round trip, and not so many that a server keeps its other clients waiting.
        asked = (every[begin : begin + _ASKED_AT_ONCE] for begin in range(0, len(every), _ASKED_AT_ONCE))
        found = iter([there for some in asked for there in self.store.contains_content(some)])
        return [all(list(islice(found, len(own)))) for own in chunks]

    def advance(self, state: PrefillState, *, to: int, cancelled: Callable[[], bool] = _never) -> None:
        """Compute what is missing up to position ``to``, which may lie inside a step.

        Behind repositioned chunks there is one repair up to the last step, so ``to`` lies before them or not before
        the last step.
        """
        if state.awaits_repair and state.plan.approx_start < to < state.last_step:
            raise ValueError(f"a repair runs up to position {state.last_step}; it cannot stop at {to}")
        self._advance(state, lambda: to, cancelled)

    def advance_to_last_step(self, state: PrefillState, *, cancelled: Callable[[], bool] = _never) -> None:
        """Run every step but the one that holds the last token."""
        self._advance(state, lambda: state.last_step, cancelled)

    def _advance(self, state: PrefillState, to: Callable[[], int], cancelled: Callable[[], bool]) -> None:
        """Run steps and the repair up to ``to()``, which is asked again if there is no repair after all."""
        self._run_steps(state, to=min(to(), state.plan.approx_start), cancelled=cancelled)
        if state.awaits_repair and to() >= state.last_step:
            state.clock.lap("prefill")
            failure = self.approx.repair(state)  # only now: a step clears the positions behind its own
            if failure is not None:
                state.drop_approx(failure)
                state.clock.lap("move")
        self._run_steps(state, to=to(), cancelled=cancelled)
        state.clock.lap("prefill")

    def _run_steps(self, state: PrefillState, *, to: int, cancelled: Callable[[], bool]) -> None:
        while state.num_computed < to:
            if cancelled():
                raise RequestCancelled
            end = state.step_end(to)
            self.runner.append(state.missing_ids(end, upload=self.runner.upload), state.cache, logits=False)
            state.computed(end)
            if state.at_state_end:
                state.keep_states(self.store.copied(lambda: tuple(one.clone() for one in state.cache.states())))
            if state.paged:
                self.commit(state)  # while most of these positions are in memory

    def last_step_ran(self, state: PrefillState) -> None:
        """The model ran the last step elsewhere, as :meth:`Runner.first_forward` makes it."""
        if state.num_computed < len(state.tokens) == state.cache.get_seq_length():
            state.computed(len(state.tokens))

    def finish(self, state: PrefillState) -> torch.Tensor:
        """Run the last step, or what is missing of it, and return the last token's logits, [vocab]."""
        _check_last_step(state)
        ids = state.missing_ids(len(state.tokens), upload=self.runner.upload)
        logits = self.runner.append(ids, state.cache, logits=True)
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
        chunks = self.keys.chunks(prompt.snapshot.root, tokens, self._with_grid(prompt.boundaries, len(tokens)))
        new, stored = 0, []
        for index, chunk in enumerate(chunks):
            if chunk.end > state.num_committed:
                packed = self.codec.pack_each(state.cache, [(chunk.start, chunk.end)])
                outcome = self._put(chunk, packed, context=context_before(chunks, index), bitwise=False)
                if outcome is PutOutcome.REFUSED:
                    break  # what follows could not be reached without it
                new += outcome is PutOutcome.STORED
            stored.append(chunk.prefix_key)
        self.store.used(stored)
        return new

    def _store_exact(self, state: PrefillState) -> None:
        chunks = state.prompt.stored
        known = max(state.num_committed, state.hits.own_tokens)
        new = [(chunk.start, chunk.end) for chunk in chunks if known < chunk.end <= state.num_exact]
        packed = self.codec.pack_each(state.cache, new)
        for index, chunk in enumerate(chunks):
            if chunk.end > state.num_exact:
                break
            if chunk.end <= state.num_committed:
                continue
            if chunk.end <= state.hits.own_tokens:  # stored, and only its last token was computed for the logits
                state.committed(chunk.end, new=False)
                continue
            context = context_before(chunks, index)
            bitwise = state.hits.bitwise and state.rule.is_bitwise
            outcome = self._put(chunk, packed, context=context, bitwise=bitwise)
            if outcome is PutOutcome.REFUSED:
                break  # what follows could not be reached without it
            state.committed(chunk.end, new=outcome is PutOutcome.STORED)
            if (tensors := state.states_at(chunk.end)) is not None:
                self.store.put(KVBlock.of(state_chunk(chunk), tensors, context=b"", bitwise=bitwise))
        self.store.used(state.used_keys())

    def _put(
        self, chunk: Chunk, packed: Iterator[tuple[torch.Tensor, ...]], *, context: bytes, bitwise: bool
    ) -> PutOutcome:
        """Offer the next copy that ``packed`` makes, which is this chunk's KV, to the store under its exact key."""

        def block() -> KVBlock:
            return KVBlock.of(chunk, next(packed), context=context, bitwise=bitwise and self.codec.lossless)

        return self.store.keep(block)

    def _observe(self, state: PrefillState) -> None:
        """Let the cost model have this prefill's times, once its first token exists. The state is not held for it."""
        if state.paged or "first_token" not in state.clock.stages() or not state.observe_once():
            return
        plan, spans, tokens = state.plan, state.spans, len(state.tokens)
        observe = partial(self.costs.observe_stages, forwards=state.forwards, tokens=tokens - plan.exact_tokens)
        if spans is not None:
            observe = partial(self.approx.observe, moved_tokens=plan.moved_tokens, expected=spans.expected_seconds)
        self.costs.observe_done(state.clock, observe)


def finish_together(append: AppendTogether, states: Sequence[PrefillState], *, leave: int = 0) -> torch.Tensor:
    """Run the last steps of several prefills in one forward, but ``leave`` so many tokens of each.

    Returns the logits of the last token that was computed of each, [states, vocab].
    """
    for state in states:
        _check_last_step(state)
    ends = [len(state.tokens) - leave for state in states]
    # One upload for all of them, whatever each has on the device.
    tokens = [state.tokens[state.num_computed : end] for state, end in zip(states, ends, strict=True)]
    logits = append(tokens, [state.cache for state in states])
    for state, end in zip(states, ends, strict=True):
        state.computed(end)
        state.clock.lap("prefill" if leave else "first_token")
        if state.spans is None:
            state.observe_once()  # its time was that of all of them: it says nothing about this one
    return logits


def _check_last_step(state: PrefillState) -> None:
    """Raise ValueError unless all that is missing is the last step, or a part of it."""
    if state.awaits_repair:
        raise ValueError("the repair has not run; call advance_to_last_step first")
    left_over = state.step_end(len(state.tokens)) < len(state.tokens)
    if left_over and not state.is_repaired:  # behind repositioned chunks one step may be as long as it likes
        raise ValueError("the steps before the last one have not run; call advance_to_last_step first")
