"""Blocks on their way from the disk to simulated devices: in few copies, out of pinned memory kept till then."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.store import DiskTier, LoadRules, MemoryStore, TieredStore, uploads
from kvboost.store.record.format import record_format
from kvboost.store.tiers.disk.files import Files
from kvboost.store.uploads import Uploads
from kvboost.types import KVBlock
from tests.contracts.blocks import block_of, namespace
from tests.contracts.content import prompt
from tests.helpers.devices import host
from tests.helpers.late_devices import LateDevices

_SIZE = 1000
_CHUNKS = prompt(*"abcdefghijklmnopqrstuvwxyz")
_ON = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two blocks and slabs of two records: so that memory is used again within one prompt."""
    monkeypatch.setattr(uploads, "_BATCH_BYTES", 2 * _SIZE)
    monkeypatch.setattr(uploads, "_SLAB_BYTES", 5 * 4096)


@pytest.fixture
def records() -> Any:
    return record_format(namespace(), codec="raw", max_bytes=10**6, protection="none", key=None)


def _devices_of(block: KVBlock) -> list[torch.device]:
    return [_ON[index % 2] for index in range(len(block.tensors))]


def _wrong(folder: Path, records: Any, turns: int, *, delay: float = 0.003) -> int:
    """In how many of so many turns a prompt that is prefetched from the disk has other bytes on the devices."""
    delays, wrong = random.Random(1), 0
    disk = DiskTier(folder, capacity_bytes=10**6, records=records)
    for chunk in _CHUNKS:
        disk.store(block_of(chunk, _SIZE))
    disk.close()
    with LateDevices(delay=lambda: delays.uniform(0, 2 * delay)) as seen:
        for _ in range(turns):
            streams = seen.streams_for(_ON)
            to_devices = Uploads(streams, devices=_devices_of)
            tier = DiskTier(folder, records=records, files=Files(memory=to_devices.memory))
            rules = LoadRules(to_memory=to_devices.upload)
            store = TieredStore(MemoryStore(10**6), [tier], rules=rules, streams=streams)
            assert store.fetch(_CHUNKS)[1] == len(_CHUNKS)
            with store.lease(_CHUNKS) as lease:  # waits for what is under way
                right = [block_of(chunk, _SIZE) for chunk in _CHUNKS]
                same = [
                    all(torch.equal(host(a), b) for a, b in zip(found.tensors, wanted.tensors, strict=True))
                    for found, wanted in zip(lease.blocks, right, strict=True)
                ]
                wrong += not all(same)
            store.close()
        assert not seen.unpinned_bytes
    return wrong


def test_memory_is_kept_until_it_was_copied(tmp_path: Path, records: Any, small: None) -> None:
    assert _wrong(tmp_path, records, 15) == 0


def test_seeded_memory_that_is_given_up_at_once(
    tmp_path: Path, records: Any, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgets = property(lambda self: (None, ()), lambda self, value: None)
    monkeypatch.setattr(Uploads, "_under_way", forgets, raising=False)
    assert _wrong(tmp_path, records, 5, delay=0.02) == 5


def test_seeded_memory_that_is_given_up_without_waiting(
    tmp_path: Path, records: Any, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.hf.streams._Events.synchronize", lambda self: None)
    assert _wrong(tmp_path, records, 5, delay=0.02) == 5


def test_without_pinned_memory_blocks_come_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    blocks = [block_of(chunk, _SIZE) for chunk in _CHUNKS[:3]]
    with LateDevices() as seen:
        streams = seen.streams_for(_ON)
        to_devices = Uploads(streams, devices=_devices_of)
        seen.host_memory = _none  # type: ignore[method-assign]
        assert len(to_devices.memory(5000)) == 5000
        found = list(to_devices.upload(iter([*blocks[:2], None, blocks[2]])))
        streams.join()
        assert found.pop(2) is None
        for block, wanted in zip(found, blocks, strict=True):
            assert block is not None
            assert [tensor.device for tensor in block.tensors] == _ON
            assert all(torch.equal(host(a), b) for a, b in zip(block.tensors, wanted.tensors, strict=True))
    assert caplog.text.count("no more can be pinned") == 1


def _none(nbytes: int) -> torch.Tensor:
    raise RuntimeError("no more")


@pytest.mark.parametrize(("tensors", "devices", "uploads"), [(1, 1, 3), (12, 1, 3), (12, 2, 32)])
def test_few_copies_carry_many_tensors(tensors: int, devices: int, uploads: int) -> None:
    """16 blocks of 2 MiB: in batches of 16 MiB, the second out of two slabs; on two devices one for each half."""
    places = [_ON[index * devices // tensors] for index in range(tensors)]
    with LateDevices() as seen:
        to_devices = Uploads(seen.streams_for(_ON), devices=lambda block: places)
        blocks = []
        for chunk in _CHUNKS[:16]:
            read = torch.frombuffer(to_devices.memory(2 * 2**20), dtype=torch.uint8)
            blocks.append(replace(block_of(chunk), tensors=read.tensor_split(tensors), nbytes=len(read)))
        list(to_devices.upload(iter(blocks)))
        assert not seen.unpinned_bytes
        assert seen.counts["upload"] == uploads


def test_copies_begin_after_what_used_their_memory_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's memory is given out again while what was computed in it is still in the queue."""
    asked: list[str] = []
    with LateDevices() as seen:
        streams = seen.streams_for(_ON)
        event, empty, copy = streams.event, torch.empty, streams.copy

        def noted(what: str, does: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if what != "memory" or str(kwargs.get("device", "cpu")) != "cpu":
                    asked.append(what)
                return does(*args, **kwargs)

            return call

        monkeypatch.setattr(streams, "event", noted("event", event))
        monkeypatch.setattr(streams, "copy", noted("copy", copy))
        monkeypatch.setattr(torch, "empty", noted("memory", empty))
        to_devices = Uploads(streams, devices=_devices_of)
        blocks = [block_of(chunk, _SIZE) for chunk in _CHUNKS[:6]]
        assert len(list(to_devices.upload(blocks))) == 6
    assert asked.count("memory") > 6, "each block's, and what neighbours are copied to together"
    assert asked[asked.index("event") :] == ["event", "copy"]
