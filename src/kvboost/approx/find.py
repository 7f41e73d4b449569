"""Reuse of chunks that stood elsewhere: find them, decide, place them, and keep what is computed behind them.

Hooks into a prefill as its :class:`kvboost.core.backend.NonPrefixReuse`; :mod:`kvboost.approx.repair` recomputes.
Invariants: nothing computed behind a repositioned chunk is stored under an exact key; the last step is never
repositioned; where repositioning does not pay, nothing is.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvboost.approx.guard import ReuseGuard
from kvboost.approx.levels import Repair
from kvboost.approx.recompute import RecomputeRunner, probe_recompute
from kvboost.approx.repair import Repairer, slab_cache
from kvboost.approx.reposition import KeyRepositioner, probe_reposition
from kvboost.core.backend import Codec
from kvboost.core.costs import CostModel
from kvboost.core.guarded import GuardedStore, loads_of
from kvboost.core.keys import variant_key
from kvboost.core.plan import SegmentKind
from kvboost.core.prefill import ApproxSpans, PrefillState
from kvboost.extend import ContentLease
from kvboost.hf.cache import KVLayout
from kvboost.hf.runner import ModelRunner
from kvboost.types import TOKEN_BYTES, Chunk, KVBlock, NonPrefixReuseStats, PutOutcome, context_before

# Reposition only if it takes at most this share of computing: guesses have an error, and what stands behind
# repositioned text is not stored as exact, so that the same beginning, if it comes again, is computed then.
_MUST_SAVE = 0.75
_MAX_DEPTH = 2  # approx_depth of what is kept; see docs/results/approx_depth.md
_MAX_REMEMBERED = 65_536


class ApproxPrefixes:
    """The last prefixes (a chunk behind exactly these chunks) whose KV was approximate."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._keys

    def add(self, keys: Iterable[bytes]) -> None:
        """Remember these."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > _MAX_REMEMBERED:
                self._keys.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """These are computed now."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._keys.clear()


@dataclass(frozen=True)
class ApproxModel:
    """What a model showed that it can do: reposition its keys, and recompute single positions."""

    repositioner: KeyRepositioner
    recompute: RecomputeRunner
    codec: Codec

    def close(self) -> None:
        """Leave the model as it was."""
        self.recompute.close()


