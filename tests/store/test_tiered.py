from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvboost.extend import Tier
from kvboost.store import DiskTier, MemoryStore, RecordFormat, TieredStore
from kvboost.testing.content import prompt
from kvboost.testing.store import ChunkStoreContract, held_keys
from kvboost.testing.tier import block_of, namespace
from kvboost.types import BlockInfo, Chunk, KVBlock, PutOutcome, StoreStats

_SIZE = 1000
_ROOM = 10**6


class ShelfTier:
    """A tier in a dictionary that notes what it was asked, and can be told to fail, to wait or to lie."""

    def __init__(self, name: str = "shelf", *, outlives: bool = True) -> None:
        self.name, self.outlives_process = name, outlives
        self.held: dict[bytes, KVBlock] = {}
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.open = threading.Event()
        self.open.set()

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._note("contains")
        return [key in self.held for key in keys]

    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        self._note("variants")
        return [[_info(b) for b in self.held.values() if b.content_key == content] for content in content_keys]

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        self._note("load")
        return (self.held.get(key) for key in keys)

    def store(self, block: KVBlock) -> PutOutcome:
        self.open.wait()
        self._note("store")
        self.held[block.key] = block
        return PutOutcome.STORED

    def used(self, chain: Sequence[bytes]) -> None:
        self._note("used")

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def flush(self) -> None:
        self._note("flush")

    def clear(self) -> None:
        self.held.clear()

    def stats(self) -> StoreStats:
        return StoreStats(self.name, len(self.held), 0, 0, 0, 0, 0, 0, 0, 0)

    def close(self) -> None:
        self._note("close")


def _info(block: KVBlock) -> BlockInfo:
    return BlockInfo(**{name: getattr(block, name) for name in BlockInfo.__slots__})


def _store(*tiers: Tier, room: int = _ROOM, **options: object) -> TieredStore:
    return TieredStore(MemoryStore(room), tiers, **options)  # type: ignore[arg-type]


def _fill(store: TieredStore, chunks: Sequence[Chunk]) -> None:
    for chunk in chunks:
        assert store.put(block_of(chunk, _SIZE)) is PutOutcome.STORED


class TestWithoutTiers(ChunkStoreContract):
    """With nothing below it is the memory store it holds."""

    def make_store(self, *, capacity_bytes: int, max_chunks: int | None = None) -> TieredStore:
        return TieredStore(MemoryStore(capacity_bytes, max_chunks=max_chunks), [])


def test_what_was_written_behind_is_found_by_the_next_store() -> None:
    shelf, chunks = ShelfTier(), prompt("a", "b", "c")
    first = _store(shelf)
    _fill(first, chunks)
    first.close()
    second = _store(shelf)
    assert held_keys(second, chunks) == [chunk.prefix_key for chunk in chunks]
    assert second.stats().hits == 3
    second.close()


def test_it_is_found_in_a_real_directory_to_the_bit(tmp_path: Path) -> None:
    chunks = prompt("a", "b", "c")

    def open_store() -> TieredStore:
        return _store(DiskTier(tmp_path, capacity_bytes=_ROOM, records=RecordFormat(namespace())))

    first = open_store()
    _fill(first, chunks)
    first.flush()  # and no close: the process might have been killed here
    second = open_store()
    with second.lease(chunks) as lease:
        for block, chunk in zip(lease.blocks, chunks, strict=True):
            wanted = block_of(chunk, _SIZE)
            assert [t.tolist() for t in block.tensors] == [t.tolist() for t in wanted.tensors]
    first.close()
    second.close()


def test_a_run_may_come_from_several_tiers_and_ends_at_the_first_gap() -> None:
    near, far, chunks = ShelfTier("near"), ShelfTier("far"), prompt("a", "b", "c", "d", "e")
    for tier, indices in ((near, (0, 1)), (far, (0, 1, 2, 4))):
        for index in indices:
            tier.held[chunks[index].prefix_key] = block_of(chunks[index], _SIZE)
    store = _store(near, far)
    assert held_keys(store, chunks) == [chunk.prefix_key for chunk in chunks[:3]]
    store.flush()
    # What came from afar is near from here on.
    assert chunks[2].prefix_key in near.held
    store.close()


