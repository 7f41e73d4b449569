from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvboost.extend import Tier
from kvboost.store import DiskTier, LoadRules, MemoryStore, RecordFormat, TieredStore
from kvboost.store.lookup import Speed
from kvboost.store.write_behind import WriteBehind
from kvboost.streams import BlockingStreams
from kvboost.types import BlockInfo, Chunk, KVBlock, LoadReport, PutOutcome, StoreStats
from tests.contracts.blocks import block_of, namespace
from tests.contracts.content import prompt
from tests.contracts.store import ChunkStoreContract, held_keys

_SIZE = 1000
_ROOM = 10**6


class ShelfTier:
    """A tier in a dictionary that notes what it was asked, and can be told to fail, to wait or to lie."""

    def __init__(self, name: str = "shelf", *, outlives: bool = True) -> None:
        self.name, self.outlives_process = name, outlives
        self.held: dict[bytes, KVBlock] = {}
        self.asked: list[str] = []
        self.error: BaseException | None = None
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


def _store(*tiers: Tier, room: int = _ROOM, waiting_bytes: int = 2**20, **rules: object) -> TieredStore:
    return TieredStore(MemoryStore(room), tiers, waiting_bytes=waiting_bytes, rules=LoadRules(**rules))  # type: ignore[arg-type]


def _fill(store: TieredStore, chunks: Sequence[Chunk]) -> None:
    for chunk in chunks:
        assert store.put(block_of(chunk, _SIZE)) is PutOutcome.STORED


class SlowTier(ShelfTier):
    """Hands out a block each time it is told to."""

    def __init__(self, chunks: Sequence[Chunk], name: str = "slow") -> None:
        super().__init__(name)
        self.held = {chunk.prefix_key: block_of(chunk, _SIZE) for chunk in chunks}
        self.turns = threading.Semaphore(0)
        self.loaded = 0

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        self._note("load")
        for key in keys:
            self.turns.acquire()
            self.loaded += 1
            yield self.held.get(key)


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


def test_which_content_is_stored_in_any_tier_is_answered_for_each_chunk() -> None:
    near, far = ShelfTier("near"), ShelfTier("far")
    kept, below, gone, new = (prompt(word)[0] for word in ("kept", "below", "gone", "new"))
    for tier, chunk in ((near, gone), (far, below)):
        tier.held[chunk.prefix_key] = block_of(chunk, _SIZE)
    store = _store(near, far)
    _fill(store, [kept])
    store.flush()
    asked = [kept, below, gone, new, below]
    assert store.contains_content(asked) == [True, True, True, False, True]
    near.contains = lambda keys: [False] * len(keys)  # type: ignore[method-assign]
    assert store.contains_content(asked) == [True, True, False, False, True], "a list that outlived its chunk"
    far.error = OSError("away")
    with pytest.warns(RuntimeWarning, match="far tier: it failed"):
        assert store.contains_content(asked) == [True, False, False, False, False]
    far.error = None
    assert "load" not in near.asked + far.asked
    store.close()


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


def test_the_use_of_what_was_found_by_content_is_noted_in_its_tenants_tier() -> None:
    own, theirs, there = ShelfTier(), ShelfTier(), prompt("a", "b", tenant="one")
    theirs.held[there[1].prefix_key] = block_of(there[1], _SIZE)
    store = _store(own)
    store.open("one", [theirs])
    with store.lease_content(prompt("x", "b", tenant="one"), after=0) as lease:
        assert lease.blocks[1] is not None
    own.asked.clear()
    theirs.asked.clear()
    store.used([chunk.prefix_key for chunk in there])  # without the beginning in memory
    store.flush()
    assert ("used" in own.asked, "used" in theirs.asked) == (False, True)
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
    with pytest.warns(RuntimeWarning, match="torn tier: it failed"):
        assert held_keys(store, chunks) == []
    # From here on another warning would be an error.
    _fill(store, chunks)
    assert held_keys(store, chunks) == [chunk.prefix_key for chunk in chunks]
    store.flush()
    store.close()


def test_where_warnings_are_errors_the_other_tiers_get_the_block(caplog: pytest.LogCaptureFixture) -> None:
    class FullTier(ShelfTier):
        def store(self, block: KVBlock) -> PutOutcome:
            raise OSError("full")

    shelf, chunks = ShelfTier(), prompt("a", "b")
    store = _store(FullTier("full"), shelf)
    _fill(store, chunks)  # the first failure is a warning, and so an error here
    store._writer.wait()  # flush would offer again what was not kept
    assert set(shelf.held) == {chunk.prefix_key for chunk in chunks}
    assert "full tier: it failed" in caplog.text
    store.close()


