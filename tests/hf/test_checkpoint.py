from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

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


@pytest.mark.parametrize("spoil", ["empty", "text", "cut", "long"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, spoil: str) -> None:
    file = tmp_path / "a"
    save_file({"a": torch.zeros(300)}, file)
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "text": b"hello, this is no model", "cut": whole[:-4], "long": b"\xff" * 99}[spoil])
    with pytest.raises(ConfigError, match="check the checkpoint"):
        Shards([file])
