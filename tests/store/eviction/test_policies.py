"""What both orders share: the contract, leaves first without searching, and a store that holds its budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from kvboost.extend import EvictionPolicy
from kvboost.store import LeafFirstLRU, LeastExpected, MemoryStore, TieredStore
from kvboost.types import KVBlock, PutOutcome
from tests.contracts import EvictionPolicyContract
from tests.contracts.store import prompt
from tests.helpers.policies import CAPACITIES, REQUESTS, find_victims_without_searching, keep_store_whole

every_policy = pytest.mark.parametrize("make", [LeafFirstLRU, LeastExpected], ids=lambda make: make.__name__)


class TestLeastExpected(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return LeastExpected()


def test_the_default_of_the_memory_store() -> None:
    assert isinstance(MemoryStore(0)._policy, LeastExpected)


@every_policy
@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, capacity=CAPACITIES)
def test_a_store_stays_whole_under_every_policy(
    make: Callable[[], EvictionPolicy], requests: list[list[str]], capacity: int
) -> None:
    keep_store_whole(make(), requests, capacity, refuses=make is LeastExpected)


@every_policy
def test_finding_a_victim_asks_for_few_keys(make: Callable[[], EvictionPolicy]) -> None:
    find_victims_without_searching(make())


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
