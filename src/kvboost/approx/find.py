"""Reuse of chunks that stand elsewhere: find, decide, place, repair, keep.

Used by the reader between its exact chunks and the last step; :mod:`kvboost.approx.repair` computes.
Invariants: nothing computed behind a moved chunk is stored under a prefix key; the last step never moves;
where moving does not pay, nothing moves.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvboost.approx.guard import ReuseGuard
from kvboost.approx.levels import Repair
from kvboost.approx.recompute import RecomputeRunner
from kvboost.approx.repair import ApproxChunks, Repairer
from kvboost.approx.reposition import KeyRepositioner
from kvboost.core.costs import CostModel
from kvboost.core.guarded import GuardedStore, loads_of
from kvboost.core.keys import variant_key
from kvboost.core.plan import SegmentKind
from kvboost.extend import ContentLease
from kvboost.hf.cache import SlabCache
from kvboost.hf.codec import KVCodec
from kvboost.types import TOKEN_BYTES, Chunk, PutOutcome, context_before

if TYPE_CHECKING:
    from kvboost.core.prefill import PrefillState

# Move only if it takes at most this share of computing: guesses have an error, and what stands behind moved text is not
# stored as exact, so that the same beginning, if it comes again, is computed then.
_MUST_SAVE = 0.75
_MAX_GENERATIONS = 2  # of KV computed behind moved KV; see docs/results/generations.md
_MAX_TAINTED = 65_536  # places remembered


class ApproxPrefixes:
    """The last places (a chunk behind exactly these chunks) where KV was approximate."""

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
            while len(self._keys) > _MAX_TAINTED:
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


class ApproxReuse:
    """Moves chunks of one store into prompts of one model, and repairs them."""

    def __init__(
        self,
        *,
        store: GuardedStore,
        mover: KeyRepositioner,
        rows: RecomputeRunner,
        codec: KVCodec,
        repair: Repair,
        costs: CostModel,
        at_any_price: bool = False,
    ) -> None:
        self._store = store
        self._at_any_price = at_any_price
        self._mover = mover
        self._rows = rows
        self._codec = codec
        self._repair = repair
        self._repairer = Repairer(mover=mover, rows=rows, repair=repair)
        self._places = ApproxPrefixes()
        self.costs = costs
        self.guard = ReuseGuard(repair.tolerated_share)
        self.moved_chunks = 0
        self.failures = 0

    def over(self, store: GuardedStore, repair: Repair) -> ApproxReuse:
        """The same for another store and another way of repairing, at any price."""
        return ApproxReuse(
            store=store,
            mover=self._mover,
            rows=self._rows,
            codec=self._codec,
            repair=repair,
            costs=CostModel(),
            at_any_price=True,
        )

    def for_tenant(self, store: GuardedStore) -> ApproxReuse:
        """The same over another tenant's store: with its own counts, judged by the same checks."""
        other = copy.copy(self)
        other._store, other._places = store, ApproxPrefixes()
        other.moved_chunks = other.failures = 0
        return other

    def forget(self) -> None:
        """Nothing that was read before is stored any more."""
        self._places.clear()

    def close(self) -> None:
        """Leave the model as it was."""
        self._rows.close()

    @property
    def repair_settings(self) -> Repair:
        """How moved chunks are repaired."""
        return self._repair

    def find(
        self, chunks: Sequence[Chunk], *, available: int, prompt_tokens: int
    ) -> tuple[ApproxChunks | None, str | None]:
        """The chunks behind the first ``available`` that are worth moving here, or None, and why not."""
        if not self.guard.allowed:
            return None, self.guard.reason
        # Where this very text was approximate before, it is computed now: then it is exact from here on. Otherwise
        # a prompt that comes again, or a chat that grows, would be repaired anew every time.
        first = available
        while not self._at_any_price and first < len(chunks) and chunks[first].prefix_key in self._places:
            first += 1
        # Once: should they be evicted later, they may be moved again.
        self._places.forget(chunk.prefix_key for chunk in chunks[available:first])
        if first >= len(chunks):
            return None, None
        lease = self._store.lease_content(chunks, after=first)
        try:
            found = self._worth_moving(lease, chunks, available=available, first=first, prompt_tokens=prompt_tokens)
        except BaseException:
            lease.release()
            raise
        if not isinstance(found, ApproxChunks):
            lease.release()
            return None, found
        self.moved_chunks += len(found.blocks)
        return found, None

    def _worth_moving(
        self, lease: ContentLease, chunks: Sequence[Chunk], *, available: int, first: int, prompt_tokens: int
    ) -> ApproxChunks | str | None:
        """The blocks of ``lease`` as moved chunks, or why they are not moved."""
        blocks = {
            first + i: block
            for i, block in enumerate(lease.blocks)
            if block is not None and self._mover.can_move(block.start + len(block.tokens) // TOKEN_BYTES)
        }
        if not blocks:
            declined = sum(loads_of(lease).declined_at.values())
            return f"{declined} tokens could be loaded to be moved, more slowly than computed" if declined else None
        begin, end = chunks[first].start, chunks[-1].end
        moved = sum(chunks[i].end - chunks[i].start for i in blocks)
        rows = end - begin - moved + self._repair.ratio * moved
        expected = self.costs.read_seconds(forwards=1, rows=rows) if rows else 0.0
        if self._repairer.looks_first:
            expected += self.costs.read_seconds(forwards=1, rows=prompt_tokens - end)
        compute = self.costs.read_seconds(forwards=len(chunks) - first, rows=end - begin)
        price = (self.costs.move_seconds(moved) + self.costs.repair_factor * expected) / compute
        if price > _MUST_SAVE and not self._at_any_price:
            self.costs.repair_refused()
            return f"{moved} tokens could be moved here, at {price:.2f} of the time that computing them takes"
        return ApproxChunks(lease, blocks, expected_seconds=expected if self.costs.in_seconds else 0.0)

    def failed(self, error: Exception) -> str:
        """Moving or repairing raised: count it, warn once, and say why this prompt is computed."""
        self.failures += 1
        reason = f"moving chunks failed, so this prompt was computed: {error!r}"
        if self.failures == 1:
            warnings.warn(f"{reason}; further failures are only counted", RuntimeWarning, stacklevel=4)
        return reason

    def place(self, cache: SlabCache, chunks: Sequence[Chunk], moved: ApproxChunks) -> None:
        """Copy the moved chunks to their rows, keys re-rotated."""
        for index, block in moved.blocks.items():
            tensors = self._codec.unpack(block.tensors)
            self._mover.place(cache, tensors, old_start=block.start, new_start=chunks[index].start)

    def repair(self, reading: PrefillState, moved: ApproxChunks) -> None:
        """Make the moved chunks fit, and compute what is missing between them."""
        self._repairer.repair(reading, moved)

    def keep(self, reading: PrefillState, moved: ApproxChunks) -> int:
        """Store the chunks computed behind moved ones, for moving only. Returns how many were new."""
        if moved.repaired:
            self._places.add(chunk.prefix_key for chunk in reading.chunks[min(moved.blocks) :])
        if moved.approx_depth > _MAX_GENERATIONS or not moved.repaired:
            return 0
        new = 0
        end = reading.plan.steps[-1].start
        for index, segment in enumerate(reading.plan.segments):
            if segment.start < reading.plan.untainted_end or segment.end > end:
                continue
            if segment.kind is SegmentKind.FRESH and segment.chunk is not None:
                context = context_before(reading.chunks, index)
                key = variant_key(segment.chunk.content_key, context)
                block = reading.block(segment.chunk, key=key, context=context, approx_depth=moved.approx_depth)
                new += self._store.put(block) is PutOutcome.STORED
        return new
