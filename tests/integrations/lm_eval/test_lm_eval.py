"""The harness itself, with its own Hugging Face model beside ours. Runs where lm-eval is installed (``.ci/evals``)."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost, ReuseReport, Score
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

pytest.importorskip("lm_eval")

_CHOICES = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {train: FOLDER/choices.jsonl, test: FOLDER/choices.jsonl}}
output_type: multiple_choice
training_split: train
test_split: test
fewshot_split: train
num_fewshot: 5
doc_to_text: "{{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
_ROLLING = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
"""
_GENERATE = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}\\nAnswer:"
doc_to_target: "{{question}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    draw = random.Random(0)
    with (folder / "choices.jsonl").open("w") as file:
        for number in range(12):
            words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(4)]
            row = {
                "question": f"Which is number {number} of {' '.join(words)}?",
                "choices": words,
                "answer": number % 4,
            }
            file.write(json.dumps(row) + "\n")
    for name, text in (("letters", _CHOICES), ("texts", _ROLLING), ("sums", _GENERATE)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=260, max_position_embeddings=4096).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


CHAT = {"apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": "Answer."}


def run(
    name: str, task: str, model: Path, tasks: Path, *, options: dict[str, Any] | None = None, **arguments: Any
) -> list[Any]:
    """The answers of the harness' model to each of the task's requests, in order."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    import kvboost.integrations.lm_eval

    assert kvboost.integrations.lm_eval.KVBoostLM
    found = lm_eval.simple_evaluate(
        model=name,
        model_args={"pretrained": str(model), "dtype": "float32", "device": "cpu", **arguments},
        tasks=[task],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **(options or {}),
    )
    return [sample["resps"] for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])]


def numbers(answers: list[Any]) -> list[float]:
    return [
        float(value)
        for answer in answers
        for (found,) in answer
        for value in (found if isinstance(found, tuple) else [found])
    ]


@pytest.mark.parametrize("task", ["letters", "texts"])
def test_log_likelihoods_are_the_harness_own(task: str, model: Path, tasks: Path) -> None:
    own, ours = (run(name, task, model, tasks) for name in ("hf", "kvboost"))
    assert numbers(ours) == pytest.approx(numbers(own), abs=1e-4)


@pytest.mark.parametrize("task", ["letters", "texts"])
def test_what_is_too_long_is_cut_where_the_harness_cuts_it(task: str, model: Path, tasks: Path) -> None:
    whole = run("kvboost", task, model, tasks)
    own, ours = (run(name, task, model, tasks, max_length=37) for name in ("hf", "kvboost"))
    assert numbers(ours) == pytest.approx(numbers(own), abs=1e-4)
    assert numbers(ours) != pytest.approx(numbers(whole), abs=1e-3)


@pytest.mark.parametrize("batch", [1, 5])
def test_generated_texts_are_the_harness_own(batch: int, model: Path, tasks: Path) -> None:
    own, ours = (run(name, "sums", model, tasks, batch_size=batch) for name in ("hf", "kvboost"))
    assert ours == own
    own, ours = (run(name, "sums", model, tasks, batch_size=batch, max_length=37) for name in ("hf", "kvboost"))
    assert ours == own


@pytest.mark.parametrize("batch", [1, 5])
def test_batch_sizes_change_no_log_likelihood(batch: int, model: Path, tasks: Path) -> None:
    own, ours = (run(name, "letters", model, tasks, batch_size=batch) for name in ("hf", "kvboost"))
    assert numbers(ours) == pytest.approx(numbers(own), abs=1e-4)


def test_chat_templates_are_the_harness_own(model: Path, tasks: Path) -> None:
    own, ours = (run(name, "letters", model, tasks, options=CHAT) for name in ("hf", "kvboost"))
    assert numbers(ours) == pytest.approx(numbers(own), abs=1e-4)
    assert numbers(ours) != pytest.approx(numbers(run("kvboost", "letters", model, tasks)), abs=1e-3)
    assert run("kvboost", "sums", model, tasks, options=CHAT) == run("hf", "sums", model, tasks, options=CHAT)


def test_the_command_runs_this_model(model: Path, tasks: Path) -> None:
    words = ["-m", "kvboost.integrations.lm_eval", "-a", f"pretrained={model},dtype=float32", "-t", "letters"]
    place = ["--include_path", str(tasks), "--device", "cpu"]
    found = subprocess.run([sys.executable, *words, *place], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "kvboost ({'pretrained'" in found.stdout


def test_a_second_run_from_disk_has_the_same_bits(
    model: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And both reuse what was read: from memory, then from disk."""
    score_many, reports = KVBoost.score_many, list[ReuseReport]()

    def watched(*args: Any, **given: Any) -> list[list[Score]]:
        found = score_many(*args, **given)
        reports.extend(score.reuse for (score,) in found)
        return found

    monkeypatch.setattr(KVBoost, "score_many", watched)
    first = run("kvboost", "letters", model, tasks, disk_cache_dir=str(tmp_path))
    assert any(report.tiers.get("memory") for report in reports)
    assert not any(report.tiers.get("disk") for report in reports)
    reports.clear()
    second = run("kvboost", "letters", model, tasks, disk_cache_dir=str(tmp_path))
    assert any(report.tiers.get("disk") for report in reports)
    assert numbers(first) == numbers(second)
