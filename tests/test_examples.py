"""The examples run as they are, with a tiny model; so do the cells of the notebook."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models import tiny_model
from tests.helpers.serving import free_port
from tests.helpers.tokenizer import byte_tokenizer

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_SCRIPTS = sorted(path.stem for path in _EXAMPLES.glob("*.py"))
_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=260, max_position_embeddings=16384).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", _SCRIPTS)
def test_an_example_runs(
    name: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--model", str(model_folder)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\nAnd what else is there to say?\n"))
    runpy.run_path(str(_EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    reused = [int(part) for part in re.findall(r"(\d+) of \d+", said)]
    counts = re.findall(r"(\d+) prompt tokens, (\d+) computed", said)
    reused += [int(prompt) - int(computed) for prompt, computed in counts]
    assert reused or name in ("chatbot", "code"), "it does not say what was reused"
    assert any(reused) or not reused, said


def test_the_notebook_runs(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, in order, in one namespace, as a kernel runs them."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((_EXAMPLES / "tour.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code"), "clear its outputs"
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        exec(compile(cell.replace(_MODEL, str(model_folder)), f"cell {number}", "exec"), names)
    assert names["second"].cached_tokens > 100
    assert names["moved"].reuse.moved_tokens > 100
    assert not names["moved"].reuse.bitwise


def test_the_server_and_its_clients_run(model_folder: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(_EXAMPLES / "server" / "serve.sh"), str(model_folder), "--port", url.rpartition(":")[2]]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = ""
            while "serving on" not in said:
                line = server.stderr.readline()
                assert line, f"it ended: {said}"
                said += line
            clients = [[sys.executable, str(_EXAMPLES / "server" / "openai_client.py"), "--url", url]]
            if shutil.which("curl"):
                clients.append([str(_EXAMPLES / "server" / "anthropic_client.sh"), url])
            for client in clients:
                done = subprocess.run(client, capture_output=True, text=True, timeout=120, check=False)
                assert done.returncode == 0, done.stderr
                reused = re.findall(r'(\d+) of \d+|"cache_read_input_tokens":\s*(\d+)', done.stdout)
                assert [int(a or b) > 50 for a, b in reused] == [False, True], done.stdout
        finally:
            server.terminate()
            server.communicate(timeout=60)
