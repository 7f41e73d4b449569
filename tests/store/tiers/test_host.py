"""The host tier on the CPU: the contract, leaves that come down before their parents, copies that fail."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.extend import Tier
from kvboost.store import HostTier, LoadRules, MemoryStore, TieredStore
from kvboost.store.tiers import host
from kvboost.streams import BlockingStreams, Copies, Event
from kvboost.types import KVBlock, Namespace, PutOutcome
from tests.contracts import TierContract
from tests.contracts.blocks import assert_same, block_of
from tests.contracts.content import prompt
from tests.contracts.store import held_keys

_SIZE = 1000
_PAGE = 50


class TestHostTier(TierContract):
    """Every rule of a tier."""

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        return HostTier(capacity_bytes, page_bytes=10)


def test_leaves_may_come_before_what_they_follow_and_go_before_it() -> None:
    chunks = prompt(*"abc")
    tier = HostTier(3 * _SIZE, page_bytes=_PAGE)
    for chunk in reversed(chunks):
        assert tier.store(block_of(chunk, _SIZE)) is PutOutcome.STORED
    for gone, word in enumerate("xyz", 1):
        tier.store(block_of(prompt(word)[0], _SIZE))
        there = tier.contains([chunk.prefix_key for chunk in chunks])
        assert there == [True] * (3 - gone) + [False] * gone


class _Streams(BlockingStreams):
    """Does something before each copy, and counts what is allocated."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.before = before
        self.allocated: list[int] = []

    def copy(self, copies: Copies, *, after: Event | None) -> None:
        self.before()
        super().copy(copies, after=after)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        return super().host_memory(nbytes)


def test_room_is_given_back_if_a_copy_fails() -> None:
    first, second = prompt("a", "b")
    streams = _Streams(lambda: 1 / 0)
    tier = HostTier(_SIZE, page_bytes=_PAGE, streams=streams)
    for chunk in (first, second):
        with pytest.raises(ZeroDivisionError):
            tier.store(block_of(chunk, _SIZE))
    streams.before = lambda: None
    assert (tier.stats().bytes, tier.stats().chunks) == (0, 0)
    assert tier.store(block_of(first, _SIZE)) is PutOutcome.STORED
    assert tier.store(block_of(prompt("x")[0], _SIZE)) is PutOutcome.STORED  # no successor keeps the first one here


def test_what_is_being_copied_counts_and_is_not_seen() -> None:
    (chunk,) = prompt("a")
    copying, go_on = threading.Event(), threading.Event()
    tier = HostTier(_SIZE, page_bytes=_PAGE, streams=_Streams(lambda: (copying.set(), go_on.wait())))
    worker = threading.Thread(target=tier.store, args=[block_of(chunk, _SIZE)])
    worker.start()
    copying.wait()
    assert (tier.stats().bytes, tier.contains([chunk.prefix_key])) == (_SIZE, [False])
    assert tier.store(block_of(prompt("x")[0], _SIZE)) is PutOutcome.REFUSED
    assert tier.store(block_of(chunk, _SIZE)) is PutOutcome.REFUSED
    go_on.set()
    worker.join()
    assert tier.contains([chunk.prefix_key]) == [True]


def test_pages_are_allocated_once_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SLAB_BYTES", 4 * _PAGE)
    streams = _Streams()
    tier = HostTier(20 * _PAGE, page_bytes=_PAGE, streams=streams)
    generator = random.Random(0)
    for number in range(300):  # of all sizes, evicting each other
        (chunk,) = prompt(str(number))
        block = block_of(chunk, generator.randint(1, 5 * _PAGE))
        assert tier.store(block) is PutOutcome.STORED
        assert_same(next(iter(tier.load([chunk.prefix_key]))), block)
    assert streams.allocated == [4 * _PAGE] * 5
    assert tier.stats().evictions > 100


def test_whole_pages_are_taken_from_the_capacity() -> None:
    tier = HostTier(4 * _PAGE, page_bytes=_PAGE)
    for word in "abcdef":
        assert tier.store(block_of(prompt(word)[0], _PAGE + 1)) is PutOutcome.STORED  # two pages
        assert tier.stats().chunks <= 2
    assert tier.stats().chunks == 2


def test_a_system_that_pins_no_more_limits_the_tier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "_SLAB_BYTES", 2 * _PAGE)

    class Short(_Streams):
        def host_memory(self, nbytes: int) -> torch.Tensor:
            if len(self.allocated) == 2:
                raise RuntimeError("CUDA error: out of memory")
            return super().host_memory(nbytes)

    tier = HostTier(100 * _PAGE, page_bytes=_PAGE, streams=Short())
    for word in "abcdefgh":
        block = block_of(prompt(word)[0], _PAGE)
        assert tier.store(block) is PutOutcome.STORED
        assert_same(next(iter(tier.load([block.key]))), block)
    assert tier.stats().chunks == 4
    assert [record.message for record in caplog.records].count(caplog.messages[0]) == 1
    assert "stays at 200 bytes" in caplog.messages[0]
    assert tier.store(block_of(prompt("z")[0], 5 * _PAGE)) is PutOutcome.REFUSED


_STEPS = st.tuples(
    st.sampled_from(["store", "remove", "used"]), st.text("ab", min_size=1, max_size=4), st.integers(1, 900)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_STEPS, max_size=60))
def test_the_ledger_is_the_sum_of_what_is_there(steps: list[tuple[str, str, int]]) -> None:
    tier, sizes = HostTier(2000, page_bytes=7), dict[bytes, int]()
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
    assert tier._contents._keys == {}


def test_below_a_memory_store_it_takes_what_is_evicted_and_gives_it_back_where_it_belongs() -> None:
    chunks = prompt(*"abc")
    tier = HostTier(10 * _SIZE, page_bytes=_PAGE)
    fetched: list[bytes] = []

    def to_memory(blocks: Iterator[KVBlock | None]) -> Iterator[KVBlock | None]:
        for block in blocks:
            assert block is not None
            fetched.append(block.key)
            yield replace(block, tensors=tuple(tensor.clone() for tensor in block.tensors))

    store = TieredStore(MemoryStore(3 * _SIZE), [tier], rules=LoadRules(to_memory=to_memory))
    for chunk in (*chunks, *prompt(*"xyz")):
        store.put(block_of(chunk, _SIZE))
    store.flush()
    assert held_keys(store, chunks) == fetched == [chunk.prefix_key for chunk in chunks]
    with store.lease(chunks) as lease:
        for block, chunk in zip(lease.blocks, chunks, strict=True):
            assert_same(block, block_of(chunk, _SIZE))
    store.close()
