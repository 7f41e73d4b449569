"""The code of the README and of the quick start runs as printed, on the trained model.

Only the model's hub name stands for the folder made from its package. Code of other pages: ``test_code_blocks.py``.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PORT = ":8000"
_PATIENCE = 180
SERVED_PAGES = ("docs/quickstart.md", "docs/guides/agents.md")
"""Pages with code that talks to a server."""


def _blocks(language: str, *, served: bool, page: str = "docs/quickstart.md") -> list[str]:
    """The page's code: what talks to a server, or what does not."""
    found = re.findall(rf"```{language}\n(.*?)```", (_ROOT / page).read_text(), re.DOTALL)
    return [block for block in found if (f"http://127.0.0.1{_PORT}/v1" in block) == served]


def _run(code: str, model: str, folder: Path) -> dict[str, Any]:
    (folder / "LICENSE").write_text((_ROOT / "LICENSE").read_text())
    names: dict[str, Any] = {}
    exec(compile(code.replace(_MODEL, model), "the page's code", "exec"), names)
    return names


@pytest.mark.real
def test_the_readme_runs_and_reuses_after_a_restart(
    smollm2_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (code,) = _blocks("python", served=False, page="README.md")
    monkeypatch.chdir(tmp_path)  # it writes a cache where it runs
    first = _run(code, smollm2_path, tmp_path)
    first["engine"].close()  # as the end of the process does
    second = _run(code, smollm2_path, tmp_path)
    assert (first["r"].cached_tokens, second["r"].cached_tokens) == (0, second["r"].prompt_tokens - 1)
    assert second["r"].reuse.bitwise
    assert str(second["r"].reuse) in capsys.readouterr().out


@pytest.mark.real
def test_the_quick_start_runs(smollm2_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    blocks = _blocks("python", served=False)
    assert len(blocks) >= 4
    monkeypatch.chdir(tmp_path)
    names = _run("\n".join(blocks), smollm2_path, tmp_path)
    assert len(capsys.readouterr().out) > 20
    assert names["answer"].reuse.moved_tokens > 100
    assert names["r"].cached_tokens > 100
    assert names["r"].reuse.bitwise


@pytest.fixture
def printed_server(smollm2_path: str, tmp_path: Path) -> Iterator[str]:
    """The server, started by the page's own line; what to write for its port, which may be taken here."""
    (line,) = re.findall(r"^kvboost serve .*$", (_ROOT / "docs/quickstart.md").read_text(), re.MULTILINE)
    (tmp_path / _MODEL).parent.mkdir()
    (tmp_path / _MODEL).symlink_to(smollm2_path)  # a folder by that name goes before the hub
    port, given = _PORT, {}
    with socket.socket() as tried:
        try:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("127.0.0.1", 8000))
        except OSError:
            tried.bind(("127.0.0.1", 0))
            port = f":{tried.getsockname()[1]}"
            given = {"KVBOOST_SERVE_PORT": port[1:]}
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **given}
    with subprocess.Popen(
        ["bash", "-c", f"exec {line}"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            said = ""
            while "serving on" not in said:
                line = server.stderr.readline()
                assert line, f"it ended: {said}"
                said += line
            yield port
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
            assert server.returncode == 0
        finally:
            server.kill()


@pytest.mark.real
def test_clients_run_as_printed(printed_server: str) -> None:
    (curl,) = [block for block in _blocks("bash", served=True) if block.startswith("curl")]
    openai, langchain = _blocks("python", served=True)
    (agent,) = _blocks("python", served=True, page=SERVED_PAGES[1])
    said = []
    for command in (
        ["bash", "-euc", curl],
        [sys.executable, "-W", "error", "-c", openai],
        [sys.executable, "-W", "error", "-c", langchain],
        [sys.executable, "-W", "error", "-c", agent],
    ):
        printed = [word.replace(_PORT, printed_server) for word in command]
        done = subprocess.run(printed, capture_output=True, text=True, timeout=_PATIENCE, cwd=_ROOT, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert '"object":"chat.completion"' in said[0]
    reused = re.findall(r"^(\d+) of (\d+) prompt tokens reused$", said[1], re.MULTILINE)
    assert [int(tokens) > 100 for tokens, _ in reused] == [False, True]
    assert len(said[2].split()) > 3
    assert re.findall(r"^([1-9]\d*) of \d+ prompt tokens reused$", said[3], re.MULTILINE)