def test_whatever_telling_of_a_failure_raises_the_next_block_is_written(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*arguments: object) -> None:
        raise LookupError

    writer = WriteBehind(
        3000,
        streams=BlockingStreams(),
        failed=broken,
        tried=broken,
        offered=lambda tier, block, outcome: None,
    )
    shelf, blocks = ShelfTier(), [block_of(chunk) for chunk in prompt("a", "b")]
    for block in blocks:
        assert writer.offer(block, [shelf])
        assert _in_time(writer.wait), "the thread has ended"
    assert set(shelf.held) == {block.key for block in blocks}
    assert "later jobs go on" in caplog.text
    writer.close()


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
    store._loader.speeds["shelf"].observe(seconds=100.0, nbytes=_SIZE)
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


# Reporting


def test_a_lease_says_which_tier_each_block_came_from() -> None:
    near, far, chunks = ShelfTier("near"), ShelfTier("far"), prompt("a", "b", "c", "d")
    store = _store(near, far)
    _fill(store, chunks[:1])
    near.held[chunks[1].prefix_key] = block_of(chunks[1], _SIZE)
    far.held[chunks[2].prefix_key] = block_of(chunks[2], _SIZE)
    with store.lease(chunks) as lease:
        assert lease.loads.tiers == {chunks[1].prefix_key: "near", chunks[2].prefix_key: "far"}  # type: ignore[attr-defined]
    with store.lease(chunks) as lease:  # now they lie in memory
        assert lease.loads == LoadReport()  # type: ignore[attr-defined]
    with store.lease_content(prompt("x", "c"), after=0) as content:
        assert content.loads == LoadReport()  # type: ignore[attr-defined]
    store.close()


def test_content_says_its_tier_too() -> None:
    shelf, there, here = ShelfTier(), prompt("a", "b"), prompt("x", "b")
    shelf.held[there[1].prefix_key] = block_of(there[1], _SIZE)
    store = _store(shelf)
    with store.lease_content(here, after=0) as lease:
        assert lease.loads.tiers == {there[1].prefix_key: "shelf"}  # type: ignore[attr-defined]
    store.close()


def test_a_lease_says_what_was_declined_and_why() -> None:
    near, far, chunks = ShelfTier("near"), ShelfTier("far"), prompt("a", "b", "c")
    for chunk in chunks:
        near.held[chunk.prefix_key] = far.held[chunk.prefix_key] = block_of(chunk, _SIZE)
    store = _store(near, far, compute_seconds=lambda tokens: 0.5)
    store._loader.note_size(block_of(chunks[0], _SIZE))
    for tier in (near, far):
        store._loader.speeds[tier.name].observe(seconds=1000.0, nbytes=_SIZE)
    tokens = sum(chunk.end - chunk.start for chunk in chunks)
    with store.lease(chunks) as lease:
        loads = lease.loads  # type: ignore[attr-defined]
        assert [(d.tier, d.tokens, d.compute_seconds) for d in loads.declined] == [
            ("near", tokens, 0.5),
            ("far", tokens, 0.5),
        ]
        assert all(d.load_seconds > 0.5 for d in loads.declined)
        assert loads.declined_at == {chunk.start: chunk.end - chunk.start for chunk in chunks}  # once, not twice
    # What a tier farther off delivers is not left to be computed.
    store._loader.speeds["far"] = Speed()
    del far.held[chunks[2].prefix_key]
    with store.lease(chunks) as lease:
        (declined,) = lease.loads.declined  # type: ignore[attr-defined]
        assert (declined.tier, declined.tokens) == ("near", chunks[2].end - chunks[2].start)
        assert set(lease.loads.tiers.values()) == {"far"}  # type: ignore[attr-defined]
    store.close()


# Overlap


def test_blocks_are_told_of_while_the_next_ones_are_on_their_way() -> None:
    chunks = prompt("a", "b", "c")
    slow = SlowTier(chunks)
    store = _store(slow)
    told: list[tuple[bytes, int]] = []

    def arrived(chunk: Chunk, block: KVBlock) -> None:
        assert chunk.prefix_key == block.key
        told.append((block.key, slow.loaded))
        slow.turns.release()

    slow.turns.release()
    with store.lease(chunks, arrived=arrived) as lease:
        assert [block.key for block in lease.blocks] == [chunk.prefix_key for chunk in chunks]
    assert told == [(chunk.prefix_key, at) for at, chunk in enumerate(chunks, 1)]
    store.close()


