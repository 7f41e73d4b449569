"""Prefills prompts whose KV would be more than ``kv_bytes`` into pages, with what is stored of them.

Hooks into the engine as its :class:`kvboost.core.session.KVPaging`, where there is such a limit. Invariants: beside the
store's own memory (``cache_bytes``, where stored chunks are held until they are copied) the KV of a request in
pages never lies in memory whole: stored chunks go into pages one by one, new ones are copied out one by one; what was
computed through pages rounds differently and is stored under keys of its own, so that a request that fits never takes
it for its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from kvboost.core.backend import KVCache
from kvboost.core.costs import StageClock
from kvboost.core.guarded import ReleasedLease, joined_loads, loads_of
from kvboost.core.keys import paged_key
from kvboost.core.prefill import Prefiller
from kvboost.core.state import ChunkedPrompt, ExactHits, PrefillState, tokens_by_tier
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.hf.cache import KVLayout
from kvboost.offload.kv.cache import PagedCache, min_budget, probe_paging
from kvboost.steps import StepRule
from kvboost.types import Chunk, LoadReport

_PAGE_TOKENS = (256, 128, 64, 32, 16)
"""Large pages are moved and computed with in fewer calls, small ones leave less of the budget idle."""
STEP_TOKENS = 512  # computed at once at most: every step goes over all pages that are away
_RULE = StepRule(STEP_TOKENS, numerics="fast")
_EXACT_ONLY = "its KV lies in pages (kv_bytes), where nothing is repositioned"


class Paging:
    """Pages for requests of one model within ``budget`` bytes of memory."""

    def __init__(self, model: Any, *, budget: int, directory: Path | None) -> None:
        """Raises UnsupportedModelError if this model's KV cannot be paged, ConfigError for unusable settings."""
        try:
            self._layout = probe_paging(model, directory=directory)
        except OSError as error:
            raise ConfigError(f"no pages can be written ({error}); give kv_dir, a directory with free space") from error
        minimum = min_budget(self._layout, _PAGE_TOKENS[-1])
        if budget < minimum:
            raise ConfigError(f"kv_bytes={budget} is too small for this model; give {minimum} bytes or more")
        self._model, self._budget, self._directory = model, budget, directory
        self.page_tokens = page_tokens_for(self._layout, budget)

    @contextmanager
    def open(
        self, prefiller: Prefiller, tokens: list[int], *, boundaries: Sequence[int], clock: StageClock
    ) -> Iterator[PrefillState]:
        """A prefill with all stored KV of the prompt in pages. They are gone at the end of the ``with`` block."""
        with PagedCache(
            self._model,
            kv_bytes=self._budget,
            block_tokens=self.page_tokens,
            directory=self._directory,
            layout=self._layout,
        ) as cache:
            yield _start(prefiller, cache, prefiller.chunk(tokens, boundaries), clock)


def make_paging(model: Any, *, budget: int, directory: Path | None) -> tuple[Paging | None, str | None]:
    """Pages for this model, or None and why its requests cannot be paged."""
    try:
        return Paging(model, budget=budget, directory=directory), None
    except UnsupportedModelError as error:
        return None, str(error)


def page_tokens_for(layout: KVLayout, budget: int) -> int:
    """The largest page with which at least half of the budget is left for pages that stay."""
    return next((tokens for tokens in _PAGE_TOKENS if 2 * min_budget(layout, tokens) <= budget), _PAGE_TOKENS[-1])


def _start(prefiller: Prefiller, cache: PagedCache, prompt: ChunkedPrompt, clock: StageClock) -> PrefillState:
    """A prefill into ``cache``. Nothing is held: what was stored is copied at once."""
    clock.lap("plan")
    # What is not stored under its exact name is asked for under the other one: statistics count a chunk once.
    stored = prefiller.store.leading_run(prompt.usable)
    loads, tiers, exact = _place(prefiller, cache, prompt.usable[:stored])
    # Without its tail, which has an exact name.
    prompt = replace(prompt, chunks=[*prompt.chunks[:exact], *_paged_names(prompt.chunks[exact:])], tail=None)
    more, more_tiers, paged = _place(prefiller, cache, prompt.usable[exact:])
    clock.lap("place")
    tokens = prompt.chunks[exact + paged - 1].end if exact + paged else 0
    hits = ExactHits(tokens, bitwise=False, lease=ReleasedLease(joined_loads(loads, more)), tiers=tiers + more_tiers)
    state = PrefillState(prompt, cast(KVCache, cache), hits=hits, rule=_RULE, clock=clock)
    state.paged = True
    state.explain(_EXACT_ONLY)
    return state


def _place(prefiller: Prefiller, cache: PagedCache, chunks: Sequence[Chunk]) -> tuple[LoadReport, Counter[str], int]:
    """Append the leading chunks that are stored; what tiers did for that, tokens by tier, and how many they were."""
    with prefiller.store.lease(chunks) as lease:
        blocks = lease.blocks
        for block in blocks:
            cache.place(prefiller.codec.unpack(block.tensors))
        return loads_of(lease), tokens_by_tier(blocks, loads_of(lease)), len(blocks)


def _paged_names(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same chunks under the keys of what was computed in pages. The first still follows the chunk before it."""
    named: list[Chunk] = []
    for chunk in chunks:
        parent = named[-1].prefix_key if named else chunk.parent_key
        named.append(chunk._replace(prefix_key=paged_key(chunk.prefix_key), parent_key=parent))
    return named
