"""One tenant's access to a model: its prefiller, its store and its limits.

Made by the engine, used by it and by the scheduler. Invariant: both admit, refuse and page by the limits here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvboost.capacity import HOST_BUDGETS
from kvboost.core.costs import StageClock
from kvboost.core.guarded import joined_loads
from kvboost.core.prefill import Prefiller
from kvboost.core.state import ChunkedPrompt, PrefillState
from kvboost.errors import CapacityError
from kvboost.extend import ChunkStore, LayeredStore
from kvboost.types import NOTHING_LOADED, Fetched


@dataclass(frozen=True)
class SequenceLimits:
    """How long a model's sequences may get."""

    max_positions: int | None = None
    """The longest sequence the model supports; None if it has no limit."""
    exact_limit: int | None = None
    """Longer prompts are computed without reuse; None if there is no such limit."""
    exact_limit_reason: str | None = None
    """Why there is such a limit."""

    @property
    def longest_reused(self) -> int | None:
        """The longest prompt that can be reused; None if there is no limit."""
        return min((limit for limit in (self.max_positions, self.exact_limit) if limit is not None), default=None)


class KVPaging(Protocol):
    """Prefill of requests whose KV exceeds the memory limit. :mod:`kvboost.offload.kv` has it; core works without."""

    @property
    def page_tokens(self) -> int:
        """Tokens in a page."""
        ...

    def open(
        self, prefiller: Prefiller, tokens: list[int], *, boundaries: Sequence[int], clock: StageClock
    ) -> AbstractContextManager[PrefillState]:
        """A prefill into pages, with the stored part of the prompt loaded. Leaving the block frees them."""
        ...


@dataclass(frozen=True)
class KVBudget:
    """How much KV requests may hold in memory, and how a request is served that needs more."""

    bytes_for: Callable[[int], int]
    """Bytes of the cache of a sequence with this many tokens."""
    limit: int | None = None
    jobs_bytes: int = HOST_BUDGETS.jobs_kv_bytes
    """KV that the jobs of a batch runner hold together, if there is no limit."""
    paging: KVPaging | None = None
    unpaged: str | None = None
    """Why there is no paging although there is a limit."""

    def fits(self, tokens: int, *, sequences: int = 1) -> bool:
        """Whether the caches of sequences of this length stay within the limit."""
        return self.limit is None or self.bytes_for(tokens) * sequences <= self.limit

    def check(self, tokens: int, *, sequences: int = 1, why: str) -> None:
        """Raise CapacityError above the limit; ``why`` explains why paging does not help."""
        if not self.fits(tokens, sequences=sequences):
            raise CapacityError(
                f"the KV of {tokens} tokens, prompt and new ones, takes more than kv_bytes={self.limit} bytes, "
                f"and {why}; shorten it, lower max_new_tokens, or raise kv_bytes"
            )


@dataclass(frozen=True)
class Session:
    """The parts of one engine that belong to one tenant."""

    tenant: str
    store: ChunkStore
    prefiller: Prefiller
    limits: SequenceLimits
    budget: KVBudget
    keeps_decoded: bool = False
    """Whether KV made by decoding is stored too."""

    def clear(self) -> None:
        """Drop what is cached outside the store."""
        self.prefiller.pool.clear()

    def refusal(self, tokens: int) -> str | None:
        """Why a prompt of this length cannot reuse anything; None if it can."""
        limit = self.limits.exact_limit
        return self.limits.exact_limit_reason if limit is not None and tokens > limit else None

    def prefetch(self, tokens: list[int], boundaries: Sequence[int]) -> Future[int]:
        """Load the stored prefix of a prompt from slower tiers into memory, in the background."""
        nothing, store = nothing_to_fetch(), self.prefiller.store
        if not self.fetches(len(tokens)):
            return nothing
        chunks = self.prefiller.leading(self.prefiller.chunk(tokens, boundaries))

        def load() -> int:
            came = store.fetch(chunks)[0].tiers
            return sum(chunk.end - chunk.start for chunk in chunks if chunk.prefix_key in came)

        return store.in_background(load, tenant=self.tenant, nothing=nothing) or nothing

    def fetches(self, tokens: int) -> bool:
        """Whether a prompt of this length may have KV in slower tiers."""
        return self.refusal(tokens) is None and isinstance(self.store, LayeredStore)

    def fetch(self, prompt: ChunkedPrompt, *, approx: bool) -> Future[Fetched] | None:
        """Load what a prefill of the prompt would reuse into memory, in the background; None if too much waits."""
        nothing: Future[Fetched] = Future()
        nothing.set_result(Fetched())
        work = partial(fetch, self.prefiller, prompt, approx=approx)
        return self.prefiller.store.in_background(work, tenant=self.tenant, nothing=nothing)


def nothing_to_fetch() -> Future[int]:
    """The result of a prefetch without slower tiers."""
    nothing: Future[int] = Future()
    nothing.set_result(0)
    return nothing


def fetch(prefiller: Prefiller, prompt: ChunkedPrompt, *, approx: bool) -> Fetched:
    """Bring up the prompt's leading chunks and the end of an earlier prompt; with ``approx``, other chunks too."""
    store, usable = prefiller.store, prompt.usable
    exact, known = store.fetch(prefiller.leading(prompt))
    content = NOTHING_LOADED
    if approx:
        first = prefiller.approx.first_wanted(usable, available=min(known, len(usable)))
        if first is not None and first < len(usable):
            content = store.fetch_content(usable, after=first)
    tail = prefiller.stored_tail(prompt, known)
    if tail is not None:
        exact = joined_loads(exact, store.fetch([tail])[0])
    return Fetched(exact, content)
