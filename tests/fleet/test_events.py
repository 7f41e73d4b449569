"""Events say what a store holds, after whatever happened to it, and nothing that a router could take for exact."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="needs kvboost[fleet]")

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.extend import StoreListener
from kvboost.fleet.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    StoreEvents,
    decode_batch,
    encode_batch,
    token_ids,
)
from kvboost.store import DiskTier, HostTier, LeafFirstLRU, MemoryStore, RecordFormat, TieredStore
from kvboost.types import Chunk
from tests.contracts.blocks import SIZE, block_of, namespace
from tests.contracts.content import prompt
from tests.fleet.picture import Picture
from tests.store.test_tiered import ShelfTier

PROMPTS = [prompt(*words) for length in (1, 2, 3) for words in product("abc", repeat=length)]
CHUNKS = {chunk.prefix_key: chunk for chunks in PROMPTS for chunk in chunks}


def read(store: Any, chunks: list[Chunk], **changes: Any) -> None:
    """As the engine does it: lease, put the rest, mark all as used, release."""
    with store.lease(chunks) as lease:
        for chunk in chunks[len(lease.blocks) :]:
            store.put(replace(block_of(chunk), **changes))
    store.used([chunk.prefix_key for chunk in chunks])


def stored_in(store: MemoryStore) -> set[bytes]:
    keys = list(CHUNKS)
    return {key for key, there in zip(keys, store.contains(keys), strict=True) if there}


def _of_other(chunk: Chunk) -> Chunk:
    """The same text of another tenant."""
    parent = chunk.parent_key[::-1] if chunk.parent_key is not None else None
    return chunk._replace(prefix_key=chunk.prefix_key[::-1], parent_key=parent, tenant="other")


_do = st.one_of(
    st.tuples(st.integers(0, 1), st.integers(0, len(PROMPTS) - 1)),
    st.tuples(st.integers(0, 1), st.sampled_from(["clear"])),
)


@settings(max_examples=150, deadline=None)
@given(
    chunks=st.integers(1, 8),
    quota=st.sampled_from([None, 3 * SIZE]),
    before=st.lists(_do, max_size=6),
    after=st.lists(_do, max_size=25),
)
def test_events_equal_the_stores_contents(chunks: int, quota: int | None, before: list[Any], after: list[Any]) -> None:
    picture = Picture()
    listener = StoreEvents(picture.apply)
    store = MemoryStore(chunks * SIZE, policy=LeafFirstLRU(), quota_bytes=quota)
    store.open("other")
    # The same texts of another tenant have other keys.
    of_other = {key: key[::-1] for key in CHUNKS}
    renamed = [[_of_other(chunk) for chunk in p] for p in PROMPTS]

    def do(steps: list[Any]) -> None:
        for tenant, what in steps:
            if what == "clear":
                store.clear(("", "other")[tenant])
            else:
                read(store, (PROMPTS, renamed)[tenant][what])

    do(before)
    store.listen(listener)
    do(after)
    others = list(of_other.values())
    there = {key for key, found in zip(others, store.contains(others), strict=True) if found}
    assert picture.keys("memory") == stored_in(store) | there
    for key, event in picture.held.get("memory", {}).items():
        chunk = CHUNKS.get(key) or CHUNKS[key[::-1]]
        assert (event.token_ids, event.block_size) == (token_ids(chunk.tokens), chunk.end - chunk.start)
        assert (event.parent_block_hash is None) == (chunk.start == 0)
        assert event.content_hashes == [chunk.content_key]
        assert event.parent_block_hash is None or event.parent_block_hash in picture.held["memory"]


def test_a_tenant_that_is_opened_later_is_heard_too() -> None:
    picture = Picture()
    store = MemoryStore(10 * SIZE)
    store.listen(StoreEvents(picture.apply))
    store.open("other")
    read(store, [_of_other(chunk) for chunk in PROMPTS[0]])
    assert picture.keys("memory") == {chunk.prefix_key[::-1] for chunk in PROMPTS[0]}


@pytest.mark.parametrize("kind", ["disk", "host"])
def test_events_equal_a_tiers_contents(kind: str, tmp_path: Path) -> None:
    """Tiers that evict: the memory holds three blocks, the tier twelve of the 39 that are read in turn."""
    tier: DiskTier | HostTier = HostTier(12 * SIZE, page_bytes=SIZE)
    if kind == "disk":
        tier = DiskTier(tmp_path, capacity_bytes=12 * 4096, records=RecordFormat(namespace()))
    store = TieredStore(MemoryStore(3 * SIZE, policy=LeafFirstLRU()), [tier])
    picture = Picture()
    store.listen(StoreEvents(picture.apply))
    source = random.Random(3)

    def check() -> None:
        store.flush()
        keys = list(CHUNKS)
        there = {key for key, found in zip(keys, tier.contains(keys), strict=True) if found}
        assert picture.keys(kind) == there
        assert picture.keys("memory") == stored_in(store._memory)

    for _ in range(120):
        read(store, source.choice(PROMPTS))
    check()
    assert picture.keys(kind)
    assert tier.stats().evictions
    store.clear()
    check()
    assert not picture.keys(kind)
    read(store, PROMPTS[0])
    store.close()


def test_what_another_process_has_evicted_is_told_when_it_is_missed(tmp_path: Path) -> None:
    records = RecordFormat(namespace())
    picture = Picture()
    chunks = prompt("a", "b")
    with_disk = TieredStore(MemoryStore(2 * SIZE), [tier := DiskTier(tmp_path, records=records)])
    with_disk.listen(StoreEvents(picture.apply))
    read(with_disk, chunks)
    with_disk.flush()
    read(with_disk, prompt("c", "d"))  # out of the memory
    assert picture.keys("disk") >= {chunk.prefix_key for chunk in chunks}
    other = DiskTier(tmp_path, records=records)
    found = tier.contains

    def contains(keys: Any) -> list[bool]:
        answer = found(keys)
        other.remove([chunk.prefix_key for chunk in chunks])  # right behind the look
        return answer

    tier.contains = contains  # type: ignore[method-assign]
    with with_disk.lease(chunks) as lease:
        assert not lease.blocks
    assert chunks[0].prefix_key not in picture.keys("disk")
    with_disk.close()
    other.close()


def test_a_tier_that_cannot_tell_what_it_removes_is_not_announced() -> None:
    picture, tier = Picture(), ShelfTier()
    store = TieredStore(MemoryStore(2 * SIZE), [tier])
    store.listen(StoreEvents(picture.apply))
    for chunks in PROMPTS[:6]:
        read(store, chunks)
    store.flush()
    assert tier.held
    assert set(picture.held) == {"memory"}
    store.close()


def _only(events: list[Any]) -> BlockStored:
    (event,) = (event for event in events if isinstance(event, BlockStored))
    return event


@pytest.mark.parametrize(
    "changes", [{"approx_depth": 1}, {"parent_key": None}], ids=["behind approximate KV", "found by content"]
)
def test_kv_that_is_no_prefix_is_announced_without_its_tokens(changes: dict[str, Any]) -> None:
    heard: list[Any] = []
    store = MemoryStore(10 * SIZE)
    store.listen(StoreEvents(heard.extend))
    chunk = prompt("a", "b")[1]
    store.put(replace(block_of(chunk), **{"parent_key": None, **changes}))
    event = _only(heard)
    assert (event.token_ids, event.block_size, event.parent_block_hash) == ([], 0, None)
    assert (event.block_hashes, event.content_hashes) == ([chunk.prefix_key], [chunk.content_key])


def test_a_listener_is_told_first_that_nothing_is_held() -> None:
    heard: list[Any] = []
    StoreEvents(heard.extend)
    assert heard == [AllBlocksCleared()]


def test_the_medium_says_where_the_tensors_lie() -> None:
    heard: list[Any] = []
    listener: StoreListener = StoreEvents(heard.extend, memory_medium="GPU")
    block = block_of(PROMPTS[0][0])
    for tier in ("memory", "host", "disk"):
        listener.stored(tier, block)
        listener.removed(tier, [block.key])
    told = [(event.medium, event.ownership) for event in heard[1:]]
    assert told == [(m, t) for m, t in (("GPU", "memory"), ("CPU", "host"), ("STORAGE", "disk")) for _ in range(2)]


_hashes = st.one_of(st.binary(max_size=40), st.integers(0, 2**64 - 1))
_batches = st.builds(
    EventBatch,
    st.floats(0, 2e9),
    st.lists(
        st.one_of(
            st.builds(AllBlocksCleared),
            st.builds(BlockRemoved, st.lists(_hashes), st.none() | st.text(), group_idx=st.none() | st.integers(0, 9)),
            st.builds(
                BlockStored,
                st.lists(_hashes),
                st.none() | _hashes,
                st.lists(st.integers(0, 2**32 - 1)),
                st.integers(0, 4096),
                st.none() | st.integers(0, 9),
                st.none() | st.text(),
                st.none() | st.text(),
                locality=st.none() | st.text(),
                content_hashes=st.none() | st.lists(st.binary()),
            ),
        )
    ),
    st.none() | st.integers(0, 7),
)


@given(_batches)
def test_a_batch_survives_the_wire(batch: EventBatch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


def test_fields_of_later_versions_are_ignored() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": None, "from_the_future": 1}
    assert decode_batch(msgspec.msgpack.encode([1.0, [event], 0])).events == [BlockRemoved([b"a"], None)]
