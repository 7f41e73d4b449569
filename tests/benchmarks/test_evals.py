"""The evaluations that the benchmark makes up, and its short form where lm-eval is installed (``.ci/evals``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common.eval_tasks import KINDS, write_tasks
from benchmarks.runner import main


def rows(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_questions_are_as_many_as_asked_for_and_the_same_every_time(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    tasks = write_tasks(tmp_path, questions=500)
    assert write_tasks(tmp_path / "again", questions=500) == tasks
    assert tuple(tasks) == KINDS
    assert len(tasks["subjects"]) == 10
    for kind, names in tasks.items():
        found = [row for name in names for row in rows(tmp_path, f"{name}_test")]
        assert found == [row for name in names for row in rows(tmp_path / "again", f"{name}_test")]
        assert len({str(row["question"]) for row in found}) == len(found) == 500
        for name in names:
            if kind != "endings":
                assert len(rows(tmp_path, f"{name}_dev")) == 5


def test_questions_of_a_subject_begin_with_the_same_five_shots(tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    names = write_tasks(tmp_path, questions=12)["subjects"]
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(model="dummy", tasks=names, task_manager=manager, bootstrap_iters=0)
    headings = set()
    for name in names:
        prompts = [sample["arguments"][0][0] for sample in found["samples"][name]]
        questions = [row["question"] for row in rows(tmp_path, f"{name}_test")]
        shots = {prompt[: prompt.index(str(question))] for prompt, question in zip(prompts, questions, strict=True)}
        assert len(prompts) == 6
        assert len(shots) == 1
        assert shots.pop().count("Answer:") == 5
        headings.add(prompts[0].splitlines()[0])
    assert len(headings) == len(names) == 2


def test_the_short_form_finds_equal_scores_and_texts(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    file = tmp_path / "out.json"
    assert main(["evals", "--quick", "--json", str(file)]) == 0
    raw = json.loads(file.read_text())["raw"]
    assert list(raw) == [f"float32 {kind}" for kind in KINDS]
    for found in raw.values():
        assert found["same_bits"]
        assert found["difference"] < 1e-4
        assert found["accuracy"][0] == found["accuracy"][1]
        assert len(found["hf"]) == len(found["ours"]) == len(found["again"]) == 1
