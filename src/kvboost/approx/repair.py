"""Repairs a prompt with repositioned chunks: lets a strategy select positions, recomputes them, estimates the rest.

Called by :class:`kvboost.approx.find.ApproxReuse`. Invariant: afterwards the cache holds every position of the prompt
before its last step; missing ones are always computed, repositioned ones as selected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from kvboost.approx.recompute import MAX_POSITIONS, PositionSelector, RecomputeRunner
from kvboost.approx.reposition import KeyRepositioner
from kvboost.approx.select import Repair, naming
from kvboost.approx.spread import Spread
from kvboost.core.spans import ApproxSpans, RepairOutcome
from kvboost.core.state import PrefillState
from kvboost.extend import RepairSituation, RepairStrategy
from kvboost.hf.cache import SlabCache
from kvboost.hf.cache_layers import KVChanges
from kvboost.types import Chunk, KVBlock, context_mark

MAX_QUERY_TOKENS = 64  # the last suffix tokens: more would make selecting as expensive as repairing


class Repairer:
    """Repairs with one strategy, and with more positions where the estimated error is above the tolerated one."""

    def __init__(self, *, repositioner: KeyRepositioner, recompute: RecomputeRunner, repair: Repair) -> None:
        self._repositioner, self._recompute = repositioner, recompute
        self._strategy, self._ratio, self._tolerated = repair.strategy, repair.ratio, repair.tolerated_error
        with naming(self._strategy):
            self._layers = self._strategy.attention_layers(recompute.layer_count) if self._ratio > 0.0 else range(0)

    @property
    def needs_attention(self) -> bool:
        """Whether the suffix tokens run once over the stale cache before positions are selected."""
        return bool(self._layers)

    def repair(self, state: PrefillState) -> None:
        """Compute what is missing behind the first repositioned chunk, and recompute what the strategy selects.

        Everything before that chunk must be in the cache. Afterwards the cache holds the prompt up to its last step.
        """
        assert state.spans is not None
        begin, end = state.plan.approx_start, state.last_step
        state.cache.set_length(end)
        region = _Region.of(state.prompt.chunks, state.spans.blocks, begin=begin, end=end)
        _wipe(slab_cache(state), region.missing)
        attention = self._attention(state, region) if self._layers else None
        selector = _Selector(self._strategy, self._recompute.layer_count, region, attention, self._ratio)
        selector.use_error_layers(self._layers)
        span_ids = region.span_ids
        positions = selector.initial_positions()
        choose: PositionSelector = selector
        if state.spans.compute_seconds:
            layers, decided = self._recompute.layer_count, selector.last_decision
            choose = Paced(selector, state.spans, layers=layers, positions=len(positions), decided=decided)
        recomputed = self._compute(state, region, positions, choose, span_ids, watch=selector.watched)
        estimate = selector.remaining_error()
        if estimate is not None and estimate > self._tolerated and selector.another_round_pays:
            # Recomputed positions are as right as they can be: the spread must leave them alone.
            span_ids[region.begin :][selector.computed] = -1
            more = selector.more_positions()
            span_ids[more] = region.span_ids[more]
            recomputed += self._compute(state, region, more, selector, span_ids, watch=selector.watched)
            estimate = selector.remaining_error()
        if estimate is not None and estimate > self._tolerated:
            recomputed += self._compute(state, region, torch.arange(begin, end), None, None)
            estimate = 0.0
            selector.computed[:] = True
        done = (selector.computed & region.repositioned).nonzero().flatten() + begin
        state.repaired(RepairOutcome(round(recomputed), estimate, done.tolist()))
        state.clock.lap("repair")

    def _attention(self, state: PrefillState, region: _Region) -> torch.Tensor:
        """The share of the suffix tokens' attention that goes to each position of the region."""
        known = torch.ones(region.end, dtype=torch.bool)
        known[region.begin :] = region.repositioned
        suffix = state.tokens[region.end :][-MAX_QUERY_TOKENS:]
        ahead = len(state.tokens) - region.end - len(suffix)
        mass = self._recompute.attention_to(suffix, slab_cache(state), known=known, layers=self._layers, ahead=ahead)
        state.clock.lap("select")
        return mass.mean(dim=0)[region.begin :].cpu()

    def _compute(
        self,
        state: PrefillState,
        region: _Region,
        positions: torch.Tensor,
        choose: PositionSelector | None,
        span_ids: torch.Tensor | None,
        *,
        watch: Sequence[int] = (),
    ) -> float:
        """Run ``positions`` through the model, fewer from layer to layer where the selector drops some.

        Returns how many repositioned tokens were recomputed, as a mean over the layers.
        """
        if not len(positions):
            return 0.0
        # Where everything is recomputed, no position is left to spread to.
        spread = None
        if self._strategy.spreads and span_ids is not None and self._ratio < 1.0:
            spread = partial(Spread, self._repositioner, span_ids=span_ids)
        _, layer_positions = self._recompute.recompute_positions(
            state.tokens[: region.end],
            slab_cache(state),
            positions,
            logits=False,
            choose=choose,
            watch=watch,
            spread=spread,
        )
        return layer_positions / self._recompute.layer_count - int(
            (~region.repositioned[positions - region.begin]).sum()
        )