def test_nobody_is_told_of_a_block_that_is_not_what_was_asked_for() -> None:
    chunks, others = prompt("a", "b", "c"), prompt("x", "b")
    told: list[bytes] = []
    for lie in (block_of(others[1], _SIZE), replace(block_of(others[1], _SIZE), key=chunks[1].prefix_key, tokens=b"")):
        shelf = ShelfTier("liar")
        shelf.held = {chunk.prefix_key: block_of(chunk, _SIZE) for chunk in chunks}
        shelf.held[chunks[1].prefix_key] = lie  # the right text elsewhere; other text
        store = _store(shelf)
        told.clear()
        with store.lease(chunks, arrived=lambda chunk, block: told.append(block.key)) as lease:
            assert [block.key for block in lease.blocks] == told == [chunks[0].prefix_key]
        assert store.stats().rejected == 1
        store.close()


def test_a_load_that_breaks_off_leaves_what_came_and_frees_what_did_not() -> None:
    chunks = prompt("a", "b", "c")

    class TearingTier(SlowTier):
        def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
            yield self.held[keys[0]]
            raise OSError("torn")

    store = _store(TearingTier(chunks))
    with pytest.warns(RuntimeWarning, match="failed"):
        assert held_keys(store, chunks) == [chunks[0].prefix_key]
    assert not store._loader.claims._claimed
    store.close()


def test_a_reader_that_fails_is_not_left_waiting_for() -> None:
    chunks = prompt("a", "b")
    shelf = ShelfTier()
    shelf.held = {chunk.prefix_key: block_of(chunk, _SIZE) for chunk in chunks}
    store = _store(shelf)

    def interrupted(chunk: Chunk, block: KVBlock) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.lease(chunks, arrived=interrupted)
    assert store.stats().leased == 0
    assert len(held_keys(store, chunks)) == 2  # would wait for ever for a claim that was left
    store.close()


def _prefetched(store: TieredStore, chunks: Sequence[Chunk]) -> Future[int] | None:
    return store.in_background(lambda: store.fetch(chunks)[1])


def test_a_second_lookup_waits_for_the_first_and_loads_nothing_twice() -> None:
    chunks = prompt("a", "b", "c", "d")
    slow = SlowTier(chunks)
    store = _store(slow)
    prefetched = _prefetched(store, chunks)
    assert prefetched is not None
    while "load" not in slow.asked:
        time.sleep(0.001)
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(held_keys, store, chunks[:2])
        whole = pool.submit(held_keys, store, chunks)
        for _ in range(2):
            slow.turns.release()
        # The short prompt does not wait for the rest of the long one.
        assert len(short.result(timeout=30)) == 2
        assert not whole.done()
        for _ in range(2):
            slow.turns.release()
        assert len(whole.result(timeout=30)) == 4
    assert prefetched.result(timeout=30) == 4
    assert (slow.loaded, slow.asked.count("load")) == (4, 1)
    store.close()


def test_prefetching_brings_up_without_counting_holding_or_waiting() -> None:
    chunks = prompt("a", "b", "c")
    slow = SlowTier(chunks[:2])
    store = _store(slow)
    future = _prefetched(store, chunks)
    assert future is not None
    assert not future.done()
    for _ in range(2):
        slow.turns.release()
    assert future.result(timeout=30) == 2
    stats = store.stats()
    assert (stats.chunks, stats.leased, stats.hits, stats.misses) == (2, 0, 0, 0)
    with store.lease(chunks) as lease:
        assert len(lease.blocks) == 2
        assert lease.loads == LoadReport()  # type: ignore[attr-defined]
    store.close()


def test_prefetches_that_wait_are_bounded_can_be_taken_back_and_end_with_the_store() -> None:
    chunks = prompt("a")
    slow = SlowTier(chunks)
    store = _store(slow)
    running = _prefetched(store, chunks)
    waiting = [_prefetched(store, prompt(f"w{number}")) for number in range(80)]
    assert waiting.count(None) == 80 - 63
    assert running is not None
    assert waiting[0] is not None
    assert waiting[0].cancel()
    assert _prefetched(store, chunks) is not None  # there is room again
    slow.turns.release()
    assert running.result(timeout=30) == 1
    store.close()
    assert all(future is None or future.done() for future in waiting)


def test_what_is_evicted_goes_down_leaf_first_and_comes_up_root_first() -> None:
    host, chunks = ShelfTier("host", outlives=False), prompt(*"abcd")
    store = _store(host, room=4 * _SIZE)
    _fill(store, chunks)
    _fill(store, prompt(*"wxyz"))
    store._writer.wait()
    assert list(host.held) == [chunk.prefix_key for chunk in reversed(chunks)]
    told: list[bytes] = []
    with store.lease(chunks, arrived=lambda chunk, block: told.append(block.key)) as lease:
        assert [block.key for block in lease.blocks] == told == [chunk.prefix_key for chunk in chunks]
    store.close()


