"""Stores and tiers of several tenants beside each other: one memory, one directory, one server, nothing in common."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.servers import RedisServer
from kvboost.extend import ChunkStore, Tier
from kvboost.store import DiskTier, MemoryStore, RecordFormat, RedisTier, TieredStore
from kvboost.store.write_behind import WriteBehind
from kvboost.streams import BlockingStreams
from kvboost.types import KVBlock, Namespace, PutOutcome
from tests.contracts import ChunkStoreContract, TierContract
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt
from tests.contracts.store import held_keys
from tests.store.test_memory import put_all
from tests.store.test_tiered import ShelfTier

_LARGE = 10**8


class TestMemoryForAnotherTenant(ChunkStoreContract):
    def make_store(self, *, capacity_bytes: int, max_chunks: int | None = None) -> ChunkStore:
        store = MemoryStore(capacity_bytes, max_chunks=max_chunks)
        store.open("")  # the tenant of the suite's chunks
        return store


def _formats() -> tuple[RecordFormat, RecordFormat]:
    return RecordFormat(namespace(tenant="one")), RecordFormat(namespace("other model", tenant="other"))


class TestDiskForAnotherNamespace(TierContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> Iterator[None]:
        self.folder = tmp_path / "cache"
        self.opened: list[DiskTier] = []
        yield
        for tier in self.opened:
            tier.close()

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        first = DiskTier(self.folder, capacity_bytes=capacity_bytes, records=_formats()[0])
        self.opened.append(first)
        return first.for_namespace(RecordFormat(namespace))


class TestRedisForAnotherNamespace(TierContract):
    has_limit = counts = False

    @pytest.fixture(autouse=True)
    def _server(self, redis_at: RedisServer) -> Iterator[None]:
        self.url = redis_at.url
        self.opened: list[RedisTier] = []
        yield
        for tier in self.opened:
            tier.close()

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        first = RedisTier(self.url, records=_formats()[0], timeout_s=30.0)
        self.opened.append(first)
        return first.for_namespace(RecordFormat(namespace))


@pytest.fixture(params=["disk", "redis"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Two tenants' tiers over the same place, the second made beside the first."""
    one, other = _formats()
    first: DiskTier | RedisTier
    if request.param == "disk":
        first = DiskTier(tmp_path, capacity_bytes=_LARGE, records=one)
    else:
        url = request.getfixturevalue("redis_at").url
        first = RedisTier(url, records=one, timeout_s=30.0)
    yield first, first.for_namespace(other)
    first.close()


def test_neither_sees_purges_or_closes_the_other(pair: tuple[Any, Any]) -> None:
    first, second = pair
    chunks = prompt("a", "b")  # even under the same keys
    keys, contents = [c.prefix_key for c in chunks], [c.content_key for c in chunks]
    for chunk in chunks:
        assert first.store(block_of(chunk)) is PutOutcome.STORED
    assert list(second.contains(keys)) == [False, False]
    assert list(second.load(keys)) == [None, None]
    assert [list(found) for found in second.variants(contents)] == [[], []]
    assert second.store(block_of(chunks[0])) is PutOutcome.STORED
    second.used(keys)
    second.flush()
    assert (sum(first.contains(keys)), sum(second.contains(keys))) == (2, 1)
    second.purge(second._records.namespace.tenant)
    assert (sum(first.contains(keys)), sum(second.contains(keys))) == (2, 0)
    second.close()
    for found, chunk in zip(first.load(keys), chunks, strict=True):
        assert_same(found, block_of(chunk))


