"""What names the KV of a vLLM server's model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvboost.integrations.vllm import identity
from tests.helpers.models import tiny_model


def _fields(folder: Path, *, trust_remote_code: bool) -> dict[str, str]:
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=dict),
        model=str(folder),
        revision=None,
        code_revision=None,
        trust_remote_code=trust_remote_code,
        max_model_len=64,
        dtype=torch.float32,
        quantization=None,
        enforce_eager=True,
    )
    config = SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        attention_config=SimpleNamespace(backend=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    return identity.model_fields(config, block_size=16, version="1")


@pytest.mark.parametrize("trusted", [False, True])
def test_code_beside_a_checkpoint_is_in_the_key_if_it_is_run(tmp_path: Path, trusted: bool) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    found = []
    for text in ("SCALE = 2.0", "SCALE = 3.0"):
        (tmp_path / "modeling_scaled.py").write_text(text)
        found.append(_fields(tmp_path, trust_remote_code=trusted))
    assert (found[0] != found[1]) == trusted


def test_this_packages_code_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    before = _fields(tmp_path, trust_remote_code=False)
    assert _fields(tmp_path, trust_remote_code=False) == before
    monkeypatch.setattr(identity, "code_digest", lambda: "other", raising=False)
    assert _fields(tmp_path, trust_remote_code=False) != before


def test_an_adapter_whose_files_change_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM reads the files again once it has dropped the adapter, and does not say when."""
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"one")
    adapters = identity.Adapters()
    lora = SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path), load_inplace=False)
    first = adapters.digest(lora)
    assert first is not None
    assert adapters.digest(lora) == first
    file.write_bytes(b"another")
    assert adapters.digest(lora) is None
    assert adapters.digest(lora) is None
    assert caplog.text.count("have changed under one name") == 1
    assert adapters.digest(SimpleNamespace(**{**vars(lora), "load_inplace": True})) not in (None, first)


def test_adapters_that_are_known_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    monkeypatch.setattr(identity, "_MAX_REQUEST_KINDS", 3)
    adapters = identity.Adapters()
    for number in range(10):
        adapters.digest(SimpleNamespace(lora_int_id=number, lora_path=str(tmp_path), load_inplace=False))
    assert len(adapters._known) == 3
