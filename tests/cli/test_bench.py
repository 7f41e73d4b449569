"""``kvboost bench``: which command is meant, what is refused in one line, and a run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "MODEL", "--workload", "chats"], "there is no workload 'chats'; give one of document, chat"),
        (["bench", "MODEL", "--against", "sglang"], "there is no rival 'sglang'; give one of plain"),
        (["bench", "MODEL", "--rival", "vllm"], "write NAME=PATH/TO/python"),
        (["bench", "MODEL", "--rival", "vllm=/no/such/python"], "there is no /no/such/python"),
        (["bench", "MODEL", "--quality", "best"], "--quality 'best' is not known"),
        (["bench", "MODEL", "--quality", "auto"], "give high, fast or a share"),
        (["bench", "MODEL", "--dtype", "float31"], "give auto, float32"),
        (["bench", "mine", "MODEL", "--prompts", "LOG", "--dtype", "float31"], "give auto, float32"),
        (["bench", "MODEL", "--out", "no/such/file.jsonl"], "create it first"),
        (["bench", "MODEL", "--report", "no/such/page.html"], "create it first"),
        (["bench", "MODEL", "--report", "."], "is a folder; give a file in it"),
        (["bench", "MODEL", "--out", "."], "is a folder; give a file in it"),
        (["bench", "MODEL", "--tokens", "10", "--workload", "chat", "--against", "plain"], "give 64 or more"),
        (["bench", "./nowhere", "--quick"], "there is no model folder at ./nowhere"),
        (["bench", "report", "absent.jsonl", "--html", "page.html"], "cannot read absent.jsonl"),
        (["bench", "report", "LOG", "--html", "page.html"], "does not begin as a file of this version"),
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


def test_a_run_prints_tables_and_writes_samples_and_a_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "samples.jsonl", tmp_path / "page.html"
    call = ["bench", str(folder), "--quick", "--workload", "few-shot", "--against", "kept-cache", "--tokens", "500"]
    assert main([*call, "--out", str(out), "--report", str(page)]) == 0
    said = capsys.readouterr()
    assert "| few-shot | kept-cache | exact |" in said.out
    header, sample = (json.loads(line) for line in out.read_text().splitlines())
    assert header["settings"]["tokens"] == 500
    assert header["settings"]["new"] == 3  # of --quick
    assert header["machine"]["cores"] > 0
    assert set(sample["warm"]) == {"kept-cache", "kvboost exact"}
    assert str(folder.parent) not in out.read_text()
    again = tmp_path / "again.html"
    assert main(["bench", "report", str(out), "--html", str(again)]) == 0
    assert again.read_text() == page.read_text()


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
