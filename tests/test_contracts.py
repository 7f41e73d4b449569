"""The contracts find what they promise to find: every rule fails for an extension that breaks it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvboost.core.chunking import ContentChunker, FixedChunker
from kvboost.errors import ConfigError, StoreError
from kvboost.extend import Chunker, ChunkStore, EvictionPolicy, TokenArray
from kvboost.store import LeafFirstLRU, MemoryStore
from kvboost.store.memory import MemoryLease
from kvboost.types import Chunk, KVBlock, PutOutcome, StoreStats
from tests.contracts import ChunkerContract, ChunkStoreContract, EvictionPolicyContract


def rules(contract: type) -> list[str]:
    return [name for name in dir(contract) if name.startswith("test_")]


def broken_rules(contract: Any) -> set[str]:
    """The rules that raise: AssertionError, or whatever a broken extension raises itself."""
    broken = set()
    for name in rules(type(contract)):
        try:
            getattr(contract, name)()
        except Exception:  # noqa: BLE001 (a broken extension may raise anything)
            broken.add(name)
    return broken


def store_contract(make: Callable[..., Any]) -> ChunkStoreContract:
    class Contract(ChunkStoreContract):
        def make_store(self, *, capacity_bytes: int, max_chunks: int | None = None) -> ChunkStore:
            return make(capacity_bytes, max_chunks=max_chunks)

    return Contract()


def chunker_contract(make: Callable[[], Any]) -> ChunkerContract:
    class Contract(ChunkerContract):
        def make_chunker(self) -> Chunker:
            return make()

    return Contract()


def policy_contract(make: Callable[[], Any]) -> EvictionPolicyContract:
    class Contract(EvictionPolicyContract):
        def make_policy(self) -> EvictionPolicy:
            return make()

    return Contract()


# Stores: a memory store with one mistake each.


class WithoutStats:
    """Not a store: a method of the Protocol is missing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inner = MemoryStore(*args, **kwargs)
        self.lease, self.put, self.used, self.clear, self.close = (
            inner.lease, inner.put, inner.used, inner.clear, inner.close,
        )  # fmt: skip


class ChangesBlocks(MemoryStore):
    """Hands out something else than was put."""

    def put(self, block: KVBlock) -> PutOutcome:
        return super().put(replace(block, bitwise=False))


class RaisesOnAMiss(MemoryStore):
    """Raises where it should miss."""

    def lease(self, chunks: Sequence[Chunk]) -> MemoryLease[KVBlock]:
        if chunks and chunks[0].prefix_key not in self._entries:
            raise KeyError(chunks[0].prefix_key)
        return super().lease(chunks)


class SkipsGaps(MemoryStore):
    """Finds every stored chunk of a prompt, also behind a missing one."""

    def lease(self, chunks: Sequence[Chunk]) -> MemoryLease[KVBlock]:
        return super().lease([chunk for chunk in chunks if chunk.prefix_key in self._entries])


class AllOrNothing(MemoryStore):
    """Finds a prompt only as a whole."""

    def lease(self, chunks: Sequence[Chunk]) -> MemoryLease[KVBlock]:
        return super().lease(chunks if all(c.prefix_key in self._entries for c in chunks) else [])


class IgnoresTokens(MemoryStore):
    """Trusts the key alone."""

    def lease(self, chunks: Sequence[Chunk]) -> MemoryLease[KVBlock]:
        stored = [self._entries.get(chunk.prefix_key) for chunk in chunks]
        return super().lease(
            [c._replace(tokens=e.block.tokens) if e else c for c, e in zip(chunks, stored, strict=True)]
        )


class StoresAgain(MemoryStore):
    """Says STORED for what it has, and counts it again."""

    def put(self, block: KVBlock) -> PutOutcome:
        outcome = super().put(block)
        if outcome is PutOutcome.PRESENT:
            self._own.bytes += block.nbytes
            return PutOutcome.STORED
        return outcome


class KeepsOrphans(MemoryStore):
    """Keeps blocks that no lookup can reach."""

    def put(self, block: KVBlock) -> PutOutcome:
        orphan = block.parent_key is not None and block.parent_key not in self._entries
        return super().put(replace(block, parent_key=None) if orphan else block)


class EvictsForNothing(MemoryStore):
    """Throws everything away before it sees that a block can never fit."""

    def put(self, block: KVBlock) -> PutOutcome:
        if block.nbytes > self._quota:
            self.clear()
        return super().put(block)


