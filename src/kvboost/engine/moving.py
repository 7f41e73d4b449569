"""Reuse of chunks that stand elsewhere: find, decide, place, repair, keep.

Used by the reader between its exact chunks and the last step; :mod:`kvboost.engine.repairing` computes.
Invariants: nothing computed behind a moved chunk is stored under a prefix key; the last step never moves;
where moving does not pay, nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvboost.engine.costs import CostModel
from kvboost.engine.guard import GuardedStore
from kvboost.engine.repairing import MovedChunks, Repairer
from kvboost.model import KeyMover, RowRunner, SlabCache
from kvboost.plan import variant_key
from kvboost.repair import Repair, ReuseGuard
from kvboost.store import context_before
from kvboost.types import Chunk, KVBlock, PutOutcome, SegmentKind

if TYPE_CHECKING:
    from kvboost.engine.reader import Reading

_MUST_SAVE = 0.95  # move only if it takes at most this share of computing; guesses have an error
_ROW_OVERHEAD = 1.25  # a scattered row against one of a plain step: its mask, its place, narrower matrices
_MOST_GENERATIONS = 4  # of KV computed behind moved KV; see docs/results/generations.md


class MovedReuse:
    """Moves chunks of one store into prompts of one model, and repairs them."""

    def __init__(
        self, *, store: GuardedStore, mover: KeyMover, rows: RowRunner, repair: Repair, at_any_price: bool = False
    ) -> None:
        self._store = store
        self._at_any_price = at_any_price
        self._mover = mover
        self._rows = rows
        self._repair = repair
        self._repairer = Repairer(mover=mover, rows=rows, repair=repair)
        self.costs = CostModel()
        self.guard = ReuseGuard(repair.tolerated_share)

    def over(self, store: GuardedStore, repair: Repair) -> MovedReuse:
        """The same for another store and another way of repairing."""
        return MovedReuse(store=store, mover=self._mover, rows=self._rows, repair=repair)

    def close(self) -> None:
        """Leave the model as it was."""
        self._rows.close()

    @property
    def repair_settings(self) -> Repair:
        """How moved chunks are repaired."""
        return self._repair

    @property
    def strategy_name(self) -> str:
        """Which strategy chooses the rows."""
        return self._repair.strategy.name

    def find(
        self, chunks: Sequence[Chunk], *, available: int, prompt_tokens: int, at_any_price: bool
    ) -> tuple[MovedChunks | None, str | None]:
        """The chunks behind the first ``available`` that are worth moving here, or None, and why not."""
        if available >= len(chunks) or not self.guard.allowed:
            return None, self.guard.reason
        lease = self._store.lease_content(chunks, after=available)
        blocks = {available + i: block for i, block in enumerate(lease.blocks) if block is not None}
        if not blocks:
            lease.release()
            return None, None
        price = self._price(chunks, blocks, available=available, prompt_tokens=prompt_tokens)
        if price > _MUST_SAVE and not (at_any_price or self._at_any_price):
            lease.release()
            known = sum(chunks[i].end - chunks[i].start for i in blocks)
            return None, f"{known} tokens could be moved here, at {price:.2f} of the time that computing them takes"
        return MovedChunks(lease, blocks), None

    def _price(
        self, chunks: Sequence[Chunk], blocks: dict[int, KVBlock], *, available: int, prompt_tokens: int
    ) -> float:
        """What moving these blocks is expected to take, as a share of computing instead."""
        begin, end = chunks[available].start, chunks[-1].end
        moved = sum(chunks[i].end - chunks[i].start for i in blocks)
        compute = self.costs.read_seconds(forwards=len(chunks) - available, rows=end - begin)
        rows = _ROW_OVERHEAD * (end - begin - moved + self._repair.ratio * moved)
        move = self.costs.move_seconds(moved)
        if rows:
            move += self.costs.read_seconds(forwards=1, rows=rows)
        if self._repairer.looks_first:
            move += self.costs.read_seconds(forwards=1, rows=prompt_tokens - end)
        return move / compute

    def place(self, cache: SlabCache, chunks: Sequence[Chunk], moved: MovedChunks) -> None:
        """Copy the moved chunks to their rows, keys re-rotated."""
        for index, block in moved.blocks.items():
            self._mover.place(cache, block.tensors, old_start=block.start, new_start=chunks[index].start)

    def repair(self, reading: Reading, moved: MovedChunks) -> None:
        """Make the moved chunks fit, and compute what is missing between them."""
        self._repairer.repair(reading, moved)

    def keep(self, reading: Reading, moved: MovedChunks) -> int:
        """Store the chunks computed behind moved ones, for moving only. Returns how many were new."""
        if moved.generation > _MOST_GENERATIONS or not moved.repaired:
            return 0
        new = 0
        end = reading.plan.steps[-1].start
        for index, segment in enumerate(reading.plan.segments):
            if segment.start < reading.plan.untainted_end or segment.end > end:
                continue
            if segment.kind is SegmentKind.FRESH and segment.chunk is not None:
                context = context_before(reading.chunks, index)
                key = variant_key(segment.chunk.content_key, context)
                block = reading.block(segment.chunk, key=key, context=context, generation=moved.generation)
                new += self._store.put(block) is PutOutcome.STORED
        return new
