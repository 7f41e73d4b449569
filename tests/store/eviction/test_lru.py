"""The default order: least recently used first, and the end of a prompt before its beginning."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.extend import EvictionPolicy
from kvboost.store import LeafFirstLRU
from tests.contracts import EvictionPolicyContract

A, B, C, D = (bytes([i]) * 32 for i in range(4))


class TestLeafFirstLRUContract(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return LeafFirstLRU()


def drain(policy: LeafFirstLRU) -> list[bytes]:
    """Every key in the order of eviction."""
    order = []
    while (key := policy.victim(lambda key: True)) is not None:
        policy.removed(key)
        order.append(key)
    return order


def filled(*keys: bytes) -> LeafFirstLRU:
    policy = LeafFirstLRU()
    for key in keys:
        policy.inserted(key)
    return policy


def test_unused_keys_go_in_the_order_of_insertion() -> None:
    assert drain(filled(A, B, C)) == [A, B, C]


def test_a_used_key_goes_last() -> None:
    policy = filled(A, B, C)
    policy.used([A])
    assert drain(policy) == [B, C, A]


def test_within_one_prompt_the_last_chunk_goes_first() -> None:
    policy = filled(A, B, C)
    policy.used([A, B, C])
    assert drain(policy) == [C, B, A]


def test_a_shared_beginning_outlives_both_ends() -> None:
    policy = filled(A, B, C, D)
    policy.used([A, B])
    policy.used([A, C, D])
    assert drain(policy) == [B, D, C, A]


def test_the_oldest_key_that_may_go_is_chosen() -> None:
    policy = filled(A, B, C)
    assert policy.victim(lambda key: key != A) == B
    assert policy.victim(lambda key: True) == A


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4), min_size=1, max_size=8))
def test_the_first_choice_is_always_a_leaf(prompts: list[list[str]]) -> None:
    """So the store never searches: where every prompt was marked as used, nobody's parent goes first."""
    policy = LeafFirstLRU()
    known: set[bytes] = set()
    for words in prompts:
        chain = ["/".join(words[: i + 1]).encode() for i in range(len(words))]
        for key in chain:
            if key not in known:
                policy.inserted(key)
                known.add(key)
        policy.used(chain)
    while known:
        victim = policy.victim(lambda key: True)
        assert victim is not None
        assert not [key for key in known if key.startswith(victim + b"/")]
        policy.removed(victim)
        known.remove(victim)
