"""What all orders share: the contract, leaves first without searching, and a store that holds its budget under each."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.extend import EvictionPolicy
from kvboost.store import (
    AdaptiveReplacement,
    GreedyDualSizeFrequency,
    LeafFirstLRU,
    LeastExpected,
    MemoryStore,
    SmallMainGhostFIFO,
    TieredStore,
)
from kvboost.testing import ChunkStoreContract, EvictionPolicyContract
from kvboost.testing.store import prompt
from kvboost.types import KVBlock, PutOutcome

ALL = (LeafFirstLRU, AdaptiveReplacement, SmallMainGhostFIFO, GreedyDualSizeFrequency, LeastExpected)
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


class TestLeastExpected(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return LeastExpected()


class TestStoreWithARC(ChunkStoreContract):
    def make_store(self, *, capacity_bytes: int, max_chunks: int | None = None) -> MemoryStore:
        return MemoryStore(capacity_bytes, max_chunks=max_chunks, policy=AdaptiveReplacement())


class TestStoreWithS3FIFO(ChunkStoreContract):
    def make_store(self, *, capacity_bytes: int, max_chunks: int | None = None) -> MemoryStore:
        return MemoryStore(capacity_bytes, max_chunks=max_chunks, policy=SmallMainGhostFIFO())


def test_the_default_of_the_memory_store() -> None:
    assert isinstance(MemoryStore(0)._policy, LeastExpected)


@every_policy
@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=40),
    capacity=st.integers(1, 12),
)
def test_a_store_stays_whole_under_every_policy(
    make: Callable[[], EvictionPolicy], requests: list[list[str]], capacity: int
) -> None:
    """Whatever is asked: within the budget, every block reachable, a refusal only if the prompt itself is too long."""
    store = MemoryStore(capacity, policy=make())
    for words in requests:
        chunks = prompt(*words)
        with store.lease(chunks) as lease:
            for chunk in chunks[len(lease.blocks) :]:
                outcome = store.put(
                    KVBlock(
                        key=chunk.prefix_key,
                        parent_key=chunk.parent_key,
                        content_key=chunk.content_key,
                        tokens=chunk.tokens,
                        tensors=(),
                        nbytes=1,
                        bitwise=True,
                    )
                )
                if outcome is PutOutcome.REFUSED:
                    assert len(chunks) > capacity or make is LeastExpected
                    break
        store.used([chunk.prefix_key for chunk in chunks])
        held = {key: entry.block for key, entry in store._entries.items()}
        assert len(held) <= capacity
        assert all(block.parent_key is None or block.parent_key in held for block in held.values())


@every_policy
def test_finding_a_victim_asks_for_few_keys(make: Callable[[], EvictionPolicy]) -> None:
    """With 300 prompts of 20 chunks each, of which only the ends may go, no policy searches for one that may."""
    policy, chooser = make(), random.Random(3)
    children: dict[bytes, int] = {}
    parents: dict[bytes, bytes | None] = {}
    asked = evicted = 0

    def evictable(key: bytes) -> bool:
        nonlocal asked
        asked += 1
        return children[key] == 0

    for number in range(900):
        session = number if chooser.random() < 0.7 else chooser.randrange(900)
        chain = [b"%d/%d" % (session, place) for place in range(20)]
        found = [key for key in chain if key in children]  # a chain is stored from its beginning on
        policy.found(found)
        for parent, key in zip([None, *chain], chain, strict=False):
            if key not in children:
                policy.inserted(key, parent=parent)
                children[key], parents[key] = 0, parent
                if parent is not None:
                    children[parent] += 1
        policy.used(chain)
        while len(children) > 6000:
            victim = policy.victim(evictable)
            assert victim is not None
            policy.removed(victim)
            evicted += 1
            parent = parents.pop(victim)
            del children[victim]
            if parent is not None:
                children[parent] -= 1
    assert evicted > 3000
    assert asked < 10 * evicted


class AdmitsNothing(LeafFirstLRU):
    def admits(
        self, key: bytes, *, parent: bytes | None, nbytes: int, victim: bytes, content: bytes | None = None
    ) -> bool:
        return False


def lone_block(word: str) -> KVBlock:
    chunk = prompt(word)[0]
    return KVBlock(
        key=chunk.prefix_key,
        parent_key=None,
        content_key=chunk.content_key,
        tokens=chunk.tokens,
        tensors=(),
        nbytes=1,
        bitwise=True,
    )


def test_a_refused_block_takes_no_place_and_is_counted() -> None:
    store = MemoryStore(1, policy=AdmitsNothing())
    assert store.put(lone_block("a")) is PutOutcome.STORED  # there was room: nobody is asked
    assert store.put(lone_block("b")) is PutOutcome.REFUSED
    assert (store.stats().refused, store.stats().evictions) == (1, 0)
    assert len(store.lease(prompt("a")).blocks) == 1


class HearsContent(LeafFirstLRU):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, bytes | None]] = []

    def inserted(
        self, key: bytes, *, parent: bytes | None = None, nbytes: int = 1, content: bytes | None = None
    ) -> None:
        self.heard.append(("inserted", content))
        super().inserted(key, parent=parent, nbytes=nbytes)

    def admits(
        self, key: bytes, *, parent: bytes | None, nbytes: int, victim: bytes, content: bytes | None = None
    ) -> bool:
        self.heard.append(("admits", content))
        return True


def test_the_store_tells_what_text_a_block_holds() -> None:
    policy = HearsContent()
    store = MemoryStore(1, policy=policy)
    first, second = lone_block("a"), lone_block("b")
    store.put(first)
    store.put(second)
    new = second.content_key
    assert policy.heard == [("inserted", first.content_key), ("admits", new), ("inserted", new)]


def test_with_tiers_below_nothing_is_refused() -> None:
    """What a tier hands up must pass through the memory, and what is new goes down from it."""
    memory = MemoryStore(1, policy=AdmitsNothing())
    store = TieredStore(memory, [])
    assert [store.put(lone_block(word)) for word in "ab"] == [PutOutcome.STORED] * 2
    store.close()
