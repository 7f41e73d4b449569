"""Reads a prompt into a cache, skipping the steps whose KV is stored: plan, lease, place, forward, commit.

Used by the engine for every kind of request. Invariants: a step is one chunk of the prompt's own grid or
its tail, whatever was reused; only KV straight from such a step is committed, and only behind KV that
came from such steps itself.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Self

import torch

from kvboost.approx.find import ApproxReuse
from kvboost.approx.repair import ApproxChunks
from kvboost.core.clock import StageClock
from kvboost.core.costs import CostModel
from kvboost.core.guarded import EmptyLease, GuardedStore, loads_of
from kvboost.core.identity import KeySnapshot, PromptKeys
from kvboost.core.loader import KVLoader
from kvboost.core.plan import ReusePlan, SegmentKind, plan_reuse, reusable_chunks
from kvboost.core.workspaces import WorkspacePool
from kvboost.extend import Lease
from kvboost.hf.cache import SlabCache
from kvboost.hf.codec import KVCodec
from kvboost.hf.runner import ModelRunner
from kvboost.offload.kv import PagedCache
from kvboost.types import TOKEN_BYTES, Chunk, KVBlock, LoadReport, PutOutcome, ReuseReport, context_before


@dataclass
class PrefillState:
    """A prompt being read. Owns a cache and a lease; close it (or leave its ``with`` block) to return both."""

    tokens: list[int]
    boundaries: Sequence[int]
    root: bytes
    chunks: list[Chunk]
    plan: ReusePlan
    cache: SlabCache | PagedCache
    clock: StageClock
    _codec: KVCodec
    _lease: Lease
    _pool: WorkspacePool
    _tiers: Mapping[str, int]
    """Tokens of the chunks this reading began with, by the tier they came from."""
    begins_bitwise: bool
    """Whether the chunks this reading began with, and what it computes right behind them, have a cold run's bits."""
    _snapshot: KeySnapshot
    """The model when this reading began: what it computes is kept only if it is still the same."""
    _exact_rows: int
    """Rows ``[0, _exact_rows)`` were computed or placed on the prompt's own grid, behind nothing moved."""
    moved: ApproxChunks | None = None
    reason: str | None = None
    """Why nothing could be moved, where that was asked for."""
    approximate: str | None = None
    """Which repair strategy had a part in this, where something was moved."""
    _held_rows: int = 0
    """Rows that the next owner of the cache may rely on: known only once they were committed."""
    _committed: int = 0
    new_chunks: int = 0
    """Stored so far that the store had not."""
    _observed: bool = False
    _detached: bool = field(default=False)

    @property
    def bitwise(self) -> bool:
        """Whether everything in the cache has the bits of a cold run."""
        return self.begins_bitwise and self.moved is None

    @property
    def paged(self) -> bool:
        """Whether its rows lie in pages, of which most are not in memory."""
        return isinstance(self.cache, PagedCache)

    def tainted_at(self, row: int) -> bool:
        """Whether this row stands behind a moved chunk: then it is never stored under a prefix key."""
        return row >= self.plan.untainted_end

    def report(self) -> ReuseReport:
        """What was reused."""
        exact, moved = self.plan.exact_tokens, self.plan.moved_tokens
        tiers, loads = Counter(self._tiers), loads_of(self._lease)
        declined, declined_at = loads.declined, dict(loads.declined_at)
        if self.moved is not None:
            for_moving = loads_of(self.moved.lease)
            tiers.update(tokens_by_tier(self.moved.blocks.values(), for_moving))
            declined += for_moving.declined
            declined_at |= for_moving.declined_at
            for segment in self.plan.moved:
                declined_at.pop(segment.start, None)
        return ReuseReport(
            exact_tokens=exact,
            moved_tokens=moved,
            recomputed_tokens=self.moved.recomputed_tokens if self.moved else 0,
            fresh_tokens=len(self.tokens) - exact - moved,
            bitwise=self.bitwise,
            timings_ms=self.clock.stages(),
            reason=self.reason,
            error_estimate=self.moved.error_estimate if self.moved else None,
            approximate=self.approximate,
            tiers=MappingProxyType(dict(tiers)),
            declined_tokens=sum(declined_at.values()),
            declined=declined,
            paged=self.paged,
        )

    def block(self, chunk: Chunk, *, key: bytes, context: bytes, approx_depth: int, bitwise: bool = False) -> KVBlock:
        """A copy of this chunk's rows, ready for a store."""
        tensors = self._codec.pack(self.cache.rows(chunk.start, chunk.end), start=chunk.start)
        return KVBlock(
            key=key,
            parent_key=None if approx_depth else chunk.parent_key,
            content_key=chunk.content_key,
            tokens=chunk.tokens,
            tensors=tensors,
            nbytes=sum(t.numel() * t.element_size() for t in tensors),
            bitwise=bitwise and self._codec.lossless,
            start=chunk.start,
            context=context,
            approx_depth=approx_depth,
        )

    def stop_moving(self, reason: str) -> None:
        """Go on as if nothing had been found elsewhere."""
        if self.moved is not None:
            self.moved.lease.release()
        exact = sum(segment.kind is SegmentKind.EXACT for segment in self.plan.segments)
        self.plan = plan_reuse(self.chunks, prompt_tokens=len(self.tokens), available=exact)
        self.moved, self.approximate, self.reason = None, None, reason
        self.cache.set_length(self._exact_rows)

    def grow(self, *, rows: int) -> None:
        """Go on in a cache with room for ``rows``."""
        length = self.cache.get_seq_length()
        bigger = self._pool.make(rows=rows)
        bigger.place(0, self.cache.rows(0, length))
        bigger.set_length(length)
        self.cache = bigger

    def detach(self) -> SlabCache:
        """Give the cache away: it will not be pooled, and nobody else will write to it."""
        self._detached = True
        return self.cache

    def close(self) -> None:
        """Release the lease and return the cache to the pool."""
        self._lease.release()
        if self.moved is not None:
            self.moved.lease.release()
        if not self._detached:
            self._detached = True
            held = [c.prefix_key for c in self.chunks if c.end <= self._held_rows]
            self._pool.give_back(self.cache, held=held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tokens_by_tier(blocks: Iterable[KVBlock], loads: LoadReport) -> Counter[str]:
    """How many tokens of a lease's blocks came from which tier."""
    tokens: Counter[str] = Counter()
    for block in blocks:
        tokens[loads.tiers.get(block.key, "memory")] += len(block.tokens) // TOKEN_BYTES
    return tokens


class RequestCancelled(Exception):
    """The caller closed the stream; nobody waits for the result."""


class Prefiller:
    """Reads prompts with one model, one store and one chunker."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        names: PromptKeys,
        codec: KVCodec,
        store: GuardedStore,
        pool: WorkspacePool,
        costs: CostModel,
        moving: ApproxReuse | None = None,
        move_refusal: str | None = None,
    ) -> None:
        self._runner = runner
        self.names = names
        self._codec = codec
        self._store = store
        self._pool = pool
        self._costs = costs
        self._moving = moving
        self._move_refusal = move_refusal

    def over(self, store: GuardedStore, pool: WorkspacePool, *, moving: ApproxReuse | None = None) -> Prefiller:
        """A reader of the same prompts over another store."""
        return Prefiller(
            runner=self._runner,
            names=self.names,
            codec=self._codec,
            store=store,
            pool=pool,
            costs=moving.costs if moving is not None else CostModel(),
            moving=moving,
        )

    def for_tenant(
        self, names: PromptKeys, store: GuardedStore, pool: WorkspacePool, moving: ApproxReuse | None
    ) -> Prefiller:
        """A reader of another tenant's prompts: what is not given here is shared."""
        other = copy.copy(self)
        other.names, other._store, other._pool, other._moving = names, store, pool, moving
        return other

    def open(
        self,
        tokens: list[int],
        *,
        boundaries: Sequence[int],
        new_rows: int,
        clock: StageClock,
        move: bool = False,
        using: Mapping[int, KVBlock] | None = None,
    ) -> PrefillState:
        """Plan the prompt and place all stored KV; ``new_rows`` is room for tokens to come.

        With ``move``, chunks that stand elsewhere are used too, where that pays; ``using`` names them by the
        chunk's index instead, to read a prompt once more as it was read before.
        """
        snapshot = self.names.snapshot()
        chunks = self.names.chunks(snapshot.root, tokens, boundaries)
        clock.lap("plan")
        usable = reusable_chunks(chunks, prompt_tokens=len(tokens))
        placing = KVLoader(usable, rows=len(tokens) + new_rows, codec=self._codec, pool=self._pool)
        lease = self._store.lease(usable, arrived=placing.arrived)
        moved: ApproxChunks | None = None
        reason = self._move_refusal if move else None
        try:
            blocks = lease.blocks
            if using is not None:
                blocks = blocks[: min(using)]
                moved = ApproxChunks(EmptyLease(), dict(using))
            elif move and self._moving is not None:
                moved, reason = self._moving.find(usable, available=len(blocks), prompt_tokens=len(tokens))
            plan = plan_reuse(
                chunks, prompt_tokens=len(tokens), available=len(blocks), moved=moved.blocks if moved else ()
            )
            clock.lap("lease")
            cache = placing.finish(blocks)
            cache.set_length(plan.exact_tokens)
            clock.lap("place")
            if moved is not None and self._moving is not None:
                try:
                    self._moving.place(cache, chunks, moved)
                except Exception as error:  # noqa: BLE001 - a cache may only help: what cannot be moved is computed
                    reason = self._moving.failed(error)
                    moved.lease.release()
                    moved = None
                    plan = plan_reuse(chunks, prompt_tokens=len(tokens), available=len(blocks))
                clock.lap("move")
        except BaseException:
            lease.release()
            if moved is not None:
                moved.lease.release()
            raise
        return PrefillState(
            tokens=tokens,
            boundaries=boundaries,
            root=snapshot.root,
            chunks=chunks,
            plan=plan,
            cache=cache,
            clock=clock,
            _codec=self._codec,
            _lease=lease,
            _pool=self._pool,
            _tiers=tokens_by_tier(blocks, loads_of(lease)),
            begins_bitwise=all(block.bitwise for block in blocks),
            _snapshot=snapshot,
            _exact_rows=plan.exact_tokens,
            _committed=len(blocks),
            moved=moved,
            reason=reason,
            approximate=self._moving.repair_settings.strategy.name if moved is not None and self._moving else None,
        )

    def usable_chunks(self, tokens: list[int], boundaries: Sequence[int]) -> Sequence[Chunk]:
        """The chunks of a prompt that could come from a store."""
        return reusable_chunks(
            self.names.chunks(self.names.snapshot().root, tokens, boundaries), prompt_tokens=len(tokens)
        )

    def why_not_moved(self) -> str | None:
        """What keeps chunks from being moved at all, if anything does."""
        return self._moving.guard.reason if self._moving is not None else self._move_refusal

    def knows(self, tokens: list[int]) -> bool:
        """Whether every chunk of this text, cut on its own, is stored somewhere."""
        return self._store.knows_content(self.names.chunks_of_part(tokens))

    def advance(self, reading: PrefillState, *, to: int, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Run the steps that begin before row ``to``; the last one may be cut short there."""
        self._run_steps(reading, to=min(to, reading.plan.untainted_end), cancelled=cancelled)
        if reading.moved is not None and not reading.moved.repaired and to >= reading.plan.steps[-1].start:
            reading.clock.lap("prefill")
            self._repair(reading)
        self._run_steps(reading, to=to, cancelled=cancelled)
        reading.clock.lap("prefill")

    def _run_steps(self, reading: PrefillState, *, to: int, cancelled: Callable[[], bool]) -> None:
        """Run what is missing of the steps that begin before row ``to``."""
        for step in reading.plan.steps:
            if step.start >= to:
                break
            if step.start < reading.cache.get_seq_length():
                continue  # done, or computed by the repair
            if cancelled():
                raise RequestCancelled
            end = min(step.end, to)
            self._runner.append(reading.tokens[step.start : end], reading.cache, logits=False)
            if end == step.end and not reading.tainted_at(step.start):
                reading._exact_rows = end
            if reading.paged:
                self.commit(reading)  # while most of these rows are in memory

    def _repair(self, reading: PrefillState) -> None:
        """Fill the rows between the first moved chunk and the last step; if that fails, compute them after all."""
        assert self._moving is not None
        assert reading.moved is not None
        try:
            self._moving.repair(reading, reading.moved)
        except Exception as error:  # noqa: BLE001 - a cache may only help: what cannot be repaired is computed
            reading.stop_moving(self._moving.failed(error))

    def advance_to_last_step(self, reading: PrefillState, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Run every step but the one that holds the last token."""
        self.advance(reading, to=reading.plan.steps[-1].start, cancelled=cancelled)

    def finish(self, reading: PrefillState) -> torch.Tensor:
        """Run the last step and return the last token's logits, [vocab]."""
        last = reading.plan.steps[-1]
        logits = self._runner.append(reading.tokens[last.start :], reading.cache, logits=True)
        assert logits is not None
        if not reading.tainted_at(last.start):
            reading._exact_rows = last.end
        reading.clock.lap("first_token")
        return logits

    def commit(self, reading: PrefillState) -> None:
        """Store every chunk computed since the last commit."""
        self._observe(reading)
        if not self._model_unchanged(reading):
            return
        # Before the first moved chunk a reading is as exact as the chunks it began with.
        if reading.begins_bitwise:
            reading._held_rows = reading._exact_rows
        new = self._store_chunks(reading, reading.chunks, rows=reading._exact_rows, bitwise=reading.begins_bitwise)
        if reading.moved is not None and self._moving is not None:
            new += self._moving.keep(reading, reading.moved)
        reading.new_chunks += new

    def commit_decoded(self, reading: PrefillState, generated: Sequence[int]) -> int:
        """Store the chunks that decoding completed, marked as not bitwise. The last token has no KV yet."""
        if reading.moved is not None or reading.paged or not self._model_unchanged(reading):
            return 0  # behind moved chunks everything is tainted; what lies in pages would have to be read once more
        rows = reading.cache.get_seq_length()
        chunks = self.names.chunks(reading.root, [*reading.tokens, *generated][:rows], reading.boundaries)
        return self._store_chunks(reading, chunks, rows=rows, bitwise=False)

    def _observe(self, reading: PrefillState) -> None:
        """Learn what this reading took, once its first token exists."""
        stages = reading.clock.stages()
        if reading._observed or reading.paged or "first_token" not in stages:
            return
        reading._observed = True
        costs = self._costs
        if reading.moved is not None:
            costs.observe_move(rows=reading.plan.moved_tokens, seconds=stages["move"] / 1000.0)
            if reading.moved.expected_seconds:
                took = (stages.get("select", 0.0) + stages["repair"]) / 1000.0
                costs.observe_repair(expected=reading.moved.expected_seconds, seconds=took)
        elif reading.reason is None or "move" not in stages:
            seconds = (stages.get("prefill", 0.0) + stages["first_token"]) / 1000.0
            rows = len(reading.tokens) - reading.plan.exact_tokens
            costs.observe_read(forwards=len(reading.plan.steps), rows=rows, seconds=seconds)

    def _model_unchanged(self, reading: PrefillState) -> bool:
        """Rows computed while the weights changed are neither the old model's nor the new one's."""
        return self.names.is_current(reading._snapshot)

    def _store_chunks(self, reading: PrefillState, chunks: Sequence[Chunk], *, rows: int, bitwise: bool) -> int:
        new = 0
        for chunk in chunks[reading._committed :]:
            if chunk.end > rows:
                break
            context = context_before(chunks, reading._committed)
            block = reading.block(chunk, key=chunk.prefix_key, context=context, approx_depth=0, bitwise=bitwise)
            outcome = self._store.put(block)
            if outcome is PutOutcome.REFUSED:
                break  # what follows could not be reached without it
            new += outcome is PutOutcome.STORED
            reading._committed += 1
        self._store.used([chunk.prefix_key for chunk in chunks[: reading._committed]])
        return new