def _wipe(cache: SlabCache, positions: torch.Tensor) -> None:
    """Set ``positions`` of every layer to zero.

    They are masked until they are computed; but a NaN left by an earlier request would spread through 0 * NaN.
    """
    for slab in cache.slabs:
        slab.index_fill_(3, positions.to(slab.device), 0.0)


def slab_cache(state: PrefillState) -> SlabCache:
    """The cache of a prefill that can be repaired; a paged one cannot."""
    assert isinstance(state.cache, SlabCache)
    return state.cache


@dataclass(frozen=True)
class _Region:
    """The positions ``[begin, end)`` of a prompt that are repaired. Tensors have one entry per position."""

    begin: int
    end: int
    repositioned: torch.Tensor
    span_starts: torch.Tensor
    span_ends: torch.Tensor

    @property
    def missing(self) -> torch.Tensor:
        """The positions that were not repositioned, so that they have to be computed."""
        return (~self.repositioned).nonzero().flatten() + self.begin

    @property
    def span_ids(self) -> torch.Tensor:
        """The repositioned span of each position of the prompt, -1 for none: [end]."""
        span_ids = torch.full((self.end,), -1)
        span_ids[self.begin :][self.repositioned] = self.span_starts[self.repositioned]
        return span_ids

    @classmethod
    def of(cls, chunks: Sequence[Chunk], blocks: Mapping[int, KVBlock], *, begin: int, end: int) -> _Region:
        """The region ``[begin, end)`` of a prompt with these repositioned blocks."""
        repositioned = torch.zeros(end - begin, dtype=torch.bool)
        starts = torch.zeros(end - begin, dtype=torch.long)
        ends = torch.zeros(end - begin, dtype=torch.long)
        for first, last in _spans(chunks, blocks):
            span = slice(chunks[first].start - begin, chunks[last].end - begin)
            repositioned[span] = True
            starts[span], ends[span] = chunks[first].start, chunks[last].end
        return cls(begin, end, repositioned, starts, ends)


def _spans(chunks: Sequence[Chunk], blocks: Mapping[int, KVBlock]) -> list[tuple[int, int]]:
    """First and last chunk of every run that was also contiguous where it was computed."""
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


def _checked(strategy: RepairStrategy, situation: RepairSituation) -> torch.Tensor:
    """What ``strategy`` selects, or ValueError for what are no indices into the positions."""
    with naming(strategy):
        chosen = strategy.choose(situation)
    if not isinstance(chosen, torch.Tensor):
        raise ValueError(f"{strategy.name} must choose a tensor of integer indices, got {type(chosen).__name__}")
    count = len(situation.positions)
    if chosen.dtype.is_floating_point or chosen.dtype == torch.bool or chosen.dim() != 1:
        raise ValueError(
            f"{strategy.name} must choose a vector of integer indices, got {chosen.dtype} {list(chosen.shape)}"
        )
    if len(chosen) and (int(chosen.min()) < 0 or int(chosen.max()) >= count):
        raise ValueError(
            f"{strategy.name} chose outside 0..{count - 1}: it must return indices into situation.positions"
        )
    return chosen


