"""``kvboost serve`` as a user starts it: a real process, a real client, a real signal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from kvboost.cli.main import main


def test_a_served_model_answers_and_ends_when_told(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    command = [sys.executable, "-m", "kvboost", "serve", str(folder), "--port", "0", "--api-key-file", str(keys)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = _address(process)
            client = OpenAI(base_url=f"{address}/v1", api_key="second-key", max_retries=0)
            asked = {"model": folder.name, "prompt": "once upon a time", "max_tokens": 4, "temperature": 0}
            answer = client.completions.create(**asked)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
            client.close()
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            assert process.returncode == 0
        finally:
            process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    """Where it says it serves."""
    assert process.stderr is not None
    said = ""
    while (line := process.stderr.readline()) and "serving on" not in line:
        said += line
    match = re.search(r"serving on (http://127.0.0.1:\d+)", line)
    assert match is not None, f"it ended: {said}"
    return match[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "key"),
        (["--api-key-file", "absent"], "cannot be read"),
        (["--api-key-file", "EMPTY"], "holds no key"),
    ],
)
def test_a_mistake_is_one_line_before_the_model_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("\n")
    words = [str(tmp_path / "empty") if word == "EMPTY" else word for word in arguments]
    assert main(["serve", "no-such-model", *words]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_everything_set_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--port", "81", "--show-config"]) == 0
    said = capsys.readouterr().out
    assert "[serve]" in said
    assert "port = 81  # --port" in said
