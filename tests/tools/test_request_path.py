"""The tool sees the files that a request runs code of, in every thread."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.request_path import of_generate

ROOT = Path(__file__).resolve().parents[2]

_ON_EVERY_PATH = ("core/prefill.py: ", "store/memory.py: ", "hf/runner.py: ")


@pytest.mark.parametrize(
    ("arguments", "first", "among"),
    [
        ([], "engine/engine.py: KVBoost.generate", "hf/prompt.py: PromptEncoder.encode"),
        (["--served"], "serve/security/connection.py: ", "scheduler/loop.py: "),
    ],
)
def test_it_lists_files_in_the_order_of_the_request(arguments: list[str], first: str, among: str) -> None:
    command = [sys.executable, "-m", "tools.request_path", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    *files, count = done.stdout.splitlines()
    assert files[0].startswith(first)
    for expected in (*_ON_EVERY_PATH, among):
        assert any(file.startswith(expected) for file in files), expected
    assert count == f"{len(files)} files"


def test_the_walk_of_the_docs_is_the_one_that_requests_take() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("stop by stop")[2]
    stops = re.findall(r"^\| `(\S+)` \| `(\S+)` \|", text, flags=re.MULTILINE)
    assert len(stops) >= 15
    entered = of_generate()
    missing = [stop for stop in stops if stop not in entered]
    assert not missing
    assert sorted(stops, key=entered.index) == stops, "the order in which they are first entered"