class HasNoLimit(MemoryStore):
    """Never makes room."""

    def _evict_for(self, block: KVBlock, share: Any) -> bool:
        return True


class HasNoChunkLimit(MemoryStore):
    """Looks at the bytes only."""

    def __init__(self, capacity_bytes: int, *, max_chunks: int | None = None) -> None:
        super().__init__(capacity_bytes)


class OffByOneByte(MemoryStore):
    """Holds one byte too many."""

    def __init__(self, capacity_bytes: int, *, max_chunks: int | None = None) -> None:
        super().__init__(capacity_bytes + 1, max_chunks=max_chunks)

    def stats(self, tenant: str | None = None) -> StoreStats:
        return replace(super().stats(tenant), capacity_bytes=self._capacity - 1)


class NeverEvicts(MemoryStore):
    """Is full once and for all."""

    def _evictable(self, key: bytes) -> bool:
        return False


class EvictsParents(MemoryStore):
    """Plain LRU: takes chunks that others stand behind."""

    def __init__(self, capacity_bytes: int, *, max_chunks: int | None = None) -> None:
        super().__init__(capacity_bytes, max_chunks=max_chunks, policy=LeafFirstLRU())

    def _evictable(self, key: bytes) -> bool:
        return self._entries[key].leases == 0


class ForgetsRefusal(MemoryStore):
    """Counts a successor that was then refused: the parent can never go."""

    def put(self, block: KVBlock) -> PutOutcome:
        outcome = super().put(block)
        if outcome is PutOutcome.REFUSED and block.parent_key in self._entries:
            self._entries[block.parent_key].successors += 1
        return outcome


class EvictsLeased(MemoryStore):
    """Takes blocks from under a reader."""

    def _evictable(self, key: bytes) -> bool:
        return self._entries[key].successors == 0


class CountsOneLease(MemoryStore):
    """A flag instead of a count: the first release frees the block for all."""

    def _release(self, entries: Any) -> None:
        super()._release(entries)
        for entry in entries:
            entry.leases = 0


class NeverReleases(MemoryStore):
    """What was leased once stays for ever."""

    def _release(self, entries: Any) -> None:
        pass


class InsistsOnKnownKeys(MemoryStore):
    """Raises for a key that was evicted meanwhile."""

    def used(self, chain: Sequence[bytes]) -> None:
        super().used([self._entries[key].block.key for key in chain])


class ReadableLease(MemoryLease[KVBlock]):
    """Still hands out its blocks after release, and releases as often as it is told."""

    def release(self) -> None:
        self._release(self._entries)


class LeasesStayOpen(MemoryStore):
    """Makes such leases."""

    def lease(self, chunks: Sequence[Chunk]) -> MemoryLease[KVBlock]:
        lease = super().lease(chunks)
        return ReadableLease(lease._entries, lease.blocks, release=self._release)


class ClearsHalf(MemoryStore):
    """Forgets the blocks but not their bytes."""

    def clear(self, tenant: str | None = None) -> None:
        held = self._own.bytes
        super().clear(tenant)
        self._own.bytes = held


class ClearRevokes(MemoryStore):
    """Takes the blocks from leases that are out."""

    def lease(self, chunks: Sequence[Chunk]) -> MemoryLease[KVBlock]:
        lease = super().lease(chunks)
        self.__dict__.setdefault("out", []).append(lease)
        return lease

    def clear(self, tenant: str | None = None) -> None:
        super().clear(tenant)
        for lease in self.__dict__.get("out", []):
            lease.release()


class CountsLeasesByKey(MemoryStore):
    """A lease from before a clear releases whatever has the same key now."""

    def _release(self, entries: Any) -> None:
        super()._release([self._entries.get(entry.block.key, entry) for entry in entries])


class CountsHitsOnly(MemoryStore):
    """Does not say what was asked for in vain."""

    def stats(self, tenant: str | None = None) -> StoreStats:
        return replace(super().stats(tenant), misses=0)


class StopsAtAGap(MemoryStore):
    """Looks for content as if it were a prefix."""

    def lease_content(self, chunks: Sequence[Chunk], *, after: int) -> Any:
        lease = super().lease_content(chunks, after=after)
        blocks = list(lease.blocks)
        for index in range(1, len(blocks)):
            if blocks[index - 1] is None:
                blocks[index] = None
        lease._blocks = blocks
        return lease


