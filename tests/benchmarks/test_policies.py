"""ARC, S3-FIFO and GDSF: the contract, a store that holds its budget, and what tells them apart from LRU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from benchmarks.store.policies import AdaptiveReplacement, GreedyDualSizeFrequency, SmallMainGhostFIFO
from kvboost.extend import EvictionPolicy
from kvboost.store import MemoryStore
from tests.contracts import ChunkStoreContract, EvictionPolicyContract
from tests.helpers.policies import CAPACITIES, REQUESTS, find_victims_without_searching, keep_store_whole

A, B, C, D, E = (bytes([i]) * 32 for i in range(5))
ALL = (AdaptiveReplacement, SmallMainGhostFIFO, GreedyDualSizeFrequency)
every_policy = pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)


class TestARC(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return AdaptiveReplacement()


class TestS3FIFO(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return SmallMainGhostFIFO()


class TestGDSF(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return GreedyDualSizeFrequency()


class TestStoreWithARC(ChunkStoreContract):
    def make_store(self, *, capacity_bytes: int, max_chunks: int | None = None) -> MemoryStore:
        return MemoryStore(capacity_bytes, max_chunks=max_chunks, policy=AdaptiveReplacement())


class TestStoreWithS3FIFO(ChunkStoreContract):
    def make_store(self, *, capacity_bytes: int, max_chunks: int | None = None) -> MemoryStore:
        return MemoryStore(capacity_bytes, max_chunks=max_chunks, policy=SmallMainGhostFIFO())


@every_policy
@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, capacity=CAPACITIES)
def test_a_store_stays_whole_under_every_policy(
    make: Callable[[], EvictionPolicy], requests: list[list[str]], capacity: int
) -> None:
    keep_store_whole(make(), requests, capacity, refuses=False)


@every_policy
def test_finding_a_victim_asks_for_few_keys(make: Callable[[], EvictionPolicy]) -> None:
    find_victims_without_searching(make())


def read(policy: EvictionPolicy, *keys: bytes, stored: set[bytes]) -> None:
    """One prompt without chains: what is stored is found, the rest is stored."""
    policy.found([key for key in keys if key in stored])
    for key in keys:
        if key not in stored:
            policy.inserted(key)
            stored.add(key)
    policy.used(keys)


def evict(policy: EvictionPolicy, stored: set[bytes]) -> bytes:
    victim = policy.victim(lambda key: True)
    assert victim is not None
    policy.removed(victim)
    stored.remove(victim)
    return victim


def test_arc_lets_go_what_came_once_before_what_came_twice() -> None:
    policy, stored = AdaptiveReplacement(), set[bytes]()
    for key in (A, A, B, C):
        read(policy, key, stored=stored)
    assert [evict(policy, stored) for _ in range(3)] == [B, C, A]


def test_used_is_not_a_second_use_for_arc() -> None:
    policy, stored = AdaptiveReplacement(), set[bytes]()
    read(policy, A, stored=stored)
    policy.used([A])
    read(policy, B, stored=stored)
    policy.found([B])
    assert evict(policy, stored) == A


def test_arc_learns_from_a_ghost_that_recent_blocks_deserve_more_room() -> None:
    """B was evicted and comes back: it is seen again now, and what came once may take the older A's place."""
    policy, stored = AdaptiveReplacement(), set[bytes]()
    for key in (A, A, B, C):
        read(policy, key, stored=stored)
    assert evict(policy, stored) == B
    read(policy, B, stored=stored)
    assert evict(policy, stored) == A  # C alone is within the share now; without the ghost it would go


def test_s3fifo_needs_two_uses_on_trial() -> None:
    policy, stored = SmallMainGhostFIFO(), set[bytes]()
    for key in (A, B, C, A, A, B):
        read(policy, key, stored=stored)
    assert [evict(policy, stored) for _ in range(2)] == [B, C]


def test_s3fifo_spares_what_it_dropped_too_early() -> None:
    policy, stored = SmallMainGhostFIFO(), set[bytes]()
    for key in (A, B, C, D):
        read(policy, key, stored=stored)
    assert evict(policy, stored) == A
    read(policy, A, stored=stored)  # to the main queue
    assert [evict(policy, stored) for _ in range(4)] == [B, C, D, A]


def test_gdsf_prefers_small_and_frequent_blocks() -> None:
    policy = GreedyDualSizeFrequency()
    policy.inserted(A, nbytes=10)
    policy.inserted(B, nbytes=1)
    policy.inserted(C, nbytes=10)
    policy.found([C])
    order = []
    for _ in range(3):
        victim = policy.victim(lambda key: True)
        assert victim is not None
        policy.removed(victim)
        order.append(victim)
    assert order == [A, C, B]


def test_gdsf_ages() -> None:
    """What was frequent long ago goes before what is new, once enough was evicted."""
    policy = GreedyDualSizeFrequency()
    policy.inserted(A)
    for _ in range(3):
        policy.found([A])
    evicted = []
    for number in range(20):
        policy.inserted(b"%d" % number)
        policy.found([b"%d" % number])
        victim = policy.victim(lambda key: True)
        assert victim is not None
        policy.removed(victim)
        evicted.append(victim)
    assert A in evicted


def test_only_what_was_evicted_becomes_a_ghost() -> None:
    """A store that is cleared starts anew: a key stored again afterwards is seen for the first time."""
    arc, fifo = AdaptiveReplacement(), SmallMainGhostFIFO()
    for policy in (arc, fifo):
        policy.inserted(A)
        policy.removed(A)
        policy.inserted(A)
    assert (arc._once.nodes, arc._again.nodes) == (1, 0)
    assert (fifo._trial.nodes, fifo._main.nodes) == (1, 0)
