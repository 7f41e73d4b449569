"""The restart measurement, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost.bench.cli import main
from tests.bench.test_moved import folder  # noqa: F401 - a fixture


def test_a_new_engine_reads_from_the_disk(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    raw = tmp_path / "raw.json"
    options = ["--lengths", "2000", "--repeat", "2", "--json", str(raw)]
    assert main(["restart", "--model", str(folder), *options]) == 0
    assert "| disk" in capsys.readouterr().out
    (samples,) = json.loads(raw.read_text())["raw"]["samples"]
    assert all(len(samples[name]) == 2 for name in ("full reading", "memory", "disk"))
