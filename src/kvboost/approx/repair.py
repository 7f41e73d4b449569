"""Repairs a prompt with repositioned chunks: asks a strategy for positions, recomputes them, estimates the rest.

Called by :class:`kvboost.approx.find.ApproxReuse`. Invariant: afterwards the cache holds every position of the prompt
before its last step; missing ones are always computed, repositioned ones as far as chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvboost.approx.levels import Repair
from kvboost.approx.recompute import RecomputeRunner
from kvboost.approx.reposition import KeyRepositioner
from kvboost.approx.spread import Spread
from kvboost.core.prefill import PrefillState, RepairOutcome
from kvboost.extend import RepairSituation, RepairStrategy
from kvboost.hf.cache import KVChanges, SlabCache
from kvboost.types import Chunk, KVBlock, context_mark

_MAX_ASKING = 64  # of the live tokens, the last ones: more would make looking as dear as repairing


class Repairer:
    """Repairs with one strategy, and with more rows where the estimated error is above what is tolerated."""

    def __init__(self, *, mover: KeyRepositioner, rows: RecomputeRunner, repair: Repair) -> None:
        self._mover, self._rows = mover, rows
        self._strategy, self._ratio, self._tolerated = repair.strategy, repair.ratio, repair.tolerated_error
        self._layers = self._strategy.attention_layers(rows.layer_count) if self._ratio > 0.0 else range(0)

    @property
    def looks_first(self) -> bool:
        """Whether the live tokens run once over the stale cache before rows are chosen."""
        return bool(self._layers)

    def repair(self, state: PrefillState) -> None:
        """Compute what is missing behind the first moved chunk, and again what the strategy chooses.

        Everything up to there must be in the cache. Afterwards it holds the prompt up to its last step.
        """
        assert state.spans is not None
        begin, end = state.plan.approx_start, state.last_step
        state.cache.set_length(end)
        for segment in state.plan.steps:
            if begin <= segment.start < end:
                # Masked until it is computed; but a NaN left by an earlier request would spread through 0 * NaN.
                state.cache.wipe(segment.start, segment.end)
        ground = _Ground.of(state.prompt.chunks, state.spans.blocks, begin=begin, end=end)
        attention = self._attention(state, ground) if self._layers else None
        chooser = _Chooser(self._strategy, self._rows.layer_count, ground, attention, self._ratio)
        chooser.listen_to(self._layers)
        stretches = ground.stretches
        again = self._compute(state, ground, chooser.first_rows(), chooser, stretches)
        estimate = chooser.remaining_error()
        if estimate is not None and estimate > self._tolerated and chooser.leaves_many:
            # What was computed is right by now, as far as it can be: it must not change along.
            stretches[ground.begin :][chooser.computed] = -1
            more = chooser.more_rows()
            stretches[more] = ground.stretches[more]
            again += self._compute(state, ground, more, chooser, stretches)
            estimate = chooser.remaining_error()
        if estimate is not None and estimate > self._tolerated:
            again += self._compute(state, ground, torch.arange(begin, end), None, None)
            estimate = 0.0
        state.repaired(RepairOutcome(round(again), estimate))
        state.clock.lap("repair")

    def _attention(self, state: PrefillState, ground: _Ground) -> torch.Tensor:
        """Which share of the live tokens' attention goes to each row of the ground."""
        known = torch.ones(ground.end, dtype=torch.bool)
        known[ground.begin :] = ground.is_moved
        live = state.tokens[ground.end :][-_MAX_ASKING:]
        ahead = len(state.tokens) - ground.end - len(live)
        seen = self._rows.attention_to(live, slab_cache(state), known=known, layers=self._layers, ahead=ahead)
        state.clock.lap("select")
        return seen.mean(dim=0)[ground.begin :].cpu()

    def _compute(
        self,
        state: PrefillState,
        ground: _Ground,
        rows: torch.Tensor,
        chooser: _Chooser | None,
        stretches: torch.Tensor | None,
    ) -> float:
        """Run ``rows`` through the model, fewer from layer to layer where the chooser says so.

        Returns how many moved rows were computed, as a mean over the layers.
        """
        if not len(rows):
            return 0.0
        # Where every moved row is computed there is nobody left to spread to.
        spread = None
        if self._strategy.spreads and stretches is not None and self._ratio < 1.0:
            spread = partial(Spread, self._mover, stretches=stretches)
        _, layer_rows = self._rows.recompute_positions(
            state.tokens[: ground.end],
            slab_cache(state),
            rows,
            logits=False,
            choose=chooser,
            watch=chooser.watched if chooser is not None else (),
            spread=spread,
        )
        return layer_rows / self._rows.layer_count - int((~ground.is_moved[rows - ground.begin]).sum())


def slab_cache(state: PrefillState) -> SlabCache:
    """The cache of a prefill that may be repaired: pages are not."""
    assert isinstance(state.cache, SlabCache)
    return state.cache


@dataclass(frozen=True)
class _Ground:
    """The stretch of a prompt that is repaired, row by row from ``begin`` on."""

    begin: int
    end: int
    is_moved: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @property
    def stretches(self) -> torch.Tensor:
        """Which moved stretch each row of the prompt belongs to, -1 for none: [end]."""
        stretches = torch.full((self.end,), -1)
        stretches[self.begin :][self.is_moved] = self.starts[self.is_moved]
        return stretches

    @classmethod
    def of(cls, chunks: Sequence[Chunk], blocks: Mapping[int, KVBlock], *, begin: int, end: int) -> _Ground:
        """The rows ``[begin, end)`` of a prompt with these moved blocks."""
        is_moved = torch.zeros(end - begin, dtype=torch.bool)
        starts = torch.zeros(end - begin, dtype=torch.long)
        ends = torch.zeros(end - begin, dtype=torch.long)
        for first, last in _stretches(chunks, blocks):
            span = slice(chunks[first].start - begin, chunks[last].end - begin)
            is_moved[span] = True
            starts[span], ends[span] = chunks[first].start, chunks[last].end
        return cls(begin, end, is_moved, starts, ends)