def probe_approx(runner: ModelRunner, layout: KVLayout, codec: Codec, repair: Repair) -> ApproxModel:
    """Try out what ``repair`` needs. Raises UnsupportedModelError with the reason where the model cannot do it."""
    repositioner = probe_reposition(runner.model, layout)
    layers = repair.strategy.attention_layers(len(layout.slots) // 2)
    return ApproxModel(repositioner, probe_recompute(runner, layout, attention_layers=layers), codec)


class ApproxReuse:
    """Repositions chunks of one store into prompts of one model, and repairs them."""

    def __init__(
        self,
        store: GuardedStore,
        *,
        model: ApproxModel,
        repair: Repair,
        costs: CostModel | None = None,
        guard: ReuseGuard | None = None,
        force: bool = False,
    ) -> None:
        """With ``force`` also where computing is expected to be faster, as measurements need it."""
        self._store, self._model, self._repair, self._force = store, model, repair, force
        self._repairer = Repairer(mover=model.repositioner, rows=model.recompute, repair=repair)
        self._prefixes = ApproxPrefixes()
        self.costs = costs or CostModel()
        self.guard = guard or ReuseGuard(repair.tolerated_share)
        self.repositioned_chunks = 0
        self.failures = 0

    def over(self, store: GuardedStore, repair: Repair) -> ApproxReuse:
        """The same for another store and another way of repairing, at any cost: for measurements."""
        return ApproxReuse(store, model=self._model, repair=repair, force=True)

    def for_tenant(self, store: GuardedStore) -> ApproxReuse:
        """The same over another tenant's store: with its own counts, judged by the same checks."""
        return ApproxReuse(
            store, model=self._model, repair=self._repair, costs=self.costs, guard=self.guard, force=self._force
        )

    def forget(self) -> None:
        """Nothing that was prefilled before is stored any more."""
        self._prefixes.clear()

    def close(self) -> None:
        """Leave the model as it was."""
        self._model.close()

    def allow(self) -> None:
        """Forget what the checks counted, and go on."""
        self.guard.reset()

    def stats(self) -> NonPrefixReuseStats:
        """What the checks counted."""
        bound = self.guard.bound
        return NonPrefixReuseStats(
            allowed=self.guard.allowed,
            reason=self.guard.reason,
            checked=bound.checked,
            differing=bound.disagreements,
            differing_at_most=bound.upper,
        )

    def describe(self) -> str:
        """On or off, and how or why."""
        if not self.guard.allowed:
            return f"off: {self.guard.reason}"
        return f"on: {self._repair.strategy.name}, {self._repair.ratio:.0%} of the positions recomputed"

    @property
    def repair_settings(self) -> Repair:
        """How repositioned chunks are repaired."""
        return self._repair

    @property
    def reason(self) -> str | None:
        """Why nothing is repositioned any more, if a check put an end to it."""
        return self.guard.reason

    def find(
        self, chunks: Sequence[Chunk], *, available: int, prompt_tokens: int
    ) -> tuple[ApproxSpans | None, str | None]:
        """The chunks behind the first ``available`` that are worth repositioning here, or None, and why not."""
        if not self.guard.allowed:
            return None, self.guard.reason
        # Where this very text was approximate before, it is computed now: then it is exact from here on. Otherwise
        # a prompt that comes again, or a chat that grows, would be repaired anew every time.
        first = available
        while not self._force and first < len(chunks) and chunks[first].prefix_key in self._prefixes:
            first += 1
        # Once: should they be evicted later, they may be repositioned again.
        self._prefixes.forget(chunk.prefix_key for chunk in chunks[available:first])
        if first >= len(chunks):
            return None, None
        lease = self._store.lease_content(chunks, after=first)
        try:
            found = self._worth_it(lease, chunks, first=first, prompt_tokens=prompt_tokens)
        except BaseException:
            lease.release()
            raise
        if not isinstance(found, ApproxSpans):
            lease.release()
            return None, found
        self.repositioned_chunks += len(found.blocks)
        return found, None

    def replay(self, blocks: Mapping[int, KVBlock]) -> ApproxSpans:
        """The spans of a prompt that was prefilled with these blocks before."""
        return ApproxSpans(self._repair.strategy.name, dict(blocks))

    def _worth_it(
        self, lease: ContentLease, chunks: Sequence[Chunk], *, first: int, prompt_tokens: int
    ) -> ApproxSpans | str | None:
        """The blocks of ``lease`` as spans, or why they are not used."""
        blocks = {
            first + i: block
            for i, block in enumerate(lease.blocks)
            if block is not None and self._model.repositioner.can_move(block.start + len(block.tokens) // TOKEN_BYTES)
        }
        if not blocks:
            declined = sum(loads_of(lease).declined_at.values())
            return (
                f"{declined} tokens could be loaded and repositioned, more slowly than computed" if declined else None
            )
        begin, end = chunks[first].start, chunks[-1].end
        found = sum(chunks[i].end - chunks[i].start for i in blocks)
        recomputed = end - begin - found + self._repair.ratio * found
        expected = self.costs.read_seconds(forwards=1, rows=recomputed) if recomputed else 0.0
        if self._repairer.looks_first:
            expected += self.costs.read_seconds(forwards=1, rows=prompt_tokens - end)
        compute = self.costs.read_seconds(forwards=len(chunks) - first, rows=end - begin)
        price = (self.costs.move_seconds(found) + self.costs.repair_factor * expected) / compute
        if price > _MUST_SAVE and not self._force:
            self.costs.repair_refused()
            return f"{found} tokens could be repositioned here, at {price:.2f} of the time that computing them takes"
        return ApproxSpans(
            self._repair.strategy.name, blocks, lease, expected_seconds=expected if self.costs.in_seconds else 0.0
        )

    def failed(self, error: Exception) -> str:
        """Placing or repairing raised: count it, warn once, and say why this prompt is computed."""
        self.failures += 1
        reason = f"repositioning chunks failed, so this prompt was computed: {error!r}"
        if self.failures == 1:
            warnings.warn(f"{reason}; further failures are only counted", RuntimeWarning, stacklevel=4)
        return reason

    def place(self, state: PrefillState) -> None:
        """Copy the repositioned chunks to their places, keys re-rotated."""
        assert state.spans is not None
        for index, block in state.spans.blocks.items():
            tensors = self._model.codec.unpack(block.tensors)
            start = state.prompt.chunks[index].start
            self._model.repositioner.place(slab_cache(state), tensors, old_start=block.start, new_start=start)

    def repair(self, state: PrefillState) -> None:
        """Make the repositioned chunks fit, and compute what is missing between them."""
        self._repairer.repair(state)

    def observe(self, state: PrefillState) -> None:
        """Learn what placing and repairing took."""
        assert state.spans is not None
        stages = state.clock.stages()
        self.costs.observe_move(rows=state.plan.moved_tokens, seconds=stages["move"] / 1000.0)
        if state.spans.expected_seconds:
            took = (stages.get("select", 0.0) + stages["repair"]) / 1000.0
            self.costs.observe_repair(expected=state.spans.expected_seconds, seconds=took)

    def keep(self, state: PrefillState) -> int:
        """Store the chunks computed behind repositioned ones, for repositioning only. Returns how many were new."""
        spans, chunks = state.spans, state.prompt.chunks
        if spans is None or not state.is_repaired:
            return 0
        self._prefixes.add(chunk.prefix_key for chunk in chunks[min(spans.blocks) :])
        if spans.depth > _MAX_DEPTH:
            return 0
        new = 0
        for index, segment in enumerate(state.plan.segments):
            if segment.start < state.plan.approx_start or segment.end > state.last_step:
                continue
            if segment.kind is SegmentKind.FRESH and segment.chunk is not None:
                new += self._put(state, segment.chunk, context_before(chunks, index), depth=spans.depth)
        return new

    def _put(self, state: PrefillState, chunk: Chunk, context: bytes, *, depth: int) -> bool:
        tensors = self._model.codec.pack(state.cache.span(chunk.start, chunk.end), start=chunk.start)
        key = variant_key(chunk.content_key, context)
        block = KVBlock.of(chunk, tensors, context=context, bitwise=False, key=key)
        return self._store.put(replace(block, parent_key=None, approx_depth=depth)) is PutOutcome.STORED
