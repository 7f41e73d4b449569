"""Stores over a device that computes and copies later than it is told to: nobody reads bytes that are not there yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvboost.store import DiskTier, HostTier, MemoryStore, TieredStore
from kvboost.store import write_behind as writer
from kvboost.store.record.format import record_format
from kvboost.store.tiers.host import PagePool
from kvboost.types import Chunk, KVBlock
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt
from tests.helpers.simulated_link import POISON, SimulatedStreams

_SIZE = 1000
_LATE = 0.002  # seconds


@pytest.fixture
def streams() -> Iterator[SimulatedStreams]:
    made = SimulatedStreams(delay=lambda: _LATE)
    yield made
    made.close()


def _computed_later(streams: SimulatedStreams, chunk: Chunk) -> KVBlock:
    """The block of ``chunk``, whose bytes are poison until the device has computed them."""
    wanted = block_of(chunk, _SIZE)
    tensors = tuple(torch.full_like(tensor, POISON) for tensor in wanted.tensors)

    def compute() -> None:
        for tensor, value in zip(tensors, wanted.tensors, strict=True):
            tensor.copy_(value)

    streams.compute(compute)
    return replace(wanted, tensors=tensors)


def _expect(streams: SimulatedStreams, block: KVBlock | None, chunk: Chunk) -> None:
    """What the model would read in its turn is the block's bytes."""
    assert block is not None
    streams.compute(lambda: assert_same(block, block_of(chunk, _SIZE)))


def check_written_after_computed(streams: SimulatedStreams, folder: Path) -> None:
    records = record_format(namespace(), codec="raw", max_bytes=10**6, protection="none", key=None)
    disk = DiskTier(folder, capacity_bytes=10**6, records=records)
    store = TieredStore(MemoryStore(10**6), [disk], streams=streams)
    chunks = prompt(*"abcdefgh")
    streams.compute(lambda: time.sleep(0.1))  # the device is behind: all of this is asked for before any of it is done
    for chunk in chunks:
        store.put(_computed_later(streams, chunk))
    store.flush()
    for chunk, block in zip(chunks, disk.load([chunk.prefix_key for chunk in chunks]), strict=True):
        assert_same(block, block_of(chunk, _SIZE))
    store.close()


def check_evicted_and_back(streams: SimulatedStreams) -> None:
    """Through a host tier of few pages, so that they are written again while others are read."""
    host = HostTier(4 * _SIZE, page_bytes=100, streams=streams)
    store = TieredStore(MemoryStore(2 * _SIZE), [host], streams=streams)
    chunks = [prompt(word)[0] for word in "abcdef"]
    for turn in range(4):
        for chunk in chunks:
            with store.lease([chunk]) as lease:
                if lease.blocks:
                    _expect(streams, lease.blocks[0], chunk)
                else:
                    store.put(_computed_later(streams, chunk))
            if turn:
                store.flush()
    assert host.stats().hits > 4
    store.close()
    streams.close()


def test_what_is_persisted_was_computed(streams: SimulatedStreams, tmp_path: Path) -> None:
    check_written_after_computed(streams, tmp_path)


def test_what_the_host_tier_gives_back_is_whole_before_it_is_read(streams: SimulatedStreams) -> None:
    check_evicted_and_back(streams)


def test_pages_are_not_written_while_they_are_read(streams: SimulatedStreams) -> None:
    tier = HostTier(_SIZE, page_bytes=100, streams=streams)
    first, second = (block_of(prompt(word)[0], _SIZE) for word in "ab")
    tier.store(first)
    loaded = next(iter(tier.load([first.key])))  # on its way
    tier.store(second)  # evicts it
    assert loaded is not None
    assert loaded.ready is not None
    loaded.ready.synchronize()
    assert_same(loaded, first)


class _Busy:
    """What keeps the copies waiting for a while."""

    def synchronize(self) -> None:
        time.sleep(0.1)


def check_prefetched(streams: SimulatedStreams) -> None:
    host = HostTier(10 * _SIZE, streams=streams, page_bytes=100)
    (chunk,) = prompt("a")
    host.store(block_of(chunk, _SIZE))
    store = TieredStore(MemoryStore(2 * _SIZE), [host], streams=streams)
    streams.copy([], after=_Busy())
    store.fetch([chunk])
    with store.lease([chunk]) as lease:
        _expect(streams, lease.blocks[0], chunk)
    store.close()
    streams.close()


def test_a_prefetched_block_is_whole_before_it_is_read(streams: SimulatedStreams) -> None:
    check_prefetched(streams)


def _never_waits(patch: pytest.MonkeyPatch) -> None:
    right = writer.WriteBehind._store
    patch.setattr(
        writer.WriteBehind, "_store", lambda self, block, tiers: right(self, replace(block, ready=None), tiers)
    )


def _puts_without_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedStreams, "event", lambda self: None)


def _joins_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedStreams, "join", lambda self: None)


def _pages_free_at_once(patch: pytest.MonkeyPatch) -> None:
    right = PagePool.give_back
    patch.setattr(PagePool, "give_back", lambda self, pages, after: right(self, pages, after=None))


@pytest.mark.parametrize("bug", [_never_waits, _puts_without_event])
def test_seeded_persisting_too_early(
    bug: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="bits changed"):
        check_written_after_computed(SimulatedStreams(), tmp_path)


def test_seeded_reading_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    _joins_nothing(monkeypatch)
    with pytest.raises(AssertionError, match="bits changed"):
        check_prefetched(SimulatedStreams())


def test_seeded_page_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = SimulatedStreams(delay=lambda: 0.02)
    _pages_free_at_once(monkeypatch)
    with pytest.raises(AssertionError, match="bits changed"):
        test_pages_are_not_written_while_they_are_read(streams)
