from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvboost.direct_io import PAGE
from kvboost.errors import ConfigError
from kvboost.hf import checkpoint as module
from kvboost.hf.checkpoint import Shards

_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=5
    ),
    piece=st.sampled_from([4096, 8192]),
)
@settings(max_examples=40, deadline=None)
def test_reads_what_the_library_wrote(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[torch.dtype, list[int]]], piece: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"t{i}": (torch.randn(shape) * 99).to(dtype) for i, (dtype, shape) in enumerate(shapes)}
    save_file(tensors, folder / "a.safetensors", metadata={"format": "pt"})
    found = Shards([folder / "a.safetensors"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        for name, tensor in tensors.items():
            assert found.tensors[name].shape == tensor.shape
            for dtype in (tensor.dtype, torch.float32):
                read = b"".join(map(bytes, found.pieces(name, dtype)))
                assert read == tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_the_key_follows_the_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "one")
    save_file({"b": torch.zeros(3)}, tmp_path / "two")
    both = Shards([tmp_path / "one", tmp_path / "two"])
    assert set(both.tensors) == {"a", "b"}
    assert Shards([tmp_path / "one", tmp_path / "two"]).key == both.key
    save_file({"b": torch.ones(3)}, tmp_path / "two")
    os.utime(tmp_path / "two", (1, 1))  # the clock of file systems is coarse
    assert Shards([tmp_path / "one", tmp_path / "two"]).key != both.key


@given(st.integers(0, 4 * PAGE), st.data())
@settings(max_examples=60, deadline=None)
def test_any_byte_of_a_small_tensor_is_in_the_sample(
    tmp_path_factory: pytest.TempPathFactory, size: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("sample")
    files = {"a.safetensors": torch.zeros(size, dtype=torch.uint8), "b.safetensors": torch.zeros(9)}
    for name, tensor in files.items():
        save_file({name: tensor}, folder / name)
    shards = Shards([folder / name for name in files])
    before = shards.sample()
    assert shards.sample() == before
    if size:
        stored = shards.tensors["a.safetensors"]
        with stored.file.open("r+b") as file:
            file.seek(stored.begin + data.draw(st.integers(0, size - 1)))
            file.write(b"b")
        assert shards.sample() != before


def test_a_large_tensor_costs_four_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, size = tmp_path / "a", 100 * PAGE
    file.write_bytes(bytes(3 * size))
    read: list[int] = []
    right = os.pread
    monkeypatch.setattr(os, "pread", lambda *call: read.append(call[2]) or right(*call))
    before = module.sample_pages(file, [(0, size), (size + 5, 2 * size)])
    assert len(read) == 8
    assert {0, size - PAGE, size + 5, 2 * size - PAGE} <= set(read)
    seen = {}
    for place in (0, 33 * PAGE, 50 * PAGE, size - 1):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"b")
        seen[place] = module.sample_pages(file, [(0, size), (size + 5, 2 * size)]) != before
        file.write_bytes(bytes(3 * size))
    assert seen == {0: True, 33 * PAGE: True, 50 * PAGE: False, size - 1: True}, "what a sample cannot see"


def test_a_small_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(PAGE))
    read: list[int] = []
    right = os.pread
    monkeypatch.setattr(os, "pread", lambda *call: read.append(call[2]) or right(*call))
    module.sample_pages(tmp_path / "a", [(0, 9), (9, PAGE)])
    assert sorted(read) == [0, 9]


@pytest.mark.parametrize("spoil", ["empty", "text", "cut", "long"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, spoil: str) -> None:
    file = tmp_path / "a"
    save_file({"a": torch.zeros(300)}, file)
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "text": b"hello, this is no model", "cut": whole[:-4], "long": b"\xff" * 99}[spoil])
    with pytest.raises(ConfigError, match="check the checkpoint"):
        Shards([file])


def test_the_key_has_the_own_name_of_a_linked_file(tmp_path: Path) -> None:
    """In the hub's cache that is the digest of its content, and names, times and sampled pages may all be equal."""
    keys = []
    for digest in ("0a1b", "2c3d"):
        folder = tmp_path / digest
        folder.mkdir()
        save_file({"a": torch.zeros(3)}, folder / digest)
        os.utime(folder / digest, (1, 1))
        (folder / "model.safetensors").symlink_to(folder / digest)
        keys.append(Shards([folder / "model.safetensors"]).key)
    assert keys[0] != keys[1]
