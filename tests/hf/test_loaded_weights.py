"""Digests kept between starts are never wrong, whatever happened to the files, to the cache or to the weights."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.hf import loaded_weights as module
from kvboost.hf import weights
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.loaded_weights import LoadedWeights, find_checkpoint
from kvboost.hf.loading import ModelSource
from kvboost.hf.probe import probe_model
from kvboost.offload.weights.load import load_model
from tests.helpers.files import same_times
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_LAYOUT = probe_model(tiny_model("llama")).layout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBOOST_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder, max_shard_size="20KB")
    byte_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the weights that were hashed."""
    names: list[str] = []
    right = weights.digest_tensor

    def counted(name: str, tensor: torch.Tensor) -> bytes:
        names.append(name)
        return right(name, tensor)

    monkeypatch.setattr(weights, "digest_tensor", counted)
    return names


def _load(folder: Path, **arguments: Any) -> Any:
    given: dict[str, Any] = {"dtype": "auto", "device": "cpu", "model_kwargs": {}, **arguments}
    budget = {name: given.pop(name) for name in ("weight_budget", "weight_dir") if name in given}
    return load_model(ModelSource(str(folder), **given), **budget)[0]


def _weights(model: Any) -> str:
    return ModelIdentity(model, _LAYOUT).snapshot().fields["weights"]


def _truth(model: Any) -> str:
    """What hashing every weight in memory gives."""
    return weights.digest_weights(model, weights.weights_by_owner(model)[None])


def _cached(folder: Path) -> list[Path]:
    return list((folder.parent / "cache").rglob("*.json"))


def test_the_second_start_hashes_nothing(folder: Path, hashed: list[str]) -> None:
    first = _weights(_load(folder))
    assert len(hashed) == len(list(_load(folder).parameters()))
    hashed.clear()
    model = _load(folder)
    assert _weights(model) == first
    assert hashed == []
    assert _truth(model) == first
    assert len(_cached(folder)) == 1


def _write_to(weight: torch.nn.Parameter, layer: Any) -> None:
    with torch.no_grad():
        weight.mul_(2.0)


def _exchange(weight: torch.nn.Parameter, layer: Any) -> None:
    layer.weight = torch.nn.Parameter(weight.detach() * 2)


def _exchange_data(weight: torch.nn.Parameter, layer: Any) -> None:
    weight.data = weight.detach() * 2


@pytest.mark.parametrize("change", [_write_to, _exchange, _exchange_data])
def test_a_weight_changed_after_loading_is_hashed(folder: Path, hashed: list[str], change: Callable[..., None]) -> None:
    before = _weights(_load(folder))
    hashed.clear()
    model = _load(folder)
    layer = model.model.layers[1].mlp.up_proj
    change(layer.weight, layer)
    found = _weights(model)
    assert hashed == ["model.layers.1.mlp.up_proj.weight"]
    assert found == _truth(model) != before
    assert _weights(_load(folder)) == before, "a changed weight's digest was kept for the file's"


def test_without_that_check_a_changed_weight_would_have_the_files_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _weights(_load(folder))
    model = _load(folder)
    _write_to(model.lm_head.weight, model.lm_head)
    monkeypatch.setattr(LoadedWeights, "unchanged", lambda self, weight: True)
    assert _weights(model) == before != _truth(model)


def test_a_change_that_the_user_tells_is_hashed(folder: Path, hashed: list[str]) -> None:
    before = _weights(_load(folder))
    model = _load(folder)
    identity = ModelIdentity(model, _LAYOUT)
    identity.snapshot()
    model.model.norm.weight.data.mul_(2.0)  # cannot be seen
    identity.weights_changed()
    assert identity.snapshot().fields["weights"] == _truth(model) != before


def test_only_the_first_to_look_at_a_loaded_model_trusts_the_files(folder: Path) -> None:
    _weights(_load(folder))
    model = _load(folder)
    before = _weights(model)
    model.model.norm.weight.data.mul_(2.0)  # cannot be seen
    assert _weights(model) == _truth(model) != before