def test_flush_returns_only_after_every_lasting_tier_was_flushed_behind_its_writes() -> None:
    near, far, host = ShelfTier("near"), ShelfTier("far"), ShelfTier("host", outlives=False)
    store = _store(host, near, far)
    _fill(store, prompt(*"abc"))
    store.flush()
    for tier in (near, far):
        assert tier.asked == ["store"] * 3 + ["flush"]
    assert host.asked == []
    store.close()


class _Away(ShelfTier):
    """Takes nothing while it is away."""

    is_away = True

    def store(self, block: KVBlock) -> PutOutcome:
        return PutOutcome.REFUSED if self.is_away else super().store(block)


def test_what_a_tier_refused_while_it_was_away_is_written_by_a_later_flush() -> None:
    tier = _Away()
    store = TieredStore(MemoryStore(10_000), [tier])
    one = block_of(prompt("one")[0], nbytes=_SIZE)
    store.put(one)
    store.flush()
    assert store.stats().writes_dropped > 0
    assert not tier.contains([one.key])[0]
    tier.is_away = False
    store.flush()
    assert tier.contains([one.key])[0]
    store.close()


def test_a_request_does_not_wait_until_a_tier_knows_what_was_used() -> None:
    class Deaf(ShelfTier):
        def used(self, chain: Sequence[bytes]) -> None:
            self.open.wait(20)

    tier = Deaf()
    tier.open.clear()
    store = TieredStore(MemoryStore(10_000), [tier])
    one = block_of(prompt("one")[0], nbytes=_SIZE)
    store.put(one)
    began = time.perf_counter()
    store.used([one.key])
    assert time.perf_counter() - began < 10
    tier.open.set()
    store.close()


def test_a_flush_ends_although_others_go_on_writing() -> None:
    class Slow(ShelfTier):
        def store(self, block: KVBlock) -> PutOutcome:
            time.sleep(0.02)
            return super().store(block)

    store = TieredStore(MemoryStore(10**9), [Slow()])
    stop = threading.Event()

    def others() -> None:
        number, end = 0, time.monotonic() + 40
        while not stop.wait(0.01) and time.monotonic() < end:
            number += 1
            store.put(block_of(prompt(f"other {number}")[0], nbytes=_SIZE))

    writer = threading.Thread(target=others)
    writer.start()
    time.sleep(0.5)
    began = time.perf_counter()
    store.flush()
    took = time.perf_counter() - began
    stop.set()
    writer.join()
    store.close()
    assert took < 20.0


class _Panic(BaseException):
    """As a library in Rust ends: no Exception."""


def _in_time(work: Callable[[], None]) -> bool:
    """Whether ``work`` returns; what hangs is left behind."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10.0)
    return not thread.is_alive()


def test_a_job_that_raises_is_logged_once_and_counted_and_the_next_ones_are_written(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings are errors in this suite, so that what says that a tier failed raises, too."""
    shelf, chunks = ShelfTier(), prompt(*"abcd")
    monkeypatch.setattr(shelf, "error", _Panic("panicked"))
    store = _store(shelf)
    _fill(store, chunks[:2])
    store.used([chunks[0].prefix_key])
    assert _in_time(store._writer.wait), "a job that raised ended the thread"
    assert store.work()["shelf"].errors >= 3
    assert [record.message for record in caplog.records if "later jobs go on" in record.message] != []
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
    shelf.error = None
    _fill(store, chunks[2:])
    assert _in_time(store.flush)
    assert set(shelf.held) == {chunk.prefix_key for chunk in chunks}, "what failed was not tried again"
    assert _in_time(store.close)


def test_a_machine_without_a_thread_to_spare_loses_writes_and_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, chunks = ShelfTier(), prompt(*"ab")
    store = _store(shelf)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        _fill(store, chunks[:1])
        assert _prefetched(store, chunks) is None
    assert store.stats().writes_dropped == 1
    _fill(store, chunks[1:])
    assert _in_time(store.flush)
    assert set(shelf.held) == {chunk.prefix_key for chunk in chunks}
    assert _in_time(store.close)


def test_what_a_tier_refuses_is_counted() -> None:
    tier = _Away()
    store = TieredStore(MemoryStore(10_000), [tier])
    store.put(block_of(prompt("one")[0], nbytes=_SIZE))
    store._writer.wait()
    assert store.work()["shelf"].refused == 1
    tier.is_away = False
    store.close()
    assert store.work()["shelf"].refused == 1
