"""``kvboost serve`` as a user starts it: a real process, a real client, a real signal."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, AuthenticationError, BadRequestError, OpenAI

from kvboost import ConfigError
from kvboost.cli.main import main
from kvboost.cli.serve import model_name


def test_a_served_model_answers_and_ends_when_told(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    keys.chmod(0o600)
    command = [sys.executable, "-m", "kvboost", "serve", str(folder), "--port", "0", "--api-key-file", str(keys)]
    command += ["--max-new-tokens", "5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            _until(process, "loading")
            process.send_signal(signal.SIGHUP)
            assert "the keys were read again: 2 tenants" in _until(process, "read again"), "also while it loads"
            address = _address(process)
            client = OpenAI(base_url=f"{address}/v1", api_key="second-key", max_retries=0)
            asked = {"model": folder.name, "prompt": "once upon a time", "max_tokens": 4, "temperature": 0}
            answer = client.completions.create(**asked)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
            assert "info: POST /v1/completions status=200" in _until(process, "/v1/completions")
            with pytest.raises(BadRequestError, match="at most 5 tokens"):
                client.completions.create(**{**asked, "max_tokens": 6})
            keys.write_text("alice: third-key\n")
            process.send_signal(signal.SIGHUP)
            assert "the keys were read again: 1 tenant\n" in _until(process, "read again")
            with pytest.raises(AuthenticationError):
                client.completions.create(**asked)
            for _ in range(2):
                assert "has no key any more" in _until(process, "its memory was released")
            client.with_options(api_key="third-key").completions.create(**asked)
            client.close()
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            assert process.returncode == 0
        finally:
            process.kill()


_BREAKING = """
import sys, time
from kvboost.cli.main import main
from kvboost.scheduler.loop import JobLoop
from kvboost.serve.generation.service import Service

def dies(runner):
    raise RuntimeError("no memory")

def begin(service, *arguments, **settings):
    made(service, *arguments, **settings)
    service.streams.add("a client whose answer is still being sent")  # so that there is something to drain

made, Service.__init__ = Service.__init__, begin
JobLoop._decode = dies if sys.argv[1] == "dies" else lambda runner: time.sleep(3600)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("how", "options", "reason", "told"),
    [
        ("dies", [], "the runner failed (RuntimeError)", "the runner failed: RuntimeError at <string>:8 in dies"),
        (
            "hangs",
            ["--max-step-seconds", "2"],
            "a step took more than 2 s",
            "it is at <string>:15 in <lambda> < scheduler/",
        ),
    ],
)
def test_a_server_whose_runner_is_lost_says_so_and_ends(
    how: str, options: list[str], reason: str, told: str, folder: Path
) -> None:
    command = [sys.executable, "-c", _BREAKING, how, "serve", str(folder), "--port", "0", "--drain-seconds", "3"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            address = _address(process)
            assert httpx.get(f"{address}/health").status_code == 200
            with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
                stream = client.completions.create(model=folder.name, prompt="once upon a time", stream=True)
                with pytest.raises(APIError, match="the model could not answer this request"):
                    list(stream)  # it had its first token
            for path in ("/health", "/ready"):
                answer = httpx.get(address + path)
                assert (answer.status_code, answer.json()["status"]) == (503, "failed")
                assert reason in answer.json()["reason"]
            said = process.communicate(timeout=60)[1]
            assert process.returncode == 1
            assert told in said
            assert "no memory" not in said, "its words may be a client's"
            last = said.strip().splitlines()[-1]
            assert f"kvboost serve: {reason}" in last
            assert last.endswith("start the server again")
        finally:
            process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    """Where it says it serves."""
    said = _until(process, "serving on")
    match = re.search(r"serving on (http://127.0.0.1:\d+)", said)
    assert match is not None, f"it ended: {said}"
    return match[1]


def _until(process: subprocess.Popen[str], words: str) -> str:
    """What it says up to a line with these words."""
    assert process.stderr is not None
    said = ""
    while words not in said and (line := process.stderr.readline()):
        bar = not line.strip() or "Loading weights" in line  # is for who watches, no line of the log
        assert bar or re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 ", line), f"without its time: {line}"
        said += line
    return said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "key"),
        (["--api-key-file", "absent"], "cannot be read"),
        (["--api-key-file", "EMPTY"], "holds no key"),
        (["--api-key-file", "SHORT"], "SHORT needs 8 or more"),
        (["--api-key-file", "OPEN"], "is open to other users; run: chmod 600"),
        (["--api-key-file", "KEYS", "--secret-file", "SHORT"], "neither 32 bytes nor 64 hex digits"),
        (["--api-key-file", "KEYS", "--admin-key-file", "KEYS"], "several lines"),
        (["--max-streams", "0"], "max_streams=0 refuses everything"),
        (["--max-streams", "many"], "--max-streams is 'many'"),
        (["--cors-origin", "https://a.example", "--cors-origin", "a.example"], "'a.example' is no origin"),
        (["--tls-cert-file", "KEYS", "--tls-key-file", "KEYS"], "PEM certificate"),
        (["--port", "99999"], "port=99999 is no port"),
        (["--port", "0", "--disk-cache-dir", "KEYS"], "is no directory"),
        (["--port", "0", "--disk-cache-dir", "SHARED"], "is open to other users; run: chmod 700"),
        (["--adapter", "poet=./no/such"], "adapter 'poet': there is no folder ./no/such; check the path"),
        (["--adapter", "poet=FOLDER"], "holds no adapter_config.json"),
    ],
)
def test_a_mistake_is_one_line_before_the_model_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("EMPTY", "\n"), ("SHORT", "short\n"), ("KEYS", "first-key\nsecond-key\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "OPEN").write_text("first-key\n")
    (tmp_path / "OPEN").chmod(0o644)
    (tmp_path / "SHARED").mkdir()
    (tmp_path / "SHARED").chmod(0o755)
    words = [str(tmp_path / word) if word.isupper() else word for word in arguments]
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    assert main(["serve", "no-such-model", *words]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_port_in_use_is_said_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "no-such-model", "--port", str(taken.getsockname()[1])]) == 2
    said = capsys.readouterr().err
    assert "choose another port" in said
    assert "loading" not in said


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_keys_are_not_read_inside_a_signal_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    read = threading.Event()

    def read_again(keys: Any) -> None:
        threads.append(threading.current_thread())
        read.set()

    def load(*given: Any, **settings: Any) -> None:
        signal.raise_signal(signal.SIGHUP)
        assert read.wait(10)
        raise ConfigError("enough")

    monkeypatch.setattr("kvboost.serve.run.read_keys_again", read_again)
    monkeypatch.setattr("kvboost.engine.KVBoost.from_pretrained", load)
    assert main(["serve", "m", "--port", "0"]) == 2
    assert threads[0] is not threading.main_thread()


def test_everything_set_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--port", "81", "--show-config"]) == 0
    said = capsys.readouterr().out
    assert "[serve]" in said
    assert "port = 81  # --port" in said


def test_a_model_is_called_by_the_last_part_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_name("x/y") == "y"
    (tmp_path / "tiny" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tiny")
    assert model_name(".") == "tiny"
    monkeypatch.chdir("inner")
    assert model_name("..") == "tiny"