def test_a_hidden_change_beside_a_visible_one_is_hashed(folder: Path) -> None:
    _weights(_load(folder))
    model = _load(folder)
    identity = ModelIdentity(model, _LAYOUT)
    identity.snapshot()
    model.model.norm.weight.data.mul_(2.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert identity.snapshot().fields["weights"] == _truth(model)


def test_a_copy_of_a_loaded_model_is_hashed(folder: Path, hashed: list[str]) -> None:
    before = _weights(_load(folder))
    hashed.clear()
    assert _weights(copy.deepcopy(_load(folder))) == before
    assert len(hashed) == len(list(_load(folder).parameters()))


def test_a_changed_file_is_hashed_even_with_its_old_inode_time_and_size(folder: Path) -> None:
    before = _weights(_load(folder))
    tiny_model("llama", seed=1).save_pretrained(folder.parent / "other", max_shard_size="20KB")
    for file in folder.glob("*.safetensors"):
        old = file.stat()
        with file.open("r+b") as stream:  # in place: the inode stays
            stream.write((folder.parent / "other" / file.name).read_bytes())
        os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
        new = file.stat()
        assert (new.st_ino, new.st_size, new.st_mtime_ns) == (old.st_ino, old.st_size, old.st_mtime_ns)
    model = _load(folder)
    assert _weights(model) == _truth(model) != before


def test_another_checkpoint_with_the_same_times_is_hashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and FUSE mounts may give every file the same times and inodes."""
    same_times(monkeypatch)
    before = _weights(_load(folder))
    tiny_model("llama", seed=1).save_pretrained(folder, max_shard_size="20KB")
    model = _load(folder)
    assert _weights(model) == _truth(model) != before


def test_a_file_written_in_place_is_hashed(folder: Path) -> None:
    before = _weights(_load(folder))
    file = sorted(folder.glob("*.safetensors"))[0]
    with file.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        last = stream.read(4)
        stream.seek(-4, os.SEEK_END)
        stream.write(bytes(byte ^ 1 for byte in last))
    model = _load(folder)
    assert _weights(model) == _truth(model) != before


def test_another_type_is_hashed_once(folder: Path, hashed: list[str]) -> None:
    _weights(_load(folder))
    hashed.clear()
    model = _load(folder, dtype=torch.bfloat16)
    first = _weights(model)
    assert first == _truth(model)
    assert set(hashed) == {name for name, _ in model.named_parameters()}
    hashed.clear()
    again = _load(folder, dtype=torch.bfloat16)
    assert _weights(again) == first
    assert hashed == [], "a type that the files do not hold is hashed at every start"
    assert _truth(again) == first


def test_weights_from_elsewhere_are_hashed(folder: Path) -> None:
    assert find_checkpoint(str(folder), {"attn_implementation": "eager"}) is not None
    for arguments in ({"key_mapping": {}}, {"trust_remote_code": True}, {"quantization_config": {}}):
        assert find_checkpoint(str(folder), arguments) is None
    assert find_checkpoint(str(folder.parent), {}) is None
    tiny_model("llama", seed=1).save_pretrained(folder)  # beside the shards, which stay
    assert (folder / "model.safetensors").exists()
    tiny_model("llama").save_pretrained(folder.parent / "again", max_shard_size="20KB")
    for file in (folder.parent / "again").glob("model*"):
        file.rename(folder / file.name)
    assert find_checkpoint(str(folder), {}) is None
    model = _load(folder)
    assert _weights(model) == _truth(model)


def test_weights_the_files_lack_are_hashed(folder: Path, hashed: list[str]) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    from safetensors.torch import load_file, save_file

    name = index["weight_map"].pop("lm_head.weight")
    tensors = load_file(folder / name)
    del tensors["lm_head.weight"]
    if not tensors:
        (folder / name).unlink()
    else:
        save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _weights(_load(folder))
    hashed.clear()
    model = _load(folder)  # its output layer is made of random numbers
    assert _weights(model) == _truth(model)
    assert "lm_head.weight" in hashed


@pytest.mark.parametrize("content", ["", "{", "[]", '{"digests": 3}', '{"digests": {"lm_head.weight": "00"}}'])
def test_a_damaged_cache_is_made_anew(
    folder: Path, hashed: list[str], caplog: pytest.LogCaptureFixture, content: str
) -> None:
    before = _weights(_load(folder))
    (file,) = _cached(folder)
    whole = json.loads(file.read_text())
    file.write_text(content)
    with caplog.at_level(logging.DEBUG, logger="kvboost"):
        assert _weights(_load(folder)) == before
    assert "cannot be used" in caplog.text
    assert json.loads(file.read_text()) == whole


def test_a_cache_that_cannot_be_written_costs_only_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = folder.parent / "blocked"
    blocked.write_text("no folder")
    monkeypatch.setenv("KVBOOST_CACHE_HOME", str(blocked))
    model = _load(folder)
    with caplog.at_level(logging.DEBUG, logger="kvboost"):
        assert _weights(model) == _truth(model)
    assert "cannot be kept" in caplog.text


def test_the_oldest_files_of_a_kind_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    for number in range(6):
        path = tmp_path / f"{number}.json"
        module.keep(path, number)
        os.utime(path, (number, number))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["3.json", "4.json", "5.json"]
