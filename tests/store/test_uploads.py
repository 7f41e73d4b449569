"""Blocks on their way from the disk to simulated devices: in few copies, out of pinned memory kept till then."""

from __future__ import annotations

import random
from collections import deque
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
    monkeypatch.setattr(uploads, "_SLABS", 1)


@pytest.fixture
def records() -> Any:
    return record_format(namespace(), codec="raw", max_bytes=10**6, protection="none", key=None)


def _devices_of(block: KVBlock) -> list[torch.device]:
    return [_ON[index % 2] for index in range(len(block.tensors))]


def _on_host(block: KVBlock) -> KVBlock:
    return replace(block, tensors=tuple(host(tensor) for tensor in block.tensors))


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


class _Forgets(deque[Any]):
    """Holds nothing."""

    def append(self, item: Any) -> None:
        pass


def test_seeded_memory_that_is_given_up_at_once(
    tmp_path: Path, records: Any, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Uploads.__init__

    def forgets(self: Uploads, *arguments: Any, **named: Any) -> None:
        right(self, *arguments, **named)
        self._under_way = _Forgets()

    monkeypatch.setattr(Uploads, "__init__", forgets)
    assert _wrong(tmp_path, records, 5, delay=0.02) == 5


def test_seeded_memory_that_is_given_up_without_waiting(
    tmp_path: Path, records: Any, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.hf.streams._Events.synchronize", lambda self: None)
    assert _wrong(tmp_path, records, 5, delay=0.02) == 5
