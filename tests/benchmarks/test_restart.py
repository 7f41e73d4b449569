"""The restart benchmark, on a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.runner import main
from tests.benchmarks.test_nonprefix_ttft import folder  # noqa: F401 - a fixture


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_a_new_engine_reads_from_the_disk_and_from_redis(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw = tmp_path / "raw.json"
    options = ["--length", "2000", "--repeat", "2", "--json", str(raw)]
    assert main(["restart", "--model", str(folder), *options]) == 0
    table = capsys.readouterr().out
    assert "| disk" in table
    assert "| redis" in table
    document = json.loads(raw.read_text())["raw"]
    for tier in ("disk", "redis"):
        assert [len(times) for times in document["samples"][tier].values()] == [2] * 6
        assert set(document["stages"][tier]) > {"lease", "place", "first_token"}
