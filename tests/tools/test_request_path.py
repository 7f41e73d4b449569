"""The tool sees the files that a request runs code of, in every thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

_ON_EVERY_PATH = ("core/prefiller.py: ", "store/memory.py: ", "hf/runner.py: ")


@pytest.mark.parametrize(
    ("arguments", "first", "among"),
    [
        ([], "engine/engine.py: KVBoost.generate", "hf/prompt.py: PromptEncoder.encode"),
        (["--served"], "serve/security/connection.py: ", "scheduler/decoding.py: "),
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
