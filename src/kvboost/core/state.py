"""The state of one prefill: what is computed, what of it is exact, what is stored.

Made and advanced by :class:`kvboost.core.prefill.Prefiller` (or by paging) only. Invariants, checked by every
transition: ``num_committed <= num_exact <= num_computed <= len(tokens)``; positions ``[0, num_computed)`` are in the
cache; positions ``[0, num_exact)`` were placed or computed as a cold run computes them, so nothing behind a
repositioned chunk, and nothing from a step that the rule does not allow, is ever exact.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from kvboost.core.backend import KVCache
from kvboost.core.costs import StageClock
from kvboost.core.guarded import EmptyLease, loads_of
from kvboost.core.keys import KeySnapshot
from kvboost.core.plan import ReusePlan, plan_reuse, reusable_chunks
from kvboost.core.spans import ApproxSpans, RepairOutcome, repair_end
from kvboost.core.workspaces import WorkspacePool
from kvboost.extend import Lease
from kvboost.steps import StepRule
from kvboost.types import TOKEN_BYTES, Chunk, KVBlock, LoadReport, ReuseReport

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ChunkedPrompt:
    """A prompt cut into chunks, under the keys of one model state."""

    tokens: list[int]
    boundaries: Sequence[int]
    snapshot: KeySnapshot
    chunks: list[Chunk]

    tail: Chunk | None = None
    """The tokens behind the last cut: stored too, for prompts that begin with this one."""
    given: Sequence[int] = ()
    """Those of the boundaries that are not of the steps' grid."""

    @cached_property
    def stored(self) -> list[Chunk]:
        """What a prefill of the whole prompt stores: the chunks and the tail."""
        return [*self.chunks, self.tail] if self.tail is not None else self.chunks

    @cached_property
    def lookup(self) -> list[Chunk]:
        """The chunks to look up: all that hold a token before the last one, whose logits are needed."""
        count = len(self.stored)
        while count and self.stored[count - 1].start >= len(self.tokens) - 1:
            count -= 1
        return self.stored[:count]

    @property
    def usable(self) -> Sequence[Chunk]:
        """All chunks that end before the last token: those that could be repositioned, or have a state behind them."""
        return reusable_chunks(self.chunks, prompt_tokens=len(self.tokens))


