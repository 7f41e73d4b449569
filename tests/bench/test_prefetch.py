"""The prefetch measurement, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost.bench.cli import main
from tests.bench.test_moved import folder  # noqa: F401 - a fixture


def test_every_way_to_a_first_token_is_timed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    raw = tmp_path / "raw.json"
    options = ["--repeat", "2", "--tiers", "disk", "--json", str(raw)]
    assert main(["prefetch", "--model", str(folder), *options]) == 0
    assert "| disk" in capsys.readouterr().out
    document = json.loads(raw.read_text())["raw"]
    assert [len(samples) for samples in document["samples"]["disk"].values()] == [2] * 4
    assert set(document["stages"]["disk"]) > {"lease", "place", "first_token"}
