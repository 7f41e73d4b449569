"""Reuse of chunks that stand elsewhere: find, decide, place, repair, keep.

Used by the reader between its exact chunks and the last step. Invariants: nothing computed behind a moved
chunk is stored under a prefix key; the last step never moves; where moving does not pay, nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvboost.engine.costs import CostModel
from kvboost.engine.guard import GuardedStore
from kvboost.extend import ContentLease, RepairStrategy
from kvboost.model import KeyMover, RowRunner, SlabCache, Spread
from kvboost.plan import variant_key
from kvboost.store import context_before, context_mark
from kvboost.types import Chunk, KVBlock, PutOutcome, RepairSituation, SegmentKind

if TYPE_CHECKING:
    from kvboost.engine.reader import Reading

_MUST_SAVE = 0.95  # move only if it takes at most this share of computing; guesses have an error
_ROW_OVERHEAD = 1.25  # a scattered row against one of a plain step: its mask, its place, narrower matrices
_MOST_GENERATIONS = 4  # of KV computed behind moved KV; see docs/results/generations.md


@dataclass
class MovedChunks:
    """The moved part of one reading."""

    lease: ContentLease
    blocks: dict[int, KVBlock]
    """By index of the chunk in the prompt."""
    repaired: bool = False
    recomputed_tokens: int = 0

    @property
    def generation(self) -> int:
        """Of what is computed behind these chunks."""
        return 1 + max(block.generation for block in self.blocks.values())


class MovedReuse:
    """Moves chunks of one store into prompts of one model, and repairs them."""

    def __init__(
        self, *, store: GuardedStore, mover: KeyMover, rows: RowRunner, strategy: RepairStrategy, ratio: float
    ) -> None:
        self._store = store
        self._mover = mover
        self._rows = rows
        self._strategy = strategy
        self._ratio = ratio
        self.costs = CostModel()

    def close(self) -> None:
        """Leave the model as it was."""
        self._rows.close()

    @property
    def strategy_name(self) -> str:
        """Which strategy chooses the rows."""
        return self._strategy.name

    def find(self, chunks: Sequence[Chunk], *, available: int, prompt_tokens: int) -> MovedChunks | None:
        """The chunks behind the first ``available`` that are worth moving here; None if nothing is."""
        if available >= len(chunks):
            return None
        lease = self._store.lease_content(chunks, after=available)
        blocks = {available + i: block for i, block in enumerate(lease.blocks) if block is not None}
        if not blocks or not self._pays(chunks, blocks, available=available, prompt_tokens=prompt_tokens):
            lease.release()
            return None
        return MovedChunks(lease, blocks)

    def _pays(self, chunks: Sequence[Chunk], blocks: dict[int, KVBlock], *, available: int, prompt_tokens: int) -> bool:
        begin, end = chunks[available].start, chunks[-1].end
        moved = sum(chunks[i].end - chunks[i].start for i in blocks)
        tail = prompt_tokens - end
        compute = self.costs.read_seconds(forwards=len(chunks) - available, rows=end - begin)
        rows = _ROW_OVERHEAD * (end - begin - moved + self._ratio * moved)
        probe = 0.0
        if self._strategy.attention_layers(self._rows.layer_count):
            probe = self.costs.read_seconds(forwards=1, rows=tail)
        move = self.costs.move_seconds(moved) + probe + self.costs.read_seconds(forwards=1, rows=rows)
        return move <= _MUST_SAVE * compute

    def place(self, cache: SlabCache, chunks: Sequence[Chunk], moved: MovedChunks) -> None:
        """Copy the moved chunks to their rows, keys re-rotated."""
        for index, block in moved.blocks.items():
            self._mover.place(cache, block.tensors, old_start=block.start, new_start=chunks[index].start)

    def repair(self, reading: Reading, moved: MovedChunks) -> None:
        """Compute what is missing behind the first moved chunk, and again what the strategy chooses.

        Everything up to there must be in the cache. Afterwards it holds the prompt up to its last step.
        """
        begin, end = reading.plan.untainted_end, reading.plan.steps[-1].start
        reading.cache.set_length(end)
        ground = _Ground.of(reading.chunks, moved.blocks, begin=begin, end=end)
        layers = self._strategy.attention_layers(self._rows.layer_count)
        attention = None
        if layers and self._ratio > 0.0:
            known = torch.ones(end, dtype=torch.bool)
            known[begin:] = ground.is_moved
            seen = self._rows.attention_to(reading.tokens[end:], reading.cache, known=known, layers=layers)
            attention = seen.sum(dim=0)[begin:].cpu()
            reading.clock.lap("select")
        chooser = _Chooser(self._strategy, self._rows.layer_count, ground, attention, self._ratio)
        rows = chooser.first_rows()
        if len(rows):
            _, layer_rows = self._rows.forward_rows(
                reading.tokens[:end],
                reading.cache,
                rows,
                logits=False,
                choose=chooser,
                watch=chooser.watched,
                spread=self._spread_over(ground, end) if self._strategy.spreads and self._ratio < 1.0 else None,
            )
            again = layer_rows / self._rows.layer_count - int((~ground.is_moved).sum())
            moved.recomputed_tokens = round(again)
        moved.repaired = True
        reading.clock.lap("repair")

    def _spread_over(self, ground: _Ground, end: int) -> Callable[..., Spread]:
        stretches = torch.full((end,), -1)
        stretches[ground.begin :][ground.is_moved] = ground.starts[ground.is_moved]
        return partial(Spread, self._mover, stretches=stretches)

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


@dataclass(frozen=True)
class _Ground:
    """The stretch of a prompt that is repaired, row by row from ``begin`` on."""

    begin: int
    is_moved: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, chunks: Sequence[Chunk], blocks: dict[int, KVBlock], *, begin: int, end: int) -> _Ground:
        """The rows ``[begin, end)`` of a prompt with these moved blocks."""
        is_moved = torch.zeros(end - begin, dtype=torch.bool)
        starts = torch.zeros(end - begin, dtype=torch.long)
        ends = torch.zeros(end - begin, dtype=torch.long)
        for first, last in _stretches(chunks, blocks):
            span = slice(chunks[first].start - begin, chunks[last].end - begin)
            is_moved[span] = True
            starts[span], ends[span] = chunks[first].start, chunks[last].end
        return cls(begin, is_moved, starts, ends)


def _stretches(chunks: Sequence[Chunk], blocks: dict[int, KVBlock]) -> list[tuple[int, int]]:
    """First and last chunk of every run that was also one run where it was computed."""
    runs: list[tuple[int, int]] = []
    for index, block in sorted(blocks.items()):
        before = blocks.get(index - 1)
        if (
            runs
            and before is not None
            and block.start == before.start + chunks[index - 1].end - chunks[index - 1].start
            and block.context.endswith(context_mark(before.content_key))
        ):
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


class _Chooser:
    """Asks the strategy for moved rows; rows that are missing always go on."""

    def __init__(
        self,
        strategy: RepairStrategy,
        layer_count: int,
        ground: _Ground,
        attention: torch.Tensor | None,
        ratio: float,
    ) -> None:
        self._strategy, self._layer_count, self._ground = strategy, layer_count, ground
        self._attention, self._ratio = attention, ratio
        self._decisions = frozenset(strategy.decision_layers(layer_count))
        self._budget = round(ratio * int(ground.is_moved.sum()))

    @property
    def watched(self) -> list[int]:
        """Layers whose changes the next decision looks at."""
        return [layer - 1 for layer in self._decisions if layer > 0]

    def first_rows(self) -> torch.Tensor:
        """The rows that enter layer 0, as positions."""
        every = torch.arange(len(self._ground.is_moved))
        if self._ratio <= 0.0:
            every = every[~self._ground.is_moved]
        elif self._ratio < 1.0 and 0 in self._decisions:
            every = every[self._going_on(0, every, None)]
        return every + self._ground.begin

    def __call__(self, layer: int, rows: torch.Tensor, changes: Any) -> torch.Tensor | None:
        """Before each layer of a forward: which rows go on."""
        within = rows.cpu() - self._ground.begin
        if layer == 0:
            # One forward may be only a part of the rows, where there are very many.
            self._budget = round(self._ratio * int(self._ground.is_moved[within].sum()))
        if layer == 0 or layer not in self._decisions or self._ratio >= 1.0:
            return None
        return self._going_on(layer, within, changes).to(rows.device)

    def _going_on(self, layer: int, within: torch.Tensor, changes: Any) -> torch.Tensor:
        moved = self._ground.is_moved[within]
        candidates = moved.nonzero().flatten()
        at = within[candidates]
        situation = RepairSituation(
            layer=layer,
            layer_count=self._layer_count,
            rows=at + self._ground.begin,
            starts=self._ground.starts[at],
            ends=self._ground.ends[at],
            budget=self._budget,
            attention=None if self._attention is None else self._attention[at],
            key_change=None if changes is None else changes.keys.cpu()[candidates],
            value_change=None if changes is None else changes.values.cpu()[candidates],
        )
        goes_on = ~moved
        goes_on[candidates[self._strategy.choose(situation)]] = True
        return goes_on.nonzero().flatten()
