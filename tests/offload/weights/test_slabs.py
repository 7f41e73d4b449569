from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.direct_io import PAGE
from kvboost.errors import ConfigError
from kvboost.offload.weights.slabs import REST, Slab, SlabFolder, lay_out, make_slabs

_DTYPES = [torch.float32, torch.bfloat16, torch.int8]


class Checkpoint:
    """Random weights, and which of them were asked for."""

    def __init__(self, slabs: list[Slab]) -> None:
        self.bytes = {w.name: os.urandom(w.size) for slab in slabs for w in slab.weights}
        self.asked: list[str] = []
        self.dies_at: str | None = None

    def pieces(self, name: str) -> Iterator[memoryview]:
        self.asked.append(name)
        if name == self.dies_at:
            raise KeyboardInterrupt
        whole = memoryview(self.bytes[name])
        for start in range(0, len(whole), 1000):
            yield whole[start : start + 1000]


def _slabs(layers: int = 3) -> list[Slab]:
    rest = lay_out(REST, [("embed", torch.float32, (50, 30)), ("norm", torch.float32, (30,))])
    shapes = [("q", torch.bfloat16, (30, 40)), ("k", torch.float32, (30, 70)), ("v", torch.int8, (5, 2, 7))]
    return [rest, *(lay_out(f"layer-{i:04}", [(f"{i}.{n}", d, s) for n, d, s in shapes]) for i in range(layers))]


def _holds(folder: SlabFolder, checkpoint: Checkpoint) -> bool:
    return all(
        b"".join(map(bytes, folder.pieces(slab.name, weight))) == checkpoint.bytes[weight.name]
        for slab in (folder.rest, *folder.layers)
        for weight in slab.weights
    )


@given(st.lists(st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(1, 60), min_size=1, max_size=3)), min_size=1))
@settings(max_examples=30, deadline=None)
def test_every_weight_begins_at_a_page_and_none_overlap(shapes: list[Any]) -> None:
    slab = lay_out("layer", [(str(i), dtype, shape) for i, (dtype, shape) in enumerate(shapes)])
    assert [w.shape for w in slab.weights] == [tuple(shape) for _, shape in shapes]
    for weight, following in zip(slab.weights, [*slab.weights[1:], None], strict=True):
        assert weight.offset % PAGE == 0
        assert weight.size == prod(weight.shape) * weight.dtype.itemsize
        assert weight.end >= weight.offset + weight.size
        assert weight.end == (following.offset if following else slab.size)


def test_what_was_written_is_read_back_and_made_once(tmp_path: Path) -> None:
    slabs = _slabs()
    checkpoint = Checkpoint(slabs)
    folder = make_slabs(tmp_path, slabs, pieces=checkpoint.pieces, key="a")
    assert _holds(folder, checkpoint)
    assert sorted(checkpoint.asked) == sorted(checkpoint.bytes)
    assert {p.name for p in tmp_path.iterdir()} == {"lock", "slabs.json", *(f"{s.name}.slab" for s in slabs)}
    again = make_slabs(tmp_path, slabs, pieces=checkpoint.pieces, key="a")
    assert _holds(again, checkpoint)
    assert again.digests == folder.digests
    assert len(checkpoint.asked) == len(checkpoint.bytes)


def test_a_run_that_died_goes_on_where_it_stopped(tmp_path: Path) -> None:
    slabs = _slabs()
    checkpoint = Checkpoint(slabs)
    checkpoint.dies_at = "1.k"
    with pytest.raises(KeyboardInterrupt):
        make_slabs(tmp_path, slabs, pieces=checkpoint.pieces, key="a")
    assert not (tmp_path / "layer-0001.slab").exists()
    checkpoint.dies_at, checkpoint.asked = None, []
    assert _holds(make_slabs(tmp_path, slabs, pieces=checkpoint.pieces, key="a"), checkpoint)
    assert {name[0] for name in checkpoint.asked} == {"1", "2"}


def test_another_checkpoint_or_layout_is_made_anew(tmp_path: Path) -> None:
    slabs = _slabs()
    make_slabs(tmp_path, slabs, pieces=Checkpoint(slabs).pieces, key="a")
    other = Checkpoint(slabs)
    assert _holds(make_slabs(tmp_path, slabs, pieces=other.pieces, key="b"), other)
    fewer = _slabs(2)
    turned = [fewer[0], lay_out("layer-0000", [(w.name, w.dtype, w.shape[::-1]) for w in fewer[1].weights]), fewer[2]]
    third = Checkpoint(turned)
    third.bytes |= {w.name: other.bytes[w.name] for w in (*fewer[0].weights, *fewer[2].weights)}
    assert _holds(make_slabs(tmp_path, turned, pieces=third.pieces, key="b"), third)
    assert {name[0] for name in third.asked} == {"0"}  # the others were there


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[PAGE + 17] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-PAGE])


@pytest.mark.parametrize("damage", [_flip_a_bit, _cut, Path.unlink])
def test_a_damaged_slab_is_made_again(tmp_path: Path, damage: Any) -> None:
    slabs = _slabs()
    checkpoint = Checkpoint(slabs)
    make_slabs(tmp_path, slabs, pieces=checkpoint.pieces, key="a")
    damage(tmp_path / "layer-0001.slab")
    checkpoint.asked = []
    assert _holds(make_slabs(tmp_path, slabs, pieces=checkpoint.pieces, key="a"), checkpoint)
    assert {name[0] for name in checkpoint.asked} == {"1"}


@pytest.mark.parametrize("header", ["", "{", "[]", '{"version": 99}', '{"version": 1, "checkpoint": "a"}'])
def test_a_header_nobody_can_read_is_written_anew(tmp_path: Path, header: str) -> None:
    slabs = _slabs()
    checkpoint = Checkpoint(slabs)
    make_slabs(tmp_path, slabs, pieces=checkpoint.pieces, key="a")
    (tmp_path / "slabs.json").write_text(header)
    assert _holds(make_slabs(tmp_path, slabs, pieces=checkpoint.pieces, key="a"), checkpoint)
    told = json.loads((tmp_path / "slabs.json").read_text())
    assert [slab["name"] for slab in told["slabs"]] == [slab.name for slab in slabs]


def test_what_cannot_be_kept_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slabs = _slabs()
    checkpoint = Checkpoint(slabs)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="weight_dir="):
        make_slabs(tmp_path / "file" / "folder", slabs, pieces=checkpoint.pieces, key="a")
    short = Checkpoint(slabs)
    short.bytes["2.k"] = short.bytes["2.k"][:-1]
    with pytest.raises(ConfigError, match=r"2\.k has 8399 bytes in the checkpoint instead of 8400"):
        make_slabs(tmp_path / "short", slabs, pieces=short.pieces, key="a")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("", (), {"free": 100}))
    with pytest.raises(ConfigError, match="free some"):
        make_slabs(tmp_path / "full", slabs, pieces=checkpoint.pieces, key="a")
