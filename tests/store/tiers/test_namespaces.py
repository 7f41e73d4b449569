"""Stores and tiers of several tenants beside each other: one memory, one directory, one server, nothing in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.servers import RedisServer
from kvboost.extend import ChunkStore, Tier
from kvboost.store import DiskTier, MemoryStore, ObjectTier, RecordFormat, RedisTier, TieredStore
from kvboost.store.write_behind import WriteBehind, WriteQueue
from kvboost.streams import BlockingStreams
from kvboost.types import Namespace, PutOutcome
from tests.contracts import ChunkStoreContract, TierContract
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt
from tests.contracts.store import held_keys
from tests.helpers.places import set_limit
from tests.store.test_memory import put_all
from tests.store.test_tiered import ShelfTier
from tests.store.tiers.test_s3 import folder  # noqa: F401 - a fixture
from tests.store.tiers.test_s3 import open_tier as open_objects

_LARGE = 10**8


class TestMemoryForAnotherNamespace(ChunkStoreContract):
    def make_store(self, *, capacity_bytes: int, max_chunks: int | None = None) -> ChunkStore:
        return MemoryStore(capacity_bytes, max_chunks=max_chunks).for_tenant()


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
        set_limit(self.folder, capacity_bytes)
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


@pytest.fixture(params=["disk", "redis", "objects"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Two tenants' tiers over the same place, the second made beside the first."""
    one, other = _formats()
    first: DiskTier | RedisTier | ObjectTier
    if request.param == "disk":
        first = DiskTier(tmp_path, capacity_bytes=_LARGE, records=one)
    elif request.param == "redis":
        url = request.getfixturevalue("redis_at").url
        first = RedisTier(url, records=one, timeout_s=30.0)
    else:
        port, place = request.getfixturevalue("s3"), request.getfixturevalue("folder")
        first = open_objects(port, place, of=one.namespace)
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


def test_memory_beside_another_shares_the_room_and_nothing_else() -> None:
    first = MemoryStore(500)
    second = first.for_tenant(quota_bytes=200)
    gone: list[bytes] = []
    first.on_evict = lambda block: gone.append(block.key)
    chunks = prompt("a", "b", "c")
    put_all(first, chunks)
    assert held_keys(second, chunks) == []
    assert second.unknown_content(chunks) == [0, 1, 2]
    assert second.leading_run(chunks) == 0
    assert second.blocks([c.prefix_key for c in chunks]) == []
    with second.lease_content(chunks, after=0) as lease:
        assert lease.blocks == [None] * 3
    assert second.put(block_of(chunks[0], 100)) is PutOutcome.REFUSED  # the key is the other's
    for number in range(5):
        put_all(second, prompt(f"mine {number}"))
    assert second.stats().bytes == second.stats().capacity_bytes == 200, "the quota"
    assert gone == [], "one tenant's quota was made room for at another's cost"
    put_all(first, prompt("d"))
    assert first.memory_bytes == second.memory_bytes == 500
    second.clear()
    assert first.stats().bytes == first.memory_bytes
    assert second.stats().chunks == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 4), st.integers(20, 90)), max_size=60),
    st.integers(100, 600),
    st.none() | st.integers(80, 300),
)
def test_no_workload_breaks_a_limit_or_shows_anothers_blocks(
    steps: list[tuple[int, int, int, int]], capacity: int, quota: int | None
) -> None:
    first = MemoryStore(capacity, quota_bytes=quota)
    stores = [first, first.for_tenant(quota_bytes=quota), first.for_tenant(quota_bytes=quota)]
    for tenant, text, length, size in steps:
        chunks = prompt(f"tenant {tenant}", *(f"text {text} {n}" for n in range(length)))
        store = stores[tenant]
        with store.lease(chunks) as lease:
            for chunk in chunks[len(lease.blocks) :]:
                if store.put(block_of(chunk, size)) is PutOutcome.REFUSED:
                    break
        stats = [each.stats() for each in stores]
        assert sum(each.bytes for each in stats) == first.memory_bytes <= capacity
        assert quota is None or max(each.bytes for each in stats) <= quota
        assert sum(each.chunks for each in stats) == len(first._entries)
        assert all(each.leased == 0 for each in stats)
        for other in stores:
            assert other is store or held_keys(other, chunks) == []


def test_writers_of_two_tenants_share_the_thread_and_the_queue() -> None:
    slow = ShelfTier()
    slow.open.clear()
    queue = WriteQueue(3000)

    def writer(*, owns_queue: bool) -> WriteBehind:
        return WriteBehind(
            queue,
            owns_queue=owns_queue,
            streams=BlockingStreams(),
            failed=lambda tier, error: None,
            tried=lambda block, kept: None,
            offered=lambda tier, block, outcome: None,
        )

    first, second = writer(owns_queue=True), writer(owns_queue=False)
    blocks = [block_of(prompt(f"{n}")[0]) for n in range(5)]
    assert second.offer(blocks[0], [slow])
    assert second.offer(blocks[1], [slow])
    assert first.offer(blocks[2], [slow])
    assert not first.offer(blocks[3], [slow]), "more waits than may"
    assert (first.waiting_bytes, second.waiting_bytes) == (1000, 2000)
    threading.Timer(0.05, slow.open.set).start()
    second.forget()  # not what the first one offered
    assert second.waiting_bytes == 0
    for _ in range(500):
        if blocks[2].key in slow.held:
            break
        time.sleep(0.01)
    assert blocks[2].key in slow.held, "the other's block was forgotten too"
    assert blocks[1].key not in slow.held
    second.close()
    assert not second.offer(blocks[3], [slow])
    assert first.offer(blocks[4], [slow])
    first.close()
    assert blocks[4].key in slow.held


def _write(store: TieredStore, word: str) -> None:
    store.put(block_of(prompt(word)[0]))
    store.flush()


def test_what_a_tenants_tier_raises_is_told_to_that_tenant() -> None:
    good, bad = ShelfTier("good"), ShelfTier("bad")
    bad.error = ValueError("broken")
    first = TieredStore(MemoryStore(_LARGE), [good])
    memory = MemoryStore(_LARGE)
    second = first.for_tenant(memory.for_tenant(), [bad])
    with closing(first):
        with pytest.warns(RuntimeWarning, match="bad tier failed"):
            _write(second, "a")
        _write(first, "b")
        assert len(good.held) == 1
        second.close()
        _write(first, "c")
        assert len(good.held) == 2
