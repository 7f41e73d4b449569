"""Blocks from disk on simulated devices whose copies come late: pinned all the way, few, and never used too early."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.hf.streams import AcceleratorStreams
from kvboost.store import uploads
from tests.helpers.devices import host, spread
from tests.helpers.late_devices import LateDevices
from tests.helpers.models import tiny_model

_LAYERS, _CHUNK, _TOKENS = 4, 16, 400
_PROMPT = torch.randint(3, 97, (_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
_BLOCK = _LAYERS * 2 * 2 * 8 * _CHUNK * 4  # bytes of a chunk: keys and values of two heads of eight, in float32


def _model(devices: int) -> Any:
    model = tiny_model("llama", num_hidden_layers=_LAYERS, max_position_embeddings=9000)
    return spread(model, layers=_LAYERS, devices=devices)


@contextmanager
def _engine(folder: Path, model: Any, **options: Any) -> Iterator[KVBoost]:
    settings = {"chunk_size": _CHUNK, "chunking": "fixed", "quality": "exact", "workspace_bytes": 0, **options}
    with KVBoost(model, None, disk_cache_dir=folder, **settings) as engine:
        yield engine


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two blocks and slabs of a few: so that memory is used again within one prompt."""
    patch = monkeypatch
    patch.setattr(uploads, "_BATCH_BYTES", 2 * _BLOCK)
    patch.setattr(uploads, "_SLAB_BYTES", 4 * (_BLOCK + 2 * 4096))


def _protected(folder: Path, encrypted: bool) -> dict[str, Any]:
    """Settings; what is decrypted lies in pageable memory."""
    if not encrypted:
        return {}
    (folder / "key").write_bytes(bytes(range(32)))
    (folder / "key").chmod(0o600)
    return {"record_protection": "encrypt", "record_key_file": folder / "key"}


def _differing(folder: Path, devices: int, turns: int, *, longest: float = 0.004, **options: Any) -> int:
    """How many of so many new engines get other logits with blocks from the disk than one with blocks in memory."""
    delays, model, wrong = random.Random(1), _model(devices), 0
    with LateDevices(delay=lambda: delays.uniform(longest / 2, longest)):
        with _engine(folder, model, **options) as engine:
            engine.prefill(_PROMPT)
            right = host(engine.prefill(_PROMPT).logits).clone()
        for _ in range(turns):
            with _engine(folder, model, **options) as engine:
                found = engine.prefill(_PROMPT)
                assert found.reuse.tiers == {"disk": _TOKENS - 1}
                wrong += not torch.equal(host(found.logits), right)
    return wrong


@pytest.mark.parametrize(("devices", "turns"), [(1, 15), (2, 3)])
def test_late_copies_are_waited_for(devices: int, turns: int, tmp_path: Path, small: None) -> None:
    assert _differing(tmp_path, devices, turns) == 0


@pytest.mark.parametrize(("bits", "encrypted"), [(8, True), (4, False)])
def test_so_are_those_of_what_was_packed_or_decrypted(bits: int, encrypted: bool, tmp_path: Path, small: None) -> None:
    assert _differing(tmp_path / "records", 2, 2, kv_cache_bits=bits, **_protected(tmp_path, encrypted)) == 0


def test_seeded_reading_before_the_copies_are_done(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AcceleratorStreams, "join", lambda self: None)
    assert _differing(tmp_path, 1, 3, longest=0.02) == 3


@pytest.mark.parametrize(("devices", "encrypted"), [(1, False), (1, True), (2, False)])
def test_no_block_is_uploaded_from_pageable_memory(devices: int, encrypted: bool, tmp_path: Path) -> None:
    model, folder, options = _model(devices), tmp_path / "records", _protected(tmp_path, encrypted)
    with LateDevices() as seen:
        with _engine(folder, model, **options) as engine:
            engine.prefill(_PROMPT)
            seen.during(lambda: engine.prefill(_PROMPT))
            from_memory = seen.unpinned_bytes  # ids and the like
        with _engine(folder, model, **options) as engine:
            seen.during(lambda: engine.prefill(_PROMPT))
            assert seen.unpinned_bytes == from_memory
            pinned = [event.nbytes for event in seen.events if event.kind == "upload" and event.pinned]
            assert sum(pinned) >= _TOKENS // _CHUNK * _BLOCK
            # All blocks of one device lie side by side; of two, each has its part of every block.
            assert len(pinned) <= (1 if devices == 1 else 2 * _TOKENS // _CHUNK)