def test_a_chunk_is_found_by_content_without_its_own_beginning() -> None:
    shelf, there, here = ShelfTier(), prompt("a", "b"), prompt("x", "y", "b")
    for chunk in there:
        shelf.held[chunk.prefix_key] = block_of(chunk, _SIZE)
    store = _store(shelf)
    with store.lease_content(here, after=0) as lease:
        assert [block.key if block else None for block in lease.blocks] == [None, None, there[1].prefix_key]
    assert store.stats().leased == 0
    store.close()


def test_a_block_with_other_tokens_or_of_another_shape_is_a_miss() -> None:
    chunks, other = prompt("a"), prompt("z")
    shelf = ShelfTier()
    shelf.held[chunks[0].prefix_key] = block_of(other[0], _SIZE)
    store = _store(shelf)
    assert held_keys(store, chunks) == []
    assert store.stats().rejected == 1
    store.close()
    shelf.held[chunks[0].prefix_key] = block_of(chunks[0], _SIZE)
    picky = _store(shelf, fits=lambda block: False)
    assert held_keys(picky, chunks) == []
    picky.close()


def test_a_tier_that_raises_is_a_miss_and_one_warning() -> None:
    shelf, chunks = ShelfTier("torn"), prompt("a", "b")
    shelf.error = OSError("torn")
    store = _store(shelf)
    with pytest.warns(RuntimeWarning, match="the torn tier failed"):
        assert held_keys(store, chunks) == []
    # From here on another warning would be an error.
    _fill(store, chunks)
    assert held_keys(store, chunks) == [chunk.prefix_key for chunk in chunks]
    store.flush()
    store.close()


def test_a_put_does_not_wait_for_a_slow_tier_and_what_waits_is_bounded() -> None:
    shelf, chunks = ShelfTier(), prompt(*"abcdefgh")
    shelf.open.clear()
    store = _store(shelf, waiting_bytes=3 * _SIZE)
    _fill(store, chunks)  # would never return if it waited
    stats = store.stats()
    assert stats.waiting_bytes <= 3 * _SIZE
    assert stats.writes_dropped == 5
    shelf.open.set()
    store.flush()  # brings up the rear
    assert set(shelf.held) == {chunk.prefix_key for chunk in chunks}
    store.close()


def test_what_no_tier_has_yet_is_written_when_memory_lets_it_go() -> None:
    shelf, chunks = ShelfTier(), prompt(*"abc")
    shelf.open.clear()
    store = _store(shelf, room=3 * _SIZE, waiting_bytes=2 * _SIZE)
    _fill(store, chunks)  # the third is dropped from the queue
    shelf.open.set()
    store._writer.wait()
    assert chunks[2].prefix_key not in shelf.held
    _fill(store, prompt("x"))  # the last leaf goes
    store._writer.wait()
    assert chunks[2].prefix_key in shelf.held
    store.close()


def test_a_tier_that_ends_with_the_process_gets_what_is_evicted_and_nothing_else() -> None:
    host, chunks = ShelfTier("host", outlives=False), prompt(*"abc")
    store = _store(host, room=3 * _SIZE)
    _fill(store, chunks)
    store.flush()
    assert not host.held
    _fill(store, prompt("x"))
    store._writer.wait()
    assert list(host.held) == [chunks[2].prefix_key]
    store.close()


def test_loading_is_declined_where_computing_is_faster_and_tried_again_later() -> None:
    shelf, chunks = ShelfTier(), prompt("a", "b")
    for chunk in chunks:
        shelf.held[chunk.prefix_key] = block_of(chunk, _SIZE)
    store = _store(shelf, compute_seconds=lambda tokens: 1.0)
    assert len(held_keys(store, chunks)) == 2  # nothing is known of the tier: it is tried
    store._speeds[shelf].observe(seconds=100.0, nbytes=_SIZE)
    store._memory.clear()
    assert held_keys(store, chunks) == []
    assert store.stats().loads_declined == 2
    for _ in range(200):
        held_keys(store, chunks)
    assert len(held_keys(store, chunks)) == 2
    store.close()


def test_clear_reaches_every_tier_and_what_waits() -> None:
    shelf, chunks = ShelfTier(), prompt("a", "b")
    store = _store(shelf)
    _fill(store, chunks)
    store.clear()
    assert not shelf.held
    assert held_keys(store, chunks) == []
    store.close()
