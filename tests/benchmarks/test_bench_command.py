"""``python -m benchmarks bench`` and ``bench_report``: what is refused in one line, and a run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common.stand_ins import make_model
from benchmarks.runner import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench"], "needs a model"),
        (["bench", "MODEL", "--rival", "vllm"], "write NAME=PATH/TO/python"),
        (["bench", "MODEL", "--rival", "sglang=python"], "there is no rival 'sglang'; give one of plain"),
        (["bench", "MODEL", "--rival", "vllm=/no/such/python"], "there is no /no/such/python"),
        (["bench", "MODEL", "--quality", "best"], "--quality 'best' is not known"),
        (["bench", "MODEL", "--quality", "auto"], "give high, fast or a share"),
        (["bench", "MODEL", "--out", "no/such/file.jsonl"], "create it first"),
        (["bench", "MODEL", "--report", "no/such/page.html"], "create it first"),
        (["bench", "MODEL", "--report", "."], "is a folder; give a file in it"),
        (["bench", "MODEL", "--out", "."], "is a folder; give a file in it"),
        (["bench", "MODEL", "--tokens", "10", "--workload", "chat", "--against", "plain"], "give 64 or more"),
        (["bench", "./nowhere", "--quick"], "there is no model folder at ./nowhere"),
        (["bench_report", "absent.jsonl"], "cannot read absent.jsonl"),
        (["bench_report", "LOG"], "does not begin as a file of this version"),
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


def test_a_run_prints_tables_and_writes_samples_and_a_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page, again = (tmp_path / name for name in ("samples.jsonl", "page.html", "again.html"))
    call = ["bench", str(folder), "--quick", "--workload", "few-shot", "--against", "kept-cache", "--tokens", "500"]
    assert main([*call, "--out", str(out), "--report", str(page)]) == 0
    said = capsys.readouterr().out
    assert "| few-shot | kept-cache | exact |" in said
    header, sample = (json.loads(line) for line in out.read_text().splitlines())
    assert header["settings"]["tokens"] == 500
    assert header["settings"]["new"] == 3  # of --quick
    assert header["machine"]["cores"] > 0
    assert set(sample["warm"]) == {"kept-cache", "kvboost exact"}
    assert str(folder.parent) not in out.read_text()
    assert main(["bench_report", str(out), "--html", str(again)]) == 0
    assert again.read_text() == page.read_text()
    assert capsys.readouterr().out == said


def test_the_published_samples_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench_report"]) == 0
    assert "model smollm2-135m" in capsys.readouterr().out