def test_tenants_share_the_memory_and_nothing_else() -> None:
    store = MemoryStore(500, quota_bytes=200)
    store.open("one")
    store.open("other")
    gone: list[KVBlock] = []
    store.on_evict = gone.append
    chunks, theirs = prompt("a", "b", tenant="one"), prompt("a", "b", tenant="other")
    put_all(store, chunks)
    assert held_keys(store, theirs) == []
    assert store.unknown_content(theirs) == [0, 1]
    assert store.leading_run(theirs) == 0
    assert store.blocks([c.prefix_key for c in theirs]) == []
    with store.lease_content(theirs, after=0) as lease:
        assert lease.blocks == [None] * 2
    assert (store.stats("one").misses, store.stats("other").misses) == (0, 2)
    for number in range(5):
        put_all(store, prompt(f"mine {number}", tenant="other"))
    stats = store.stats("other")
    assert stats.bytes == stats.capacity_bytes == 200, "the quota"
    assert {block.tenant for block in gone} == {"other"}, "one tenant's quota was made room for at another's cost"
    put_all(store, prompt("c"))
    assert store._bytes == store.stats().bytes == 500
    assert held_keys(store, chunks) == [chunk.prefix_key for chunk in chunks]
    store.clear("other")
    assert store.stats().bytes == 300
    assert (store.stats("other").chunks, store.stats("one").chunks) == (0, 2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 4), st.integers(20, 90)), max_size=60),
    st.integers(100, 600),
    st.none() | st.integers(80, 300),
)
def test_no_workload_breaks_a_limit_or_shows_anothers_blocks(
    steps: list[tuple[int, int, int, int]], capacity: int, quota: int | None
) -> None:
    store = MemoryStore(capacity, quota_bytes=quota)
    tenants = ("one", "two", "three")  # the first is the store's own
    for tenant in tenants[1:]:
        store.open(tenant)
    for which, text, length, size in steps:
        words = [f"text {text} {n}" for n in range(length)]
        chunks = prompt(*words, tenant=tenants[which])
        with store.lease(chunks) as lease:
            for chunk in chunks[len(lease.blocks) :]:
                if store.put(block_of(chunk, size)) is PutOutcome.REFUSED:
                    break
        stats = [store.stats(tenant) for tenant in tenants]
        assert sum(each.bytes for each in stats) == store._bytes == store.stats().bytes <= capacity
        assert quota is None or max(each.bytes for each in stats) <= quota
        assert sum(each.chunks for each in stats) == len(store._entries)
        assert all(each.leased == 0 for each in stats)
        for tenant in tenants:
            with store.lease(prompt(*words, tenant=tenant)) as lease:
                assert {block.tenant for block in lease.blocks} <= {tenant}, "another tenant's block was found"


def test_tenants_share_the_thread_that_writes_and_what_may_wait() -> None:
    slow = ShelfTier()
    slow.open.clear()
    writer = WriteBehind(
        3000,
        streams=BlockingStreams(),
        failed=lambda tier, error: None,
        tried=lambda block, kept: None,
        offered=lambda tier, block, outcome: None,
    )
    one, other = ([block_of(prompt(f"{n}", tenant=tenant)[0]) for n in range(5)] for tenant in ("one", "other"))
    assert writer.offer(other[0], [slow])
    assert writer.offer(other[1], [slow])
    assert writer.offer(one[2], [slow])
    assert not writer.offer(one[3], [slow]), "more waits than may"
    assert [writer.waiting_bytes(tenant) for tenant in ("one", "other", None)] == [1000, 2000, 3000]
    threading.Timer(0.05, slow.open.set).start()
    writer.forget("other")  # not what is the first one's
    assert writer.waiting_bytes("other") == 0
    writer.wait("one")
    assert one[2].key in slow.held, "the other's block was forgotten too"
    assert other[1].key not in slow.held
    assert writer.offer(one[4], [slow])
    writer.close()
    assert one[4].key in slow.held
    assert not writer.offer(other[3], [slow])


def test_nobody_waits_for_what_another_tenant_writes() -> None:
    slow, quick = ShelfTier("slow"), ShelfTier("quick")
    store = TieredStore(MemoryStore(_LARGE), [slow])
    store.open("other", [quick])
    _write(store, "a", tenant="other")
    slow.open.clear()
    store.put(block_of(prompt("b")[0]))
    store.flush("other")
    threading.Timer(0.05, slow.open.set).start()
    store.close()
    assert len(slow.held) == len(quick.held) == 1


def _write(store: TieredStore, word: str, *, tenant: str) -> None:
    store.put(block_of(prompt(word, tenant=tenant)[0]))
    store.flush(tenant)


def test_a_tenants_blocks_go_to_its_own_tiers() -> None:
    good, bad = ShelfTier("good"), ShelfTier("bad")
    bad.error = ValueError("broken")
    store = TieredStore(MemoryStore(_LARGE), [good])
    store.open("other", [bad])
    with closing(store):
        with pytest.warns(RuntimeWarning, match="bad tier: it failed"):
            _write(store, "a", tenant="other")
        _write(store, "b", tenant="one")
        assert len(good.held) == 1
        assert (store.stats("other").unsaved, store.stats("one").unsaved) == (1, 0)
        store.close("other")
        assert "close" in bad.asked
        _write(store, "c", tenant="one")
        assert len(good.held) == 2
        assert held_keys(store, prompt("a", tenant="other")) == []
        assert held_keys(store, prompt("b", tenant="one")) != []


def test_what_is_stored_for_a_closed_tenant_is_in_nobodys_records() -> None:
    own, others = ShelfTier("own"), ShelfTier("other")
    store = TieredStore(MemoryStore(_LARGE, owner=""), [own])
    store.open("other", [others])
    with closing(store):
        store.close("other")
        late = prompt("late", tenant="other")
        assert store.put(block_of(late[0])) is PutOutcome.REFUSED, "of a request that was under way"
        store.flush()
        assert own.held == others.held == {}
        assert held_keys(store, late) == []
        store.open("other", [others])
        assert store.put(block_of(late[0])) is PutOutcome.STORED
