from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, as a user has one."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=260, max_position_embeddings=2048).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("KVBOOST_CONFIG", "KVBOOST_DISK_CACHE_DIR", "KVBOOST_TENANT", "KVBOOST_REMOTE_URL"):
        monkeypatch.delenv(name, raising=False)