class TrustsContentKeys(MemoryStore):
    """Does not compare the tokens of what it finds by content."""

    def lease_content(self, chunks: Sequence[Chunk], *, after: int) -> Any:
        same = {chunk.content_key: self._contents.of(chunk.content_key) for chunk in chunks}
        trusting = [
            c._replace(tokens=self._entries[same[c.content_key][0]].block.tokens) if same[c.content_key] else c
            for c in chunks
        ]
        return super().lease_content(trusting, after=after)


class TakesTheNewest(MemoryStore):
    """Does not look at contexts."""

    def put(self, block: KVBlock) -> PutOutcome:
        return super().put(replace(block, context=b""))


class MovesWithoutSayingSo(MemoryStore):
    """Hands out a variant where an exact block was asked for."""

    def lease(self, chunks: Sequence[Chunk]) -> Any:
        exact = super().lease(chunks)
        return exact if exact.blocks else super().lease_content(chunks, after=len(chunks) - 1)


class KeepsEveryVariant(MemoryStore):
    """Counts no variants."""

    def put(self, block: KVBlock) -> PutOutcome:
        return super().put(replace(block, approx_depth=0))


class HoldsNoContent(MemoryStore):
    """Its content leases protect nothing."""

    def lease_content(self, chunks: Sequence[Chunk], *, after: int) -> Any:
        lease = super().lease_content(chunks, after=after)
        self._release(lease._entries)
        return lease


class RemembersWhatIsGone(MemoryStore):
    """Finds by content what was evicted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gone: dict[bytes, Any] = {}

    def put(self, block: KVBlock) -> PutOutcome:
        outcome = super().put(block)
        if outcome is PutOutcome.STORED:
            self.gone[block.content_key] = block
        return outcome

    def lease_content(self, chunks: Sequence[Chunk], *, after: int) -> Any:
        lease = super().lease_content(chunks, after=after)
        lease._blocks = [self.gone.get(chunk.content_key) for chunk in chunks[after:]]
        return lease


class WithoutLock(MemoryStore):
    """Looks, then acts, and lets others in between."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = NoLock()  # type: ignore[assignment]

    def _evict_for(self, block: KVBlock, share: Any) -> bool:
        enough = super()._evict_for(block, share)
        time.sleep(1e-6)
        return enough


class NoLock:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


BROKEN_STORES: list[tuple[type, str]] = [
    (StopsAtAGap, "test_content_is_found_wherever_it_stands"),
    (TrustsContentKeys, "test_other_tokens_under_the_same_content_key_are_a_miss"),
    (TakesTheNewest, "test_the_variant_with_most_of_the_same_context_is_chosen"),
    (MovesWithoutSayingSo, "test_variants_are_moved_but_never_exact"),
    (KeepsEveryVariant, "test_the_same_content_is_kept_only_a_few_times"),
    (HoldsNoContent, "test_content_leases_hold_their_blocks"),
    (RemembersWhatIsGone, "test_what_is_gone_is_not_found_by_content"),
    (WithoutStats, "test_is_a_chunk_store"),
    (ChangesBlocks, "test_what_was_put_is_found"),
    (RaisesOnAMiss, "test_nothing_is_found_in_an_empty_store"),
    (AllOrNothing, "test_a_shorter_or_longer_prompt_shares_its_beginning"),
    (SkipsGaps, "test_a_gap_ends_the_run"),
    (IgnoresTokens, "test_other_tokens_under_the_same_key_are_a_miss"),
    (StoresAgain, "test_the_same_block_twice_is_present"),
    (KeepsOrphans, "test_an_orphan_is_refused"),
    (EvictsForNothing, "test_a_block_larger_than_the_store_is_refused"),
    (HasNoLimit, "test_a_block_larger_than_the_store_is_refused"),
    (HasNoLimit, "test_a_store_without_capacity_keeps_nothing"),
    (HasNoLimit, "test_the_byte_budget_is_never_exceeded"),
    (OffByOneByte, "test_a_block_larger_than_the_store_is_refused"),
    (OffByOneByte, "test_the_byte_budget_is_never_exceeded"),
    (HasNoChunkLimit, "test_the_chunk_limit_is_never_exceeded"),
    (NeverEvicts, "test_the_byte_budget_is_never_exceeded"),
    (EvictsParents, "test_successors_are_evicted_before_what_they_follow"),
    (EvictsParents, "test_making_room_never_evicts_the_parent"),
    (ForgetsRefusal, "test_making_room_never_evicts_the_parent"),
    (EvictsLeased, "test_a_leased_block_is_not_evicted"),
    (EvictsLeased, "test_a_store_full_of_leased_blocks_refuses"),
    (CountsOneLease, "test_one_of_two_leases_protects"),
    (NeverReleases, "test_a_leased_block_is_not_evicted"),
    (NeverReleases, "test_leased_counts_back_to_zero"),
    (InsistsOnKnownKeys, "test_used_with_unknown_keys_is_harmless"),
    (LeasesStayOpen, "test_a_released_lease_is_empty_handed"),
    (LeasesStayOpen, "test_releasing_twice_is_harmless"),
    (ClearsHalf, "test_clear_forgets"),
    (ClearRevokes, "test_clear_leaves_leases_readable"),
    (CountsLeasesByKey, "test_a_lease_from_before_clear_frees_nothing_after_it"),
    (CountsHitsOnly, "test_the_counters_add_up"),
    (WithoutLock, "test_many_threads"),
]


