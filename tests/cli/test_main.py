from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvboost.cli import main
from kvboost.cli.main import read_prompts
from kvboost.engine import calibration
from tests.engine.test_calibration import traffic
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=260, max_position_embeddings=2048).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_doctor_says_what_a_model_allows(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "exact reuse         on" in said
    assert "moved reuse         on: auto" in said
    tiny_model("gpt2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "moved reuse         off: gpt2" in said


def test_calibrate_writes_a_file_an_engine_takes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "RATIOS", (0.5, 1.0))
    prompts = tmp_path / "traffic.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": tokens}) for tokens in traffic(30, length=420)) + "\n\n")
    out = tmp_path / "c.json"
    code = main(["calibrate", str(folder), "--prompts", str(prompts), "--tolerated", "0.5", "--out", str(out)])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "quality=0.5 computes 50% of the rows again" in said.out
    assert json.loads(out.read_text())["format"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "MODEL", "--prompts", "absent.txt"], "cannot be read"),
        (["calibrate", "MODEL", "--prompts", "EMPTY"], "is empty"),
        (["calibrate", "MODEL", "--prompts", "TEXT", "--tolerated", "5"], "not a share"),
        (["calibrate", "MODEL", "--prompts", "TEXT", "--out", "no/such/c.json"], "create it first"),
        (["calibrate", "MODEL", "--prompts", "TEXT"], "hold text that an earlier one had"),
        (["doctor", "nowhere-at-all"], "nowhere-at-all"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "text").write_text("one prompt\nanother prompt\n")
    names: dict[str, Any] = {"MODEL": folder, "EMPTY": tmp_path / "empty", "TEXT": tmp_path / "text"}
    assert main([str(names.get(part, part)) for part in arguments]) == 2
    said = capsys.readouterr().err
    last = said.strip().splitlines()[-1]
    assert last.startswith("kvboost ")
    assert message in last
    assert "Traceback" not in said


def test_prompts_come_as_json_lines_or_as_text(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_text('{"prompt": "a"}\n\n{"token_ids": [1, 2], "boundaries": [5]}\n')
    assert read_prompts(file) == (["a", [1, 2]], [[], [5]])
    file.write_text("one\ntwo\n")
    assert read_prompts(file) == (["one", "two"], [[], []])
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(Exception, match="line 2"):
        read_prompts(file)
