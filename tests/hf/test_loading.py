"""Where weights go while they are loaded. ``meta`` stands for an accelerator: it takes weights and has no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvboost.errors import ConfigError
from kvboost.hf import loading
from kvboost.hf.loading import ModelSource, load_resident
from tests.helpers.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every load, and no model is moved."""
    seen: list[dict[str, Any]] = []
    right = AutoModelForCausalLM.from_pretrained

    def from_pretrained(path: str, **arguments: Any) -> Any:
        seen.append(arguments)
        return right(path, **arguments)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return seen


def _not_moved(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    raise AssertionError("the model was moved after it was loaded")


def test_weights_go_straight_to_the_device(
    folder: Path, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "to", _not_moved)
    model = load_resident(ModelSource(str(folder), device="meta"))
    assert [arguments["device_map"] for arguments in asked] == [torch.device("meta")]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not model.training


def test_the_cpu_and_a_map_of_ones_own_are_left_alone(folder: Path, asked: list[dict[str, Any]]) -> None:
    load_resident(ModelSource(str(folder), device="cpu"))
    load_resident(ModelSource(str(folder), model_kwargs={"device_map": {"": "cpu"}}))
    assert [arguments.get("device_map") for arguments in asked] == [None, {"": "cpu"}]


def test_without_accelerate_it_is_moved_and_said(
    folder: Path, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    model = load_resident(ModelSource(str(folder), device="meta"))
    assert "device_map" not in asked[0]
    assert model.device.type == "meta"
    assert "install accelerate" in caplog.text


def test_a_download_that_was_cut_off_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="are damaged .*download them again"):
        load_resident(ModelSource(str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "there is no model folder at ./nowhere"),
        ("models/of/mine", "there is no model folder at models/of/mine"),
        ("nowhere/", "there is no model folder at nowhere/"),
        ("FOLDER/file", "is a file; give the folder of a model"),
        ("FOLDER", "the folder has no config.json"),
        ("nobody/nowhere", "there is no such folder here, and from the hub"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ConfigError, match=message):
        load_resident(ModelSource(name.replace("FOLDER", str(tmp_path)), device="cpu"))


def test_a_name_of_the_hub_stays_as_it_is() -> None:
    assert [ModelSource(name).path for name in ("gpt2", "owner/some-model_1.5B")] == ["gpt2", "owner/some-model_1.5B"]