class _Selector:
    """Selects positions with the strategy, and tracks what was recomputed and how far it changed."""

    def __init__(
        self, strategy: RepairStrategy, layer_count: int, region: _Region, attention: torch.Tensor | None, ratio: float
    ) -> None:
        self._strategy, self._layer_count, self._region = strategy, layer_count, region
        self._attention, self._ratio = attention, ratio
        with naming(strategy):
            self._decisions = frozenset(strategy.decision_layers(layer_count))
        self._error_layers: frozenset[int] = frozenset()
        self._narrowing = True
        self._budget = round(ratio * int(region.repositioned.sum()))
        self.computed = ~region.repositioned
        """Positions that need no more work: recomputed, or never repositioned."""
        self._part_budget = self._budget
        self._change = torch.zeros(len(region.repositioned))  # summed over the error layers
        self._samples = torch.zeros(len(region.repositioned))
        self._observed: list[tuple[torch.Tensor, torch.Tensor]] = []  # positions, and their change on the device

    @property
    def last_decision(self) -> int:
        """The layer from which on no position is dropped."""
        return max(self._decisions, default=0)

    @property
    def watched(self) -> list[int]:
        """Layers that must record their changes, for the next decision or for the estimate."""
        return sorted({layer - 1 for layer in self._decisions if layer > 0} | self._error_layers)

    def use_error_layers(self, layers: range) -> None:
        """Estimate the error from the first, the middle and the last of these layers."""
        chosen = {layers[0], layers[len(layers) // 2], layers[-1]} if layers else set()
        self._error_layers = frozenset(layer for layer in chosen if layer + 1 < self._layer_count)

    def initial_positions(self) -> torch.Tensor:
        """The positions that enter layer 0."""
        every = torch.arange(len(self._region.repositioned))
        if self._ratio <= 0.0:
            every = every[~self._region.repositioned]
        elif self._ratio < 1.0 and 0 in self._decisions:
            every = every[self._select(0, every, None)]
        self.computed[every] = True
        self._entering = len(every)
        return every + self._region.begin

    @property
    def another_round_pays(self) -> bool:
        """Whether another round of the same size would still skip more than half of the rest.

        Positions computed next to wrong ones are not right themselves; only a full pass makes them so.
        """
        return 2 * self._budget < int((~self.computed).sum())

    def more_positions(self) -> torch.Tensor:
        """As many positions again, those with the largest part in the estimate. No layer drops any from here on."""
        self._narrowing = False
        weight = torch.where(self.computed, -1.0, self._weight())
        count = min(self._budget, int((~self.computed).sum()))
        positions = weight.topk(count).indices.sort().values
        self.computed[positions] = True
        return positions + self._region.begin

    def remaining_error(self) -> float | None:
        """Attention times relative change, over the positions that were not recomputed; None if unknown."""
        self._collect()
        if self._attention is None or not self._samples.any():
            return None
        return float(self._weight()[~self.computed].sum())

    def _collect(self) -> None:
        """Add up what the error layers observed: once per round, as it makes the host wait for the device."""
        if not self._observed:
            return
        device = self._observed[0][1].device
        changes = torch.cat([change.to(device) for _, change in self._observed]).cpu()
        parts = torch.split(changes, [len(within) for within, _ in self._observed])
        for (within, _), change in zip(self._observed, parts, strict=True):
            known = self._region.repositioned[within]
            self._change[within[known]] += change[known]
            self._samples[within[known]] += 1
        self._observed.clear()

    def _weight(self) -> torch.Tensor:
        """Each position's attention times its assumed error: the mean of the recomputed positions of its span."""
        assert self._attention is not None
        sampled = self._samples > 0
        error = (self._change[sampled] / self._samples[sampled]).sqrt()
        span = self._region.span_starts[sampled]
        assumed = torch.full(self._change.shape, float(error.mean()))
        for start in set(span.tolist()):
            assumed[self._region.span_starts == start] = error[span == start].mean()
        return self._attention * assumed

    def __call__(self, layer: int, positions: torch.Tensor, changes: KVChanges | None) -> torch.Tensor | None:
        """Called before each layer of a forward: which positions continue."""
        within = positions - self._region.begin
        if changes is not None and layer - 1 in self._error_layers:
            self._observed.append((within, changes.values))
        if layer == 0:
            # Very many positions are split over several forwards.
            self._part_budget = round(self._budget * len(within) / max(1, self._entering))
        if layer == 0 or layer not in self._decisions or self._ratio >= 1.0 or not self._narrowing:
            return None
        chosen = self._select(layer, within, changes)
        self.computed[within] = False
        self.computed[within[chosen]] = True
        return chosen

    def _select(self, layer: int, within: torch.Tensor, changes: KVChanges | None) -> torch.Tensor:
        repositioned = self._region.repositioned[within]
        candidates = repositioned.nonzero().flatten()
        at = within[candidates]
        changed = None
        if changes is not None:
            changed = torch.stack([changes.keys, changes.values]).cpu()[:, candidates]
        situation = RepairSituation(
            layer=layer,
            layer_count=self._layer_count,
            positions=at + self._region.begin,
            span_starts=self._region.span_starts[at],
            span_ends=self._region.span_ends[at],
            budget=self._part_budget,
            attention=None if self._attention is None else self._attention[at],
            key_change=None if changed is None else changed[0],
            value_change=None if changed is None else changed[1],
        )
        selected = ~repositioned
        selected[candidates[_checked(self._strategy, situation)]] = True
        if layer and not selected.any():
            selected[-1] = True  # a model cannot run on zero positions
        return selected.nonzero().flatten()


_JUDGED_LAYERS = 3  # by the fastest of them: one may have to warm up, or wait for another process


class RepairTooSlow(Exception):
    """Computing is expected to be faster than going on with a repair."""

    def __init__(self, *, seconds: float, expected: float, compute: float) -> None:
        super().__init__(
            f"the repair was stopped: it would have taken {seconds:.2f} s where computing takes about {compute:.2f} s"
        )
        self.seconds, self.expected = seconds, expected


class Paced:
    """A position selector that raises RepairTooSlow if the first layers show that repairing ``spans`` does not pay."""

    def __init__(
        self, selector: PositionSelector, spans: ApproxSpans, *, layers: int, positions: int, decided: int
    ) -> None:
        """Positions may be dropped up to layer ``decided``, so earlier ones tell nothing of those behind it."""
        self._selector, self._spans, self._layers = selector, spans, layers
        self._forwards = -(-positions // MAX_POSITIONS)
        self._judged = range(decided + 1, min(decided + 1 + _JUDGED_LAYERS, layers))
        self._fastest = float("inf")
        self._began = self._layer_began = perf_counter()

    def __call__(self, layer: int, positions: torch.Tensor, changes: KVChanges | None) -> torch.Tensor | None:
        """Called before each layer."""
        now = perf_counter()
        if layer in self._judged:
            self._fastest = min(self._fastest, now - self._layer_began)
            if layer == self._judged[-1]:
                self._judged = range(0)  # also not in the forwards that follow
                spent, left = now - self._began, self._fastest * (self._forwards * self._layers - layer)
                if left > self._spans.compute_seconds:
                    raise RepairTooSlow(
                        seconds=spent + left,
                        expected=self._spans.expected_seconds,
                        compute=self._spans.compute_seconds,
                    )
        self._layer_began = perf_counter()
        return self._selector(layer, positions, changes)
