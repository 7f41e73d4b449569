"""The short form of ``grpo``. Runs where TRL is installed (``.ci/programs``)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.runner import main


def test_the_short_form_alternates_and_reads_prompts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    file = tmp_path / "grpo.json"
    assert main(["--quick", "grpo", "--repeat", "2", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "train_runtime" not in out  # the trainer's own
    assert re.search(r"\| attached +\| +\d", out)
    raw = json.loads(file.read_text())["raw"]
    assert {name: len(taken) for name, taken in raw["times"].items()} == {"default": 3, "attached": 3}
    for default, attached in zip(raw["read"]["default"], raw["read"]["attached"], strict=True):
        assert attached < default / 2


def test_without_trl_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    assert main(["--quick", "grpo"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "grpo: this benchmark needs TRL; install it with pip install trl"
    )
