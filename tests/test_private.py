"""A file that others can read is refused, unless an orchestrator mounted it for us."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvboost import ConfigError
from kvboost.private import read_private


def _read(file: Path) -> bytes:
    return read_private(file, name="secret_file", remedy="make one")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_what_others_can_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"key")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"open to other users; run: chmod 600 {file}"):
        _read(file)
    file.chmod(0o600)
    assert _read(file) == b"key"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of root's")
def test_a_secret_that_root_mounted_for_our_group_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"key")
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    file.chmod(0o440)
    assert _read(file) == b"key"
    file.chmod(0o444)
    with pytest.raises(ConfigError, match="open to other users"):
        _read(file)