@dataclass(frozen=True)
class ExactHits:
    """The leading chunks that a prefill begins with."""

    tokens: int = 0
    """Tokens of the leading chunks that were placed."""
    borrowed: int = 0
    """Those of them in the end of another prompt: stored, but not as chunks of this one."""
    bitwise: bool = True
    """Whether they, and what is computed right after them, are bitwise equal to a cold run."""
    lease: Lease = field(default_factory=EmptyLease)
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Number of their tokens by source tier."""
    state: bytes | None = None
    """The key of the states that a prefill goes on from, where there are recurrent layers."""
    state_ends: tuple[int, ...] = ()
    """Where it keeps the states that it passes. A step ends at each."""

    @property
    def own_tokens(self) -> int:
        """Tokens that are stored as chunks of this prompt."""
        return self.tokens - self.borrowed


class PrefillState:
    """One prefill. Owns a cache and leases; close it, or leave its ``with`` block, to give them back."""

    def __init__(
        self,
        prompt: ChunkedPrompt,
        cache: KVCache,
        *,
        hits: ExactHits,
        rule: StepRule,
        clock: StageClock,
        pool: WorkspacePool | None = None,
    ) -> None:
        """The cache holds the chunks of ``hits``. It goes back to ``pool`` at the end; without one it is not kept."""
        self.prompt, self.hits, self.rule, self.clock = prompt, hits, rule, clock
        self._states: dict[int, tuple[torch.Tensor, ...]] = {}
        self._cache, self._pool = cache, pool
        self.paged = False
        """Whether the cache keeps most of its KV outside of the memory."""
        self.plain_ms: float | None = None
        """How long computing the whole prompt should take, for the report."""
        self._plan = self._exact_plan()
        self._num_computed = self._num_exact = self._plan.exact_tokens
        self._num_committed = min(hits.own_tokens, self._plan.exact_tokens)
        self._spans: ApproxSpans | None = None
        self.trial: ApproxSpans | None = None
        """What could have been repositioned, to be checked once the prompt is answered. Its lease was released."""
        self._repair: RepairOutcome | None = None
        self._reason: str | None = None
        self._new_chunks = 0
        self.forwards = 0
        """Steps that were computed."""
        self._observed = False
        self._uploaded: tuple[int, torch.Tensor] | None = None

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        return self.prompt.tokens

    @property
    def cache(self) -> KVCache:
        """The cache that holds its KV."""
        return self._cache

    @property
    def plan(self) -> ReusePlan:
        """Where the KV of each segment comes from."""
        return self._plan

    @property
    def spans(self) -> ApproxSpans | None:
        """The repositioned chunks, if any."""
        return self._spans

    @property
    def num_computed(self) -> int:
        """Prompt tokens whose KV is in the cache."""
        return self._num_computed

    @property
    def num_exact(self) -> int:
        """Leading prompt tokens whose KV is as a cold run computes it."""
        return self._num_exact

    @property
    def num_committed(self) -> int:
        """Leading prompt tokens whose KV is stored under the exact keys of its own chunks."""
        return self._num_committed

    @property
    def last_step(self) -> int:
        """Where the step begins that holds the last token. Behind repositioned chunks it is all that follows them."""
        if self._spans is not None:
            moved, rest = self._plan.moved[-1], self._plan.segments[-1]
            return repair_end(len(self.tokens), moved_end=moved.end, cut_end=rest.start)
        return self.rule.last_step(max(self._plan.exact_tokens, *self.hits.state_ends, 0), len(self.tokens))

    def step_end(self, limit: int, *, start: int | None = None) -> int:
        """Where the step that begins at ``start``, or the next one, ends: at ``limit`` at the latest."""
        start = self._num_computed if start is None else start
        kept = (end for end in self.hits.state_ends if end > start)
        return self.rule.step_end(start, min(limit, next(kept, limit)))

    @property
    def bitwise(self) -> bool:
        """Whether everything in the cache has the bits of a cold run."""
        return self.hits.bitwise and self._spans is None and (self.rule.is_bitwise or not self._plan.exact_tokens)

    @property
    def awaits_repair(self) -> bool:
        """Whether repositioned chunks are planned and not yet repaired."""
        return self._spans is not None and self._repair is None

    @property
    def is_repaired(self) -> bool:
        """Whether repositioned chunks are in the cache, and repaired."""
        return self._repair is not None

    @property
    def repair_tokens(self) -> int:
        """About how many tokens the planned repair computes: what is missing, and its share of what is repositioned."""
        assert self._spans is not None
        moved = self._plan.moved_tokens
        return self.last_step - self._plan.approx_start - moved + round(self._spans.ratio * moved)

    @property
    def new_chunks(self) -> int:
        """Blocks that this prefill added to the store."""
        return self._new_chunks

    def missing_ids(self, end: int, *, upload: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
        """The ids of the positions up to ``end`` that are not computed yet, [n], from one upload for all steps."""
        start = self._num_computed
        if self._uploaded is None or start < self._uploaded[0]:
            self._uploaded = start, upload(self.tokens[start:])
        first, ids = self._uploaded
        return ids[start - first : end - first]

    # Transitions

    def computed(self, end: int) -> None:
        """The model has appended the positions up to ``end`` in one step."""
        start = self._num_computed
        if self.awaits_repair and start >= self._plan.approx_start:
            raise AssertionError("positions behind repositioned chunks are computed by their repair")
        if not start < end <= len(self.tokens) or (self.awaits_repair and end > self._plan.approx_start):
            raise AssertionError(f"[{start}, {end}) is no step of this plan")
        if self._cache.get_seq_length() != end:
            raise AssertionError(f"the cache holds {self._cache.get_seq_length()} positions instead of {end}")
        if self._num_exact == start and self.rule.keeps_bits(start, end) and start < self._plan.approx_start:
            self._num_exact = end
        self._num_computed = end
        self.forwards += 1

    def reposition(self, spans: ApproxSpans) -> None:
        """Add chunks from other positions to the plan; they are placed when what is before them is computed."""
        if self._spans is not None or self._num_computed != self._plan.exact_tokens:
            raise AssertionError("chunks are repositioned once, before anything is computed")
        self._plan = plan_reuse(
            self.prompt.chunks,
            prompt_tokens=len(self.tokens),
            exact_tokens=self._plan.exact_tokens,
            approx=spans.blocks,
        )
        self._spans = spans

    def repaired(self, outcome: RepairOutcome) -> None:
        """Everything up to the last step is in the cache, repositioned or computed."""
        if not self.awaits_repair or self._num_computed != self._plan.approx_start:
            raise AssertionError("a repair follows the exact steps before the first repositioned chunk")
        if self._cache.get_seq_length() != self.last_step:
            raise AssertionError(f"a repair leaves {self.last_step} positions in the cache")
        self._repair, self._num_computed = outcome, self.last_step

    def drop_approx(self, reason: str) -> None:
        """Discard the repositioned chunks and continue with exact reuse only."""
        if self._spans is None:
            raise AssertionError("nothing was repositioned")
        self._spans.release()
        self._spans = self._repair = None
        self._plan = self._exact_plan()
        self._num_computed = self._num_exact
        self._cache.set_length(self._num_exact)
        self._reason = reason

    def committed(self, end: int, *, new: bool) -> None:
        """The store holds the exact chunk that ends here; ``new`` if it was added."""
        if not self._num_committed < end <= self._num_exact:
            raise AssertionError(f"[{self._num_committed}, {end}) is not exact, or was committed before")
        self._num_committed = end
        self._new_chunks += new

    def used_keys(self) -> list[bytes]:
        """What served this prompt or was stored of it, in order."""
        keys = [chunk.prefix_key for chunk in self.prompt.stored if chunk.end <= self._num_committed]
        return keys if self.hits.state is None else [*keys, self.hits.state]

    @property
    def at_state_end(self) -> bool:
        """Whether the states that the cache holds now are to be kept."""
        return self._num_computed in self.hits.state_ends and self._num_exact == self._num_computed

    def keep_states(self, copies: tuple[torch.Tensor, ...] | None) -> None:
        """``copies`` are of the states that the cache holds now; None if there is no memory for them."""
        if copies is not None:
            self._states[self._num_computed] = copies

    def states_at(self, end: int) -> tuple[torch.Tensor, ...] | None:
        """The states that were kept at this position, once: they are stored now."""
        return self._states.pop(end, None)

    def kept(self, count: int) -> None:
        """``count`` new approximate blocks were stored."""
        self._new_chunks += count

    def observe_once(self) -> bool:
        """True for the first call only: a prefill's times are observed once."""
        first, self._observed = not self._observed, True
        return first

    def explain(self, reason: str | None) -> None:
        """Note why something was not reused, for the report."""
        self._reason = reason if self._reason is None or reason is None else f"{self._reason}; {reason}"

    def move_to(self, cache: KVCache) -> None:
        """Continue in this cache; the one before goes back to the pool."""
        length = self._cache.get_seq_length()
        cache.place(0, self._cache.span(0, length))
        cache.set_length(length)
        if length:
            cache.place_states(self._cache.states())
        before, self._cache = self._cache, cache
        self._give_back(before)

    def take_checked(self) -> ApproxSpans | None:
        """What a check of this request is about: what was repositioned, or could have been.

        Their slot goes along; the lease stays here.
        """
        if self._spans is None:
            trial, self.trial = self.trial, None
            return trial
        if not self.is_repaired:
            return None
        spans, self._spans = replace(self._spans, lease=EmptyLease()), replace(self._spans, slot=None)
        return spans

    def detach(self) -> KVCache:
        """Hand the cache over to the caller: it is no longer pooled."""
        self._pool = None
        return self._cache

    def close(self) -> None:
        """Release the leases and return the cache to the pool."""
        self.hits.lease.release()
        for spans in (self._spans, self.trial):
            if spans is not None:
                spans.release()
        self._give_back(self._cache)
        self._pool = None

    def _give_back(self, cache: KVCache) -> None:
        """Pool a cache that holds the committed chunks."""
        if self._pool is not None:
            held = self._num_committed if self.hits.bitwise else 0
            self._pool.give_back(cache, held=[c.prefix_key for c in self.prompt.lookup if c.end <= held])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def report(self) -> ReuseReport:
        """What was reused and how long it took."""
        exact, moved = self._plan.exact_tokens, self._plan.moved_tokens
        tiers, loads = Counter(self.hits.tiers), loads_of(self.hits.lease)
        declined, declined_at = loads.declined, dict(loads.declined_at)
        if self._spans is not None:
            more = loads_of(self._spans.lease)
            tiers.update(tokens_by_tier(self._spans.blocks.values(), more))
            declined += more.declined
            declined_at |= more.declined_at
            for segment in self._plan.moved:
                declined_at.pop(segment.start, None)
        return ReuseReport(
            exact_tokens=exact,
            moved_tokens=moved,
            # A repair may go over some positions twice.
            recomputed_tokens=min(moved, self._repair.recomputed_tokens) if self._repair else 0,
            fresh_tokens=len(self.tokens) - exact - moved,
            bitwise=self.bitwise,
            timings_ms=self.clock.stages(),
            reason=self._reason,
            error_estimate=self._repair.error_estimate if self._repair else None,
            approximate=self._spans.strategy if self._spans else None,
            tiers=MappingProxyType(dict(tiers)),
            declined_tokens=sum(declined_at.values()),
            declined=declined,
            segments=self._plan.runs(recomputed=self._repair.positions if self._repair else ()),
            paged=self.paged,
            plain_ms=self.plain_ms,
        )

    def _exact_plan(self) -> ReusePlan:
        """The plan without repositioned chunks."""
        tokens = len(self.tokens)
        return plan_reuse((), prompt_tokens=tokens, exact_tokens=self.rule.resume(min(self.hits.tokens, tokens - 1)))


def tokens_by_tier(blocks: Iterable[KVBlock], loads: LoadReport, *, limit: int | None = None) -> Counter[str]:
    """How many tokens of a lease's blocks, of the first ``limit``, came from which tier."""
    tokens: dict[str, int] = {}
    left = limit if limit is not None else sys.maxsize
    for block in blocks:  # thousands in a long prompt
        count = min(len(block.tokens) // TOKEN_BYTES, left)
        if count:
            tier = loads.tiers.get(block.key, "memory")
            tokens[tier] = tokens.get(tier, 0) + count
            left -= count
    return Counter(tokens)
