"""Reuse of chunks that were computed at other positions: find, decide, move, and store what is computed behind them.

Hooks into a prefill; :mod:`kvboost.approx.repair` recomputes.
Invariants: nothing computed behind a repositioned chunk is stored under an exact key; the last step is never
repositioned; nothing is repositioned where that would be slower than computing.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvboost.approx.guard import ReuseGuard
from kvboost.approx.probe import probe_reposition
from kvboost.approx.recompute import RecomputeRunner, probe_recompute
from kvboost.approx.registry import DocumentRegistry
from kvboost.approx.repair import MAX_QUERY_TOKENS, Repairer, RepairTooSlow, slab_cache
from kvboost.approx.reposition import KeyRepositioner, Move
from kvboost.approx.select import Repair, naming
from kvboost.core.backend import Codec
from kvboost.core.costs import CostModel
from kvboost.core.guarded import GuardedStore, loads_of
from kvboost.core.keys import variant_key
from kvboost.core.non_prefix import NonPrefixReuse
from kvboost.core.prefill import Prefiller
from kvboost.core.spans import ApproxSpans, repair_end
from kvboost.core.state import PrefillState
from kvboost.errors import UnsupportedModelError
from kvboost.extend import ContentLease
from kvboost.hf.cache import KVLayout
from kvboost.hf.runner import ModelRunner
from kvboost.types import TOKEN_BYTES, Chunk, KVBlock, LoadReport, NonPrefixReuseStats, PutOutcome, context_before

# Reposition only below this share of the time to compute: estimates have errors, and KV behind repositioned text is not
# stored as exact, so a repeated prefix has to be computed later.
_MAX_COST = 0.75
_MAX_DEPTH = 2  # largest approx_depth that is stored; see docs/results/approx_depth.md
_MAX_REMEMBERED = 65_536


class ApproxPrefixes:
    """Recent prefix keys whose KV was approximate."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._keys

    def add(self, keys: Iterable[bytes]) -> None:
        """Remember these keys."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > _MAX_REMEMBERED:
                self._keys.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these keys: they are computed exactly now."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def clear(self) -> None:
        """Drop every key."""
        with self._lock:
            self._keys.clear()


@dataclass(frozen=True)
class ApproxModel:
    """What a model was shown to support: repositioning its keys and recomputing single positions."""

    repositioner: KeyRepositioner
    recompute: RecomputeRunner
    codec: Codec


def probe_approx(runner: ModelRunner, layout: KVLayout, codec: Codec, repairs: Sequence[Repair]) -> ApproxModel:
    """Test what the repairs need. Raises UnsupportedModelError with the reason if the model does not support it."""
    if layout.states:
        raise UnsupportedModelError(
            "a recurrent state holds all that came before it, so text that was read elsewhere cannot be taken over. "
            "Only exact prefix reuse is available for it."
        )
    if layout.indexed:
        raise UnsupportedModelError(
            "sparse attention chooses positions by keys of its own, which are not repositioned. "
            "Only exact prefix reuse is available for it."
        )
    repositioner = probe_reposition(runner.model, layout)
    layers = range(0)
    for repair in repairs:
        with naming(repair.strategy):
            layers = max(layers, repair.strategy.attention_layers(len(layout.slots) // 2), key=len)
    return ApproxModel(repositioner, probe_recompute(runner, layout, attention_layers=layers), codec)


class ApproxReuse(NonPrefixReuse):
    """Repositions chunks of one store into prompts of one model, and repairs them."""

    is_on = True

    def __init__(
        self,
        store: GuardedStore,
        *,
        model: ApproxModel,
        repairs: Sequence[Repair],
        guard: ReuseGuard,
        costs: CostModel | None = None,
        force: bool = False,
    ) -> None:
        """``guard`` says which of ``repairs`` is used; ``force`` also repositions where computing is faster."""
        super().__init__()
        self._store, self._model, self._repairs, self._force = store, model, tuple(repairs), force
        self._repairers = [
            Repairer(repositioner=model.repositioner, recompute=model.recompute, repair=repair) for repair in repairs
        ]
        self._prefixes = ApproxPrefixes()
        self._clearing = threading.Lock()
        self.cleared = 0
        """How often the store was cleared: what was computed before that is not stored afterwards."""
        self.documents = DocumentRegistry()
        """What prompts are searched for. Each tenant has its own."""
        self.costs = costs or CostModel()
        self.guard = guard
        self._counting = threading.Lock()
        self.repositioned_chunks = 0
        self.failures = 0

    def over(self, store: GuardedStore, repair: Repair) -> ApproxReuse:
        """The same model with another store and other repair settings, at any cost: for measurements."""
        guard = ReuseGuard(repair.tolerated_share)
        return ApproxReuse(store, model=self._model, repairs=[repair], guard=guard, force=True)

    def for_tenant(self, store: GuardedStore) -> ApproxReuse:
        """The same for another tenant's store, with its own counters and the same guard."""
        return ApproxReuse(
            store, model=self._model, repairs=self._repairs, guard=self.guard, costs=self.costs, force=self._force
        )

    def forget(self) -> None:
        """Drop remembered prefixes and documents: the store is being cleared."""
        with self._clearing:
            self.cleared += 1
        self._prefixes.clear()
        self.documents.clear()

    def commit_unless_cleared(self, prefiller: Prefiller, state: PrefillState, *, cleared: int) -> None:
        """Store a prefill that no request waits for, unless the store was cleared since ``cleared`` was read."""
        with self._clearing:
            if self.cleared == cleared:
                prefiller.commit(state)

    def trust_again(self) -> None:
        """Reset what checks have shown."""
        self.guard.reset()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._model.recompute.close()

    def stats(self) -> NonPrefixReuseStats:
        """Counts and bounds of the shadow checks."""
        bound = self.guard.bound
        return NonPrefixReuseStats(
            allowed=self.guard.allowed,
            reason=self.guard.reason,
            checked=bound.checked,
            differing=bound.disagreements,
            differing_at_most=bound.upper,
        )

    def describe(self) -> str:
        """One line: on or off, with the settings or the reason."""
        if (reason := self.guard.reason) is not None:
            return reason if self.guard.standing.trying else f"off: {reason}"
        return f"on: {self.repair_settings}"

    @property
    def repair_settings(self) -> Repair:
        """How repositioned chunks are repaired."""
        return self._repairs[self.guard.standing.rung]

    def boundaries(self, tokens: Sequence[int]) -> Sequence[int]:
        """Where the documents in a prompt are cut. While the guard has stopped reuse too: keys must stay the same."""
        return self.documents.boundaries(tokens)

    def first_wanted(self, chunks: Sequence[Chunk], *, available: int) -> int | None:
        """The first chunk that :meth:`find` would look for; None if it would not look. Changes nothing."""
        allowed, trying, _ = self.guard.standing
        if not allowed and not (trying and self.guard.has_slot()):
            return None
        return self._first_wanted(chunks, available)

    def _first_wanted(self, chunks: Sequence[Chunk], available: int) -> int:
        # A prefix that was approximate before is computed now and exact afterwards. Otherwise a repeated prompt or a
        # growing chat would be repaired every time.
        first = available
        while not self._force and first < len(chunks) and chunks[first].prefix_key in self._prefixes:
            first += 1
        return first

    def find(
        self, chunks: Sequence[Chunk], *, available: int, prompt_tokens: int, fetched: LoadReport | None = None
    ) -> tuple[ApproxSpans | None, str | None]:
        """The chunks after the first ``available`` that are worth repositioning, or None and the reason.

        With ``fetched`` only those in memory: the others were loaded before, as it reports.
        """
        allowed, trying, rung = self.guard.standing
        chosen = (allowed or trying) and self.guard.chooses()
        if not allowed and not (chosen and self.guard.has_slot()):
            return None, self.guard.reason
        found, reason = self._look_up(chunks, available, prompt_tokens=prompt_tokens, fetched=fetched, rung=rung)
        if found is None:
            return None, reason
        # When the request begins: which ones are checked must not depend on how soon they end.
        slot = self.guard.reserve() if chosen else None
        if not allowed and slot is None:
            found.release()
            return None, self.guard.reason
        return replace(found, on_trial=not allowed, slot=slot), None if allowed else self.guard.reason

    def _look_up(
        self, chunks: Sequence[Chunk], available: int, *, prompt_tokens: int, fetched: LoadReport | None, rung: int
    ) -> tuple[ApproxSpans | None, str | None]:
        first = self._first_wanted(chunks, available)
        # Only once: if they are evicted later, they may be repositioned again.
        self._prefixes.forget(chunk.prefix_key for chunk in chunks[available:first])
        if first >= len(chunks):
            return None, None
        lease = self._store.lease_content(chunks, after=first, fetched=fetched)
        try:
            found = self._worth_it(lease, chunks, first=first, prompt_tokens=prompt_tokens, rung=rung)
        except BaseException:
            lease.release()
            raise
        if not isinstance(found, ApproxSpans):
            lease.release()
            return None, found
        return found, None

    def replay(self, blocks: Mapping[int, KVBlock]) -> ApproxSpans:
        """The spans of a prompt that was prefilled with these blocks before."""
        rung = self.guard.standing.rung
        repair = self._repairs[rung]
        return ApproxSpans(repair.strategy.name, dict(blocks), rung=rung, ratio=repair.ratio, replayed=True)

    def _worth_it(
        self, lease: ContentLease, chunks: Sequence[Chunk], *, first: int, prompt_tokens: int, rung: int
    ) -> ApproxSpans | str | None:
        """The blocks of ``lease`` as spans, or the reason why they are not used."""
        blocks = {
            first + i: block
            for i, block in enumerate(lease.blocks)
            if block is not None
            and self._model.repositioner.can_reposition(block.start + len(block.tokens) // TOKEN_BYTES)
        }
        if not blocks:
            return _declined(loads_of(lease))
        begin = chunks[first].start
        end = repair_end(prompt_tokens, moved_end=chunks[max(blocks)].end, cut_end=chunks[-1].end)
        found = sum(chunks[i].end - chunks[i].start for i in blocks)
        repair = self._repairs[rung]
        recomputed = end - begin - found + repair.ratio * found
        expected = self.costs.prefill_seconds(forwards=1, tokens=recomputed) if recomputed else 0.0
        if self._repairers[rung].needs_attention:
            expected += self.costs.prefill_seconds(forwards=1, tokens=min(prompt_tokens - end, MAX_QUERY_TOKENS))
        compute = self.costs.prefill_seconds(forwards=1, tokens=end - begin)  # in one step, if memory allows
        # What follows the repair runs in a forward of its own, which computing everything does not need.
        rest = prompt_tokens - end
        seconds = self.costs.reposition_seconds(found) + self.costs.repair_factor * expected
        seconds += self.costs.prefill_seconds(forwards=1, tokens=rest)
        cost = seconds / self.costs.prefill_seconds(forwards=1, tokens=end - begin + rest)
        if cost > _MAX_COST and not self._force:
            self.costs.repair_refused()
            return (
                f"{found} tokens could be repositioned, at {cost:.2f} of the time to compute the rest "
                f"(limit {_MAX_COST}); {_remedy(repair.ratio)}"
            )
        spans = ApproxSpans(repair.strategy.name, blocks, lease, rung=rung, ratio=repair.ratio)
        if not self.costs.in_seconds:
            return spans
        return replace(spans, expected_seconds=expected, compute_seconds=0.0 if self._force else compute)

    def _failure(self, error: Exception) -> str:
        """Count an error of moving or repairing, warn once, and return the reason for the report."""
        if isinstance(error, RepairTooSlow):
            self.costs.observe_repair(expected=error.expected, seconds=error.seconds)
            return str(error)
        self.failures += 1
        reason = f"repositioning chunks failed, so this prompt was computed: {error!r}"
        if self.failures == 1:
            warnings.warn(f"{reason}; further failures are only counted", RuntimeWarning, stacklevel=4)
        return reason

    def repair(self, state: PrefillState) -> str | None:
        """Move the chunks of ``state``, recompute selected positions, and compute what is missing between them.

        Returns why that failed, None if it did not.
        """
        assert state.spans is not None
        try:
            self._move(state, state.spans)
            state.clock.lap("move")
            self._repairers[state.spans.rung].repair(state)
        except Exception as error:  # noqa: BLE001 - a cache may only help: what cannot be repaired is computed
            return self._failure(error)
        if not state.spans.replayed:
            with self._counting:  # only now: a repair may be dropped until it is done
                self.repositioned_chunks += len(state.spans.blocks)
        return None

    def _move(self, state: PrefillState, spans: ApproxSpans) -> None:
        """Copy the repositioned chunks to their new positions, keys re-rotated."""
        moves = (
            Move(self._model.codec.unpack(block.tensors), block.start, state.prompt.chunks[index].start)
            for index, block in sorted(spans.blocks.items())
        )
        self._model.repositioner.place(slab_cache(state), moves)

    def observe(self, stages: Mapping[str, float], *, moved_tokens: int, expected: float) -> None:
        """Update the cost model with the times of placing and repairing."""
        self.costs.observe_reposition(tokens=moved_tokens, seconds=stages["move"] / 1000.0)
        if expected:
            took = (stages.get("select", 0.0) + stages["repair"]) / 1000.0
            self.costs.observe_repair(expected=expected, seconds=took)

    def keep(self, state: PrefillState) -> int:
        """Store the chunks computed behind repositioned ones, for non-prefix reuse only. Returns how many were new."""
        spans, chunks = state.spans, state.prompt.chunks
        if spans is None or not state.is_repaired:
            return 0
        self._prefixes.add(chunk.prefix_key for chunk in chunks[min(spans.blocks) :])
        if spans.depth > _MAX_DEPTH:
            return 0
        new = 0
        numbers = {chunk.start: index for index, chunk in enumerate(chunks)}
        for segment in state.plan.fresh:
            if segment.start < state.plan.approx_start or segment.end > state.num_computed or segment.chunk is None:
                continue
            context = context_before(chunks, numbers[segment.start])
            new += self._put(state, segment.chunk, context, depth=spans.depth)
        return new

    def _put(self, state: PrefillState, chunk: Chunk, context: bytes, *, depth: int) -> bool:
        def block() -> KVBlock:
            tensors = self._model.codec.pack(state.cache.span(chunk.start, chunk.end), start=chunk.start)
            key = variant_key(chunk.content_key, context)
            made = KVBlock.of(chunk, tensors, context=context, bitwise=False, key=key)
            return replace(made, parent_key=None, approx_depth=depth)

        return self._store.keep(block) is PutOutcome.STORED


def _remedy(ratio: float) -> str:
    """What to change where a repair that recomputes this share is too expensive."""
    less = f"lower recompute_ratio (now {ratio:.2g}), or " if ratio else ""
    return f"{less}set force_approx to reposition at any cost"


def _declined(loads: LoadReport) -> str | None:
    """Why stored chunks were not loaded; None if there were none."""
    if not (tokens := sum(loads.declined_at.values())):
        return None
    took, limit = (sum(getattr(load, name) for load in loads.declined) for name in ("load_seconds", "compute_seconds"))
    return (
        f"{tokens} tokens could be loaded and repositioned, in about {took:.2g} s where computing them takes "
        f"{limit:.2g} s; a faster tier or more cache_bytes would keep them nearer"
    )
