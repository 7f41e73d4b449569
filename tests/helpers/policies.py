"""Workloads that every eviction policy must stand: those of the wheel and those it is compared with."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from kvboost.extend import EvictionPolicy
from kvboost.store import MemoryStore
from kvboost.types import KVBlock, PutOutcome
from tests.contracts.store import prompt

REQUESTS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=40)
CAPACITIES = st.integers(1, 12)


def keep_store_whole(policy: EvictionPolicy, requests: list[list[str]], capacity: int, *, refuses: bool) -> None:
    """Whatever is asked: within the budget, every block reachable, a refusal only if the prompt is too long."""
    store = MemoryStore(capacity, policy=policy)
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
                    assert len(chunks) > capacity or refuses
                    break
        store.used([chunk.prefix_key for chunk in chunks])
        held = {key: entry.block for key, entry in store._entries.items()}
        assert len(held) <= capacity
        assert all(block.parent_key is None or block.parent_key in held for block in held.values())


def find_victims_without_searching(policy: EvictionPolicy) -> None:
    """With 300 prompts of 20 chunks each, of which only the ends may go, no policy searches for one that may."""
    chooser = random.Random(3)
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
