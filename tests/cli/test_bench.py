"""``kvboost bench``: which command is meant, what is refused in one line, and a run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost.bench.compare import Pairing
from kvboost.bench.mine import Tried
from kvboost.bench.report import Table, describe_machine
from kvboost.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "MODEL", "--workload", "chats"], "there is no workload 'chats'; give one of document, chat"),
        (["bench", "MODEL", "--quality", "best"], "--quality 'best' is not known"),
        (["bench", "MODEL", "--quality", "auto"], "give high, fast or a share"),
        (["bench", "MODEL", "--dtype", "float31"], "give auto, float32"),
        (["bench", "mine", "MODEL", "--prompts", "LOG", "--dtype", "float31"], "give auto, float32"),
        (["bench", "MODEL", "--tokens", "10", "--workload", "chat"], "give 64 or more"),
        (["bench", "./nowhere"], "there is no model folder at ./nowhere"),
        (["bench", "mine", "MODEL"], "Missing option '--prompts'"),
        (["bench", "mine", "MODEL", "--prompts", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["bench", "mine", "MODEL", "--prompts", "LOG"], "has one prompt"),
        (["bench", "mine", "MODEL", "--prompts", "LOG", "--tolerated", "5"], "not a share"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text('{"prompt": "a"}\n')
    names = {"MODEL": folder, "LOG": tmp_path / "log"}
    assert main([str(names.get(part, part)) for part in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err.splitlines()[-1]
    assert "Traceback" not in said.err


@pytest.mark.parametrize("command", [["bench"], ["bench", "run"]])
def test_a_run_compares_plain_transformers_with_ours(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(folder), "--workload", "chat", "--tokens", "300", "--new", "2"]) == 0
    said = capsys.readouterr()
    assert "| chat     | exact |" in said.out
    assert "7 of 7" in said.out
    assert "1 of 1 workloads" in said.out
    assert "dtype float32;" in said.out  # not auto
    assert str(folder.parent) not in said.out
    assert "chat: first tokens " in said.err


def test_other_bits_are_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.bench.compare.bench", lambda *args, **more: (Table("", describe_machine(), []), False))
    assert main(["bench", str(folder)]) == 1
    assert "other bits" in capsys.readouterr().err


def test_ones_own_prompts_end_with_a_recommendation(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "my.jsonl"
    head = "A head that all prompts share, and that is long enough to be worth a place in a cache. " * 12
    log.write_text("\n".join(json.dumps({"prompt": f"{head} Question {n}?"}) for n in range(5)))
    assert main(["bench", "mine", str(folder), "--prompts", str(log), "--limit", "4", "--new", "2"]) == 0
    said = capsys.readouterr()
    assert "the first 4 are used" in said.err
    assert "Time to the first token of 4 prompts" in said.out
    rows = [line for line in said.out.splitlines() if line.startswith(("| exact", "| high", "| fast"))]
    assert len(rows) == 3
    assert all(row.rstrip(" |").endswith("4 of 4") for row in rows)
    assert "\nRecommendation: " in said.out
    assert "dtype float32;" in said.out  # not auto


def test_the_command_to_run_next_has_the_options_of_this_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "my own.jsonl"
    log.write_text('{"prompt": "one"}\n{"prompt": "two"}')
    rows = [{"ttft_ms": 10.0, "tokens": [1], "moved": 0, "exact": 0, "approximate": 0}] * 2
    slow = [{**row, "ttft_ms": 90.0} for row in rows]
    tried = [Tried("exact", Pairing("mine", "exact", [10, 10], slow, rows), 1000)]  # type: ignore[arg-type]
    monkeypatch.setattr("kvboost.bench.mine.measure", lambda *args, **more: tried)
    options = ["--dtype", "float32", "--limit", "7"]
    assert main(["bench", "mine", str(folder), "--prompts", str(log), *options]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"  kvboost serve {folder} --dtype float32 --quality exact --cache-bytes 64MB" in said
