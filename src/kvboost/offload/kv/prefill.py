"""Reads prompts whose KV would be more than ``kv_bytes`` into pages, with what is stored of them.

Made by the engine if there is a budget, and asked for every request. Invariants: beside the store's own memory
(``cache_bytes``, where stored chunks are held until they are copied) the KV of a request in pages never lies in memory
whole: stored chunks go into pages one by one, new ones are copied out one by one; what was computed through pages
rounds differently and is stored under keys of its own, so that a request that fits never takes it for its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvboost.core.clock import StageClock
from kvboost.core.guarded import EmptyLease, loads_of
from kvboost.core.keys import paged_key
from kvboost.core.plan import ReusePlan, Segment, SegmentKind, plan_reuse, reusable_chunks
from kvboost.core.prefill import Prefiller, PrefillState, tokens_by_tier
from kvboost.core.workspaces import WorkspacePool
from kvboost.errors import CapacityError, ConfigError, UnsupportedModelError
from kvboost.hf.cache import KVLayout
from kvboost.offload.kv import PagedCache, least_budget, probe_paging
from kvboost.types import Chunk, LoadReport

_BLOCKS = (256, 128, 64, 32, 16)
"""Tokens in a page: large ones are moved and computed with in fewer calls, small ones leave less of the budget idle."""
STEP_TOKENS = 512  # read at once at most: every step goes over all pages that are away
_NOTHING_MOVED = "its KV lies in pages (kv_bytes), where nothing is moved"


class Pages:
    """The KV budget of one engine."""

    def __init__(self, model: Any, pool: WorkspacePool, *, budget: int, directory: Path | None) -> None:
        """Raises ConfigError if this model's KV cannot be paged within ``budget``."""
        try:
            self._layout = probe_paging(model, directory=directory)
        except UnsupportedModelError as error:
            raise ConfigError(f"kv_bytes does not work with this model: {error}") from error
        except OSError as error:
            raise ConfigError(f"no pages can be written ({error}); give kv_dir, a directory with room") from error
        least = least_budget(self._layout, _BLOCKS[-1])
        if budget < least:
            raise ConfigError(f"kv_bytes={budget} is too small for this model; give {least} bytes or more")
        self._model, self._pool, self._directory = model, pool, directory
        self.budget = budget
        self.block_tokens = block_tokens_for(self._layout, budget)

    def hold(self, rows: int, *, sequences: int = 1) -> bool:
        """Whether the caches of sequences of this length stay within the budget as they are."""
        return self._pool.bytes_for(rows) * sequences <= self.budget

    def refuse(self, rows: int, why: str) -> CapacityError:
        """The error for a request that needs more and cannot be paged."""
        return CapacityError(
            f"the KV of {rows} tokens, prompt and new ones, takes more than kv_bytes={self.budget} bytes, "
            f"and {why}; shorten it, lower max_new_tokens, or raise kv_bytes"
        )

    @contextmanager
    def read(
        self, reader: Prefiller, tokens: list[int], *, boundaries: Sequence[int], clock: StageClock
    ) -> Iterator[PrefillState]:
        """Plan the prompt and put all stored KV into pages. They are gone at the end of the ``with`` block."""
        with PagedCache(
            self._model,
            kv_bytes=self.budget,
            block_tokens=self.block_tokens,
            directory=self._directory,
            layout=self._layout,
        ) as cache:
            yield _open(reader, cache, tokens, boundaries=boundaries, clock=clock)


def block_tokens_for(layout: KVLayout, budget: int) -> int:
    """The largest block with which at least half of the budget is left for pages that stay."""
    return next((tokens for tokens in _BLOCKS if 2 * least_budget(layout, tokens) <= budget), _BLOCKS[-1])


def _open(
    reader: Prefiller, cache: PagedCache, tokens: list[int], *, boundaries: Sequence[int], clock: StageClock
) -> PrefillState:
    """A reading whose rows go into ``cache``. Nothing is held: what was stored is copied at once."""
    snapshot = reader.names.snapshot()
    chunks = reader.names.chunks(snapshot.root, tokens, boundaries)
    clock.lap("plan")
    usable = reusable_chunks(chunks, prompt_tokens=len(tokens))
    # What is not stored under its exact name is asked for under the other one: statistics count a chunk once.
    stored = reader._store.leading_run(usable)
    loads, tiers, exact = _place(reader, cache, usable[:stored])
    chunks = [*chunks[:exact], *_paged_names(chunks[exact:])]
    more, from_more, paged = _place(reader, cache, reusable_chunks(chunks, prompt_tokens=len(tokens))[exact:])
    clock.lap("place")
    return PrefillState(
        tokens=tokens,
        boundaries=boundaries,
        root=snapshot.root,
        chunks=chunks,
        plan=_in_long_steps(plan_reuse(chunks, prompt_tokens=len(tokens), available=exact + paged)),
        cache=cache,
        clock=clock,
        _codec=reader._codec,
        _lease=ReleasedLease(_both(loads, more)),
        _pool=reader._pool,
        _tiers=tiers + from_more,
        begins_bitwise=False,
        _snapshot=snapshot,
        _exact_rows=cache.get_seq_length(),
        _committed=exact + paged,
        reason=_NOTHING_MOVED,
        _detached=True,
    )


def _place(reader: Prefiller, cache: PagedCache, chunks: Sequence[Chunk]) -> tuple[LoadReport, Counter[str], int]:
    """Append the leading chunks that are stored; what tiers did for that, tokens by tier, and how many they were."""
    with reader._store.lease(chunks) as lease:
        blocks = lease.blocks
        for block in blocks:
            cache.place(reader._codec.unpack(block.tensors))
        return loads_of(lease), tokens_by_tier(blocks, loads_of(lease)), len(blocks)


def _paged_names(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same chunks under the keys of what was read in pages. The first still follows the chunk before it."""
    named: list[Chunk] = []
    for chunk in chunks:
        parent = named[-1].prefix_key if named else chunk.parent_key
        named.append(replace(chunk, prefix_key=paged_key(chunk.prefix_key), parent_key=parent))
    return named


def _in_long_steps(plan: ReusePlan) -> ReusePlan:
    """Several chunks in one step, as far as they are short: there are no bits of a cold run to keep to here."""
    segments: list[Segment] = []
    for segment in plan.segments[:-1]:
        last = segments[-1] if segments else None
        if (
            last is not None
            and SegmentKind.FRESH is last.kind is segment.kind
            and segment.end - last.start <= STEP_TOKENS
        ):
            segments[-1] = Segment(SegmentKind.FRESH, last.start, segment.end, None)
        else:
            segments.append(segment)
    return ReusePlan(plan.prompt_tokens, (*segments, plan.segments[-1]))


def _both(one: LoadReport, other: LoadReport) -> LoadReport:
    return LoadReport(
        {**one.tiers, **other.tiers}, one.declined + other.declined, {**one.declined_at, **other.declined_at}
    )


class ReleasedLease(EmptyLease):
    """A lease whose blocks are copied and not held any more."""

    def __init__(self, loads: LoadReport) -> None:
        self.loads = loads