def _stretches(chunks: Sequence[Chunk], blocks: Mapping[int, KVBlock]) -> list[tuple[int, int]]:
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
    """Asks the strategy for moved rows, and keeps the books: what was computed, and how far it changed."""

    def __init__(
        self, strategy: RepairStrategy, layer_count: int, ground: _Ground, attention: torch.Tensor | None, ratio: float
    ) -> None:
        self._strategy, self._layer_count, self._ground = strategy, layer_count, ground
        self._attention, self._ratio = attention, ratio
        self._decisions = frozenset(strategy.decision_layers(layer_count))
        self._listening: frozenset[int] = frozenset()
        self._deciding = True
        self._budget = round(ratio * int(ground.is_moved.sum()))
        self.computed = ~ground.is_moved
        """Rows that need no more work: computed again, or never moved."""
        self._part_budget = self._budget
        self._change = torch.zeros(len(ground.is_moved))  # summed over the layers listened to
        self._heard = torch.zeros(len(ground.is_moved))

    @property
    def watched(self) -> list[int]:
        """Layers that must note their changes: the next decision or the estimate looks at them."""
        return sorted({layer - 1 for layer in self._decisions if layer > 0} | self._listening)

    def listen_to(self, layers: range) -> None:
        """Take the error from the first, the middle and the last of these layers."""
        chosen = {layers[0], layers[len(layers) // 2], layers[-1]} if layers else set()
        self._listening = frozenset(layer for layer in chosen if layer + 1 < self._layer_count)

    def first_rows(self) -> torch.Tensor:
        """The rows that enter layer 0, as positions."""
        every = torch.arange(len(self._ground.is_moved))
        if self._ratio <= 0.0:
            every = every[~self._ground.is_moved]
        elif self._ratio < 1.0 and 0 in self._decisions:
            every = every[self._going_on(0, every, None)]
        self.computed[every] = True
        self._entering = len(every)
        return every + self._ground.begin

    @property
    def leaves_many(self) -> bool:
        """Whether another round of as many rows would still leave most of the others out: else compute them all.

        Rows that were computed beside wrong ones are not right themselves; only a full pass makes them so.
        """
        return 2 * self._budget < int((~self.computed).sum())

    def more_rows(self) -> torch.Tensor:
        """Once more as many rows, those that weigh most in the estimate; from here on all of them go on."""
        self._deciding = False
        weight = torch.where(self.computed, -1.0, self._weight())
        count = min(self._budget, int((~self.computed).sum()))
        rows = weight.topk(count).indices.sort().values
        self.computed[rows] = True
        return rows + self._ground.begin

    def remaining_error(self) -> float | None:
        """Attention times relative change, over the rows that were not computed again; None if not known."""
        if self._attention is None or not self._heard.any():
            return None
        return float(self._weight()[~self.computed].sum())

    def _weight(self) -> torch.Tensor:
        """Each row's attention times how far it is taken to be off: as the computed rows of its stretch were."""
        assert self._attention is not None
        heard = self._heard > 0
        off = (self._change[heard] / self._heard[heard]).sqrt()
        stretch = self._ground.starts[heard]
        usual = torch.full(self._change.shape, float(off.mean()))
        for start in set(stretch.tolist()):
            usual[self._ground.starts == start] = off[stretch == start].mean()
        return self._attention * usual

    def __call__(self, layer: int, rows: torch.Tensor, changes: KVChanges | None) -> torch.Tensor | None:
        """Before each layer of a forward: which rows go on."""
        within = rows.cpu() - self._ground.begin
        if changes is not None and layer - 1 in self._listening:
            known = self._ground.is_moved[within]
            self._change[within[known]] += changes.values.cpu()[known]
            self._heard[within[known]] += 1
        if layer == 0:
            # One forward may be only a part of the rows, where there are very many.
            self._part_budget = round(self._budget * len(within) / max(1, self._entering))
        if layer == 0 or layer not in self._decisions or self._ratio >= 1.0 or not self._deciding:
            return None
        going = self._going_on(layer, within, changes)
        self.computed[within] = False
        self.computed[within[going]] = True
        return going.to(rows.device)

    def _going_on(self, layer: int, within: torch.Tensor, changes: KVChanges | None) -> torch.Tensor:
        moved = self._ground.is_moved[within]
        candidates = moved.nonzero().flatten()
        at = within[candidates]
        situation = RepairSituation(
            layer=layer,
            layer_count=self._layer_count,
            rows=at + self._ground.begin,
            starts=self._ground.starts[at],
            ends=self._ground.ends[at],
            budget=self._part_budget,
            attention=None if self._attention is None else self._attention[at],
            key_change=None if changes is None else changes.keys.cpu()[candidates],
            value_change=None if changes is None else changes.values.cpu()[candidates],
        )
        goes_on = ~moved
        goes_on[candidates[self._strategy.choose(situation)]] = True
        if layer and not goes_on.any():
            goes_on[-1] = True  # a model cannot run on no rows at all
        return goes_on.nonzero().flatten()
