"""The disk benchmark in small: every way is timed, and the cache that is opened has as many chunks as asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.runner import main


def test_every_way_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "disk.json"
    options = ["--values", "3", "--repeat", "2", "--chunks", "40", "--folder", str(tmp_path), "--json", str(file)]
    assert main(["disk_tier", *options]) == 0
    raw = json.loads(file.read_text())["raw"]
    for way in ("tier, O_DIRECT", "tier, buffered reads", "bytes only, O_DIRECT", "bytes only, buffered"):
        assert len(raw["read"][way]["gb_per_s"]) == len(raw["read"][way]["cpu_ms_per_mb"]) == 2
        assert min(raw["read"][way]["gb_per_s"]) > 0
    assert len(raw["write"]["tier"]["gb_per_s"]) == 4
    assert len(raw["reopen_s"]) == 2
    assert "Disk: cold reads" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]
