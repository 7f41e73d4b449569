"""The host tier on the CPU: the contract, leaves that come down before their parents, copies that fail."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.extend import Tier
from kvboost.store import HostTier, LoadRules, MemoryStore, TieredStore
from kvboost.testing import TierContract
from kvboost.testing.blocks import assert_same, block_of
from kvboost.testing.content import prompt
from kvboost.testing.store import held_keys
from kvboost.types import KVBlock, Namespace, PutOutcome

_SIZE = 1000


class TestHostTier(TierContract):
    """Every rule of a tier."""

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        return HostTier(capacity_bytes, pinned=False)


def test_leaves_may_come_before_what_they_follow_and_go_before_it() -> None:
    chunks = prompt(*"abc")
    tier = HostTier(3 * _SIZE, pinned=False)
    for chunk in reversed(chunks):
        assert tier.store(block_of(chunk, _SIZE)) is PutOutcome.STORED
    for gone, word in enumerate("xyz", 1):
        tier.store(block_of(prompt(word)[0], _SIZE))
        there = tier.contains([chunk.prefix_key for chunk in chunks])
        assert there == [True] * (3 - gone) + [False] * gone


def test_room_is_given_back_if_a_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = prompt("a", "b")
    tier = HostTier(_SIZE, pinned=False)
    monkeypatch.setattr(HostTier, "_on_host", lambda self, tensor: 1 / 0)
    for chunk in (first, second):
        with pytest.raises(ZeroDivisionError):
            tier.store(block_of(chunk, _SIZE))
    monkeypatch.undo()
    assert (tier.stats().bytes, tier.stats().chunks) == (0, 0)
    assert tier.store(block_of(first, _SIZE)) is PutOutcome.STORED
    assert tier.store(block_of(prompt("x")[0], _SIZE)) is PutOutcome.STORED  # no successor keeps the first one here


def test_what_is_being_copied_counts_and_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    (chunk,) = prompt("a")
    tier = HostTier(_SIZE, pinned=False)
    copying, go_on = threading.Event(), threading.Event()

    def slowly(self: HostTier, tensor: torch.Tensor) -> torch.Tensor:
        copying.set()
        go_on.wait()
        return tensor

    monkeypatch.setattr(HostTier, "_on_host", slowly)
    worker = threading.Thread(target=tier.store, args=[block_of(chunk, _SIZE)])
    worker.start()
    copying.wait()
    assert (tier.stats().bytes, tier.contains([chunk.prefix_key])) == (_SIZE, [False])
    assert tier.store(block_of(prompt("x")[0], _SIZE)) is PutOutcome.REFUSED
    assert tier.store(block_of(chunk, _SIZE)) is PutOutcome.REFUSED
    go_on.set()
    worker.join()
    assert tier.contains([chunk.prefix_key]) == [True]


_STEPS = st.tuples(
    st.sampled_from(["store", "remove", "used"]), st.text("ab", min_size=1, max_size=4), st.integers(1, 900)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_STEPS, max_size=60))
def test_the_ledger_is_the_sum_of_what_is_there(steps: list[tuple[str, str, int]]) -> None:
    tier, sizes = HostTier(2000, pinned=False), dict[bytes, int]()
    for what, words, size in steps:
        chunk = prompt(*words)[-1]
        if what == "store" and tier.store(block_of(chunk, size)) is PutOutcome.STORED:
            sizes[chunk.prefix_key] = size
        elif what == "remove":
            tier.remove([chunk.prefix_key])
        elif what == "used":
            tier.used([chunk.prefix_key for chunk in prompt(*words)])
        there = [key for key, found in zip(sizes, tier.contains(list(sizes)), strict=True) if found]
        assert tier.stats().bytes == sum(sizes[key] for key in there) <= 2000
        assert tier.stats().chunks == len(there)
    tier.clear()
    assert not tier._successors
    assert len(tier._contents) == 0


def test_below_a_memory_store_it_takes_what_is_evicted_and_gives_it_back_where_it_belongs() -> None:
    chunks = prompt(*"abc")
    tier = HostTier(10 * _SIZE, pinned=False)
    fetched: list[bytes] = []

    def to_memory(block: KVBlock) -> KVBlock:
        fetched.append(block.key)
        return replace(block, tensors=tuple(tensor.clone() for tensor in block.tensors))

    store = TieredStore(MemoryStore(3 * _SIZE), [tier], rules=LoadRules(to_memory=to_memory))
    for chunk in (*chunks, *prompt(*"xyz")):
        store.put(block_of(chunk, _SIZE))
    store.flush()
    assert held_keys(store, chunks) == fetched == [chunk.prefix_key for chunk in chunks]
    with store.lease(chunks) as lease:
        for block, chunk in zip(lease.blocks, chunks, strict=True):
            assert_same(block, block_of(chunk, _SIZE))
    store.close()
