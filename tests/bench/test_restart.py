"""The restart measurement, on a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvboost.bench.cli import main
from tests.bench.test_moved import folder  # noqa: F401 - a fixture


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_a_new_engine_reads_from_the_disk_and_from_redis(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw = tmp_path / "raw.json"
    options = ["--lengths", "2000", "--repeat", "2", "--json", str(raw)]
    assert main(["restart", "--model", str(folder), *options]) == 0
    table = capsys.readouterr().out
    assert "| disk" in table
    assert "| redis" in table
    (samples,) = json.loads(raw.read_text())["raw"]["samples"]
    assert all(len(samples[name]) == 2 for name in ("full reading", "memory", "disk", "redis"))