# Chunkers: a fixed or content chunker with one mistake each.


class Wrapped:
    """A content chunker to make mistakes with."""

    min_tokens = 12
    max_tokens = 64
    spec = "mine:1"

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        return ContentChunker(32).cut(tokens, boundaries)


class WithoutSpec:
    """Not a chunker: a member of the Protocol is missing."""

    min_tokens = 12
    cut = Wrapped.cut


class LooksAhead(Wrapped):
    """Moves a cut by what stands behind it."""

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        return [
            end for end in super().cut(tokens, boundaries)
            if end in boundaries or end + 1 >= len(tokens) or tokens[end] % 4
        ]  # fmt: skip


class SharesTheRest(Wrapped):
    """Chunks of equal length: where the cuts are depends on the whole text."""

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        ContentChunker(32).cut(tokens, boundaries)
        parts = max(1, len(tokens) // 32)
        even = [len(tokens) * (i + 1) // parts for i in range(parts)] if len(tokens) else []
        return sorted({*even, *(b for b in boundaries if b)})


class SeesLaterBoundaries(Wrapped):
    """Leaves the cut away that comes shortly before a caller's boundary."""

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        near = {b - distance for b in boundaries for distance in range(1, 12)} - set(boundaries)
        return [end for end in super().cut(tokens, boundaries) if end not in near]


class IgnoresBoundaries(Wrapped):
    """Cuts where it likes."""

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        super().cut(tokens, boundaries)
        return super().cut(tokens)


class StartsWithZero(Wrapped):
    """Reports an empty first chunk."""

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        return [0, *super().cut(tokens, boundaries)]


class ReportsTheTail(Wrapped):
    """Reports the incomplete chunk as if its end were a cut."""

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        return sorted({*super().cut(tokens, boundaries), len(tokens)} - {0})


class PassesTheEnd(Wrapped):
    """Rounds the last end up."""

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        ends = super().cut(tokens, boundaries)
        return [*ends, (ends[-1] if ends else 0) + 64]


class ShorterThanItSays(Wrapped):
    min_tokens = 30


class LongerThanItSays(Wrapped):
    max_tokens = 40


class HasNoShortest(Wrapped):
    min_tokens = 0


class RemembersCalls(Wrapped):
    """Every call cuts a little later than the one before."""

    def __init__(self) -> None:
        self.calls = 0

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        self.calls += 1
        return FixedChunker(12 + self.calls % 7).cut(tokens, boundaries)


class NamesItself(Wrapped):
    """A name that differs from object to object (as ``repr`` often does)."""

    def __init__(self) -> None:
        self.spec = f"mine:{id(object())}:{time.perf_counter_ns()}"


class SaltedCuts(Wrapped):
    """One name, but every object cuts differently: as with Python's own hash in two processes."""

    made = 0

    def __init__(self) -> None:
        SaltedCuts.made += 1
        self.size = 12 + SaltedCuts.made % 7

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        return FixedChunker(self.size).cut(tokens, boundaries)


class WritesToTheText(Wrapped):
    """Works in place."""

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        ends = super().cut(tokens, boundaries)
        tokens %= 1024
        return ends


class ForgivesBoundaries(Wrapped):
    """Silently drops a boundary outside the text."""

    def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
        return super().cut(tokens, [b for b in boundaries if 0 <= b <= len(tokens)])


BROKEN_CHUNKERS: list[tuple[type, str]] = [
    (WithoutSpec, "test_is_a_chunker"),
    (HasNoShortest, "test_is_a_chunker"),
    (LooksAhead, "test_equal_prefixes_have_equal_cuts"),
    (SharesTheRest, "test_equal_prefixes_have_equal_cuts"),
    (SeesLaterBoundaries, "test_equal_prefixes_have_equal_cuts"),
    (ReportsTheTail, "test_equal_prefixes_have_equal_cuts"),
    (IgnoresBoundaries, "test_every_boundary_is_an_end"),
    (StartsWithZero, "test_ends_ascend_within_the_text"),
    (PassesTheEnd, "test_ends_ascend_within_the_text"),
    (ShorterThanItSays, "test_chunks_have_at_least_min_tokens"),
    (LongerThanItSays, "test_chunks_have_at_most_max_tokens"),
    (RemembersCalls, "test_calls_leave_no_state"),
    (WritesToTheText, "test_calls_leave_no_state"),
    (NamesItself, "test_equal_spec_means_equal_cuts"),
    (SaltedCuts, "test_equal_spec_means_equal_cuts"),
    (ForgivesBoundaries, "test_a_boundary_outside_the_text_is_refused"),
]


# Policies: the default policy with one mistake each.


class WithoutRemoved:
    """Not a policy: a method of the Protocol is missing."""

    def __init__(self) -> None:
        inner = LeafFirstLRU()
        self.inserted, self.found, self.used, self.victim = inner.inserted, inner.found, inner.used, inner.victim
        self.admits = inner.admits


class IgnoresEvictable(LeafFirstLRU):
    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        return super().victim(lambda key: True)


class AsksOnce(LeafFirstLRU):
    """Gives up if the first choice may not go."""

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        first = super().victim(lambda key: True)
        return first if first is not None and evictable(first) else None


class RaisesWhenEmpty(LeafFirstLRU):
    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        return next(key for key in self._order if evictable(key))


class PopsItsVictim(LeafFirstLRU):
    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        key = super().victim(evictable)
        if key is not None:
            self.removed(key)
        return key


class NeverForgets(LeafFirstLRU):
    def removed(self, key: bytes) -> None:
        pass


class RemembersTheGone(LeafFirstLRU):
    """A key that was removed once is never found again."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[bytes] = set()

    def removed(self, key: bytes) -> None:
        super().removed(key)
        self.gone.add(key)

    def inserted(
        self, key: bytes, *, parent: bytes | None = None, nbytes: int = 1, content: bytes | None = None
    ) -> None:
        if key not in self.gone:
            super().inserted(key)


class UsedInserts(LeafFirstLRU):
    def used(self, chain: Sequence[bytes]) -> None:
        for key in reversed(chain):
            self._order[key] = None
            self._order.move_to_end(key)


class UsedInsists(LeafFirstLRU):
    def used(self, chain: Sequence[bytes]) -> None:
        for key in reversed(chain):
            self._order.move_to_end(key)


class OffersParentsOnly(LeafFirstLRU):
    """Loses sight of a key that nothing stands behind."""

    def __init__(self) -> None:
        super().__init__()
        self.parents: set[bytes | None] = set()

    def inserted(
        self, key: bytes, *, parent: bytes | None = None, nbytes: int = 1, content: bytes | None = None
    ) -> None:
        super().inserted(key)
        self.parents.add(parent)

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        return super().victim(lambda key: key in self.parents and evictable(key))


class StoresWhatItAdmits(LeafFirstLRU):
    def admits(
        self, key: bytes, *, parent: bytes | None, nbytes: int, victim: bytes, content: bytes | None = None
    ) -> bool:
        self.inserted(key)
        return True


class DrawsLots(LeafFirstLRU):
    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        return max((key for key in self._order if evictable(key)), key=lambda key: random.random(), default=None)


BROKEN_POLICIES: list[tuple[type, str]] = [
    (OffersParentsOnly, "test_the_end_of_a_prompt_is_offered"),
    (DrawsLots, "test_the_same_calls_give_the_same_victims"),
    (StoresWhatItAdmits, "test_admitting_changes_nothing"),
    (WithoutRemoved, "test_is_an_eviction_policy"),
    (RaisesWhenEmpty, "test_an_empty_policy_has_no_victim"),
    (RaisesWhenEmpty, "test_nothing_evictable_means_no_victim"),
    (IgnoresEvictable, "test_nothing_evictable_means_no_victim"),
    (IgnoresEvictable, "test_the_victim_is_evictable"),
    (AsksOnce, "test_the_victim_is_evictable"),
    (PopsItsVictim, "test_asking_removes_nothing"),
    (NeverForgets, "test_a_removed_key_is_never_the_victim"),
    (NeverForgets, "test_only_stored_keys_are_offered"),
    (RemembersTheGone, "test_a_key_may_come_back"),
    (UsedInserts, "test_used_with_unknown_keys_is_harmless"),
    (UsedInserts, "test_only_stored_keys_are_offered"),
    (UsedInsists, "test_used_with_unknown_keys_is_harmless"),
    (NeverForgets, "test_a_long_random_life"),
    (AsksOnce, "test_a_long_random_life"),
]


@pytest.mark.parametrize(("make", "rule"), BROKEN_STORES, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_store_is_found(make: type, rule: str) -> None:
    with pytest.raises((AssertionError, KeyError, StoreError)):
        getattr(store_contract(make), rule)()


@pytest.mark.parametrize(("make", "rule"), BROKEN_CHUNKERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_chunker_is_found(make: type, rule: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        getattr(chunker_contract(make), rule)()


@pytest.mark.parametrize(("make", "rule"), BROKEN_POLICIES, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_policy_is_found(make: type, rule: str) -> None:
    with pytest.raises((AssertionError, KeyError, StopIteration)):
        getattr(policy_contract(make), rule)()


@pytest.mark.parametrize(
    ("contract", "broken"),
    [
        (ChunkStoreContract, BROKEN_STORES),
        (ChunkerContract, BROKEN_CHUNKERS),
        (EvictionPolicyContract, BROKEN_POLICIES),
    ],
)
def test_no_rule_is_empty(contract: type, broken: list[tuple[type, str]]) -> None:
    """Each rule has an extension above that breaks it, so none passes whatever it is given."""
    assert {rule for _, rule in broken} == set(rules(contract))


def test_what_is_sound_passes() -> None:
    """The mistakes above are what is found, not the way they are built in."""
    assert broken_rules(store_contract(MemoryStore)) == set()
    assert broken_rules(chunker_contract(Wrapped)) == set()
    assert broken_rules(policy_contract(LeafFirstLRU)) == set()


def test_other_orders_pass_too() -> None:
    """The contracts ask for no particular order: the youngest or the highest key first is as good."""

    class YoungestFirst(LeafFirstLRU):
        def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
            return next((key for key in reversed(self._order) if evictable(key)), None)

    class HighestFirst(LeafFirstLRU):
        def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
            return max((key for key in self._order if evictable(key)), default=None)

    for policy in (YoungestFirst, HighestFirst):
        assert broken_rules(policy_contract(policy)) == set()
        make = lambda capacity, policy=policy, **limits: MemoryStore(capacity, policy=policy(), **limits)  # noqa: E731
        assert broken_rules(store_contract(make)) == set()


def test_the_hooks_must_be_overridden() -> None:
    for contract in (ChunkStoreContract, ChunkerContract, EvictionPolicyContract):
        assert broken_rules(contract()) == set(rules(contract))


def test_the_thread_rule_does_not_hang() -> None:
    """A thread that fails must fail the rule, not leave the others waiting."""
    before = threading.active_count()
    with pytest.raises(AssertionError, match="a thread failed: KeyError"):
        store_contract(RaisesOnAMiss).test_many_threads()
    assert threading.active_count() == before


def test_a_config_error_of_the_chunker_is_not_hidden() -> None:
    """Only the rule about bad boundaries expects an error; anywhere else it is a failure."""

    class RefusesEverything(Wrapped):
        def cut(self, tokens: TokenArray, boundaries: Sequence[int] = ()) -> list[int]:
            raise ConfigError("no")

    assert "test_ends_ascend_within_the_text" in broken_rules(chunker_contract(RefusesEverything))
