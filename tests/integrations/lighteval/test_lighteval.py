"""lighteval itself, with its own Transformers model beside ours. Runs where lighteval is installed (``.ci/evals``)."""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvboost.engine.attach import Attached
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

pytest.importorskip("lighteval")

_TASKS = """
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def letters(line, task_name):
    return Doc(task_name=task_name, query=line["question"], choices=line["choices"], gold_index=line["answer"])


def texts(line, task_name):
    return Doc(task_name=task_name, query=line["question"], choices=[""], gold_index=0)


def config(name, prompt, metric, **more):
    return LightevalTaskConfig(
        name=name, prompt_function=prompt, hf_repo="FOLDER", hf_subset="default", metrics=[metric],
        hf_avail_splits=["train", "test"], evaluation_splits=["test"], few_shots_split="train",
        few_shots_select="sequential", **more,
    )


TASKS_TABLE = [
    config("letters", letters, Metrics.loglikelihood_acc),
    config("sums", letters, Metrics.exact_match, generation_size=6, stop_sequence=["\\n"]),
    config("texts", texts, Metrics.word_perplexity),
]
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """lighteval imports all its tasks for any of them, and one of them downloads a file when it is imported."""
    module = ModuleType("lighteval.tasks.tasks.tiny_benchmarks")
    module.TASKS_TABLE = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data").mkdir()
    draw = random.Random(0)
    for split, count in (("train", 4), ("test", 9)):
        with (folder / "data" / f"{split}.jsonl").open("w") as file:
            for number in range(count):
                words = [" " + "".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(4)]
                question = f"Which is number {number} of{''.join(words)}?\nAnswer:"
                file.write(json.dumps({"question": question, "choices": words, "answer": number % 4}) + "\n")
    (folder / "tasks.py").write_text(_TASKS.replace("FOLDER", str(folder / "data")))
    return folder / "tasks.py"


@pytest.fixture(scope="module", params=["plain", "chat"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=260, max_position_embeddings=4096).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    if request.param == "plain":  # a template is used where there is one
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def run(name: str, task: str, model: Path, tasks: Path, cache: Path, **arguments: Any) -> list[Any]:
    """The responses of lighteval's model, or ours, to each document, in order."""
    from lighteval.logging.evaluation_tracker import EvaluationTracker
    from lighteval.models.custom.custom_model import CustomModelConfig
    from lighteval.models.transformers.transformers_model import TransformersModelConfig
    from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters

    import kvboost.integrations.lighteval

    # lighteval keeps answers by the arguments: with a folder of its own every run asks the model.
    given = {"model_name": str(model), "dtype": "float32", "batch_size": 4, "cache_dir": str(cache), **arguments}
    if name == "ours":
        launcher, file = ParallelismManager.CUSTOM, kvboost.integrations.lighteval.__file__
        words = ",".join(f"{key}={value}" for key, value in given.items())
        config = CustomModelConfig(model_name=words, model_definition_file_path=file)
    else:
        launcher, config = ParallelismManager.ACCELERATE, TransformersModelConfig(**given)
    pipeline = Pipeline(
        tasks=task,
        pipeline_parameters=PipelineParameters(
            launcher_type=launcher, custom_tasks_directory=str(tasks), bootstrap_iters=0
        ),
        evaluation_tracker=EvaluationTracker(output_dir=str(cache)),
        model_config=config,
    )
    pipeline.evaluate()
    (details,) = pipeline.get_details().values()
    return sorted(details, key=lambda detail: int(detail.doc.id))


def numbers(details: list[Any]) -> list[float]:
    return [value for detail in details for value in detail.model_response.logprobs]


def greedy(details: list[Any]) -> list[bool]:
    return [value for detail in details for value in detail.model_response.argmax_logits_eq_gold]


@pytest.mark.parametrize("most", [4096, 120])
def test_log_likelihoods_are_lightevals_own(most: int, model: Path, tasks: Path, tmp_path: Path) -> None:
    """At 120 tokens the shots are too long, and are cut."""
    own, ours = (run(name, "letters|4", model, tasks, tmp_path / name, max_length=most) for name in ("own", "ours"))
    assert len(numbers(own)) == 9 * 4
    assert numbers(ours) == pytest.approx(numbers(own), abs=1e-4)
    assert greedy(ours) == greedy(own)


def test_generated_texts_are_lightevals_own(
    model: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reused: list[int] = []
    detach = Attached.detach

    def watched(self: Attached) -> None:
        reused.append(int(self.engine.cache_stats()["cache_hits"]))
        detach(self)

    monkeypatch.setattr(Attached, "detach", watched)
    own, ours = (run(name, "sums|4", model, tasks, tmp_path / name) for name in ("own", "ours"))
    assert [detail.model_response.text for detail in ours] == [detail.model_response.text for detail in own]
    assert any(detail.model_response.text[0] for detail in own)
    assert reused[0] > 0


def test_a_second_run_from_disk_has_the_same_bits(model: Path, tasks: Path, tmp_path: Path) -> None:
    disk = {"disk_cache_dir": str(tmp_path / "kv")}
    first, second = (run("ours", "letters|4", model, tasks, tmp_path / name, **disk) for name in ("one", "two"))
    assert list((tmp_path / "kv").rglob("*"))
    assert numbers(first) == numbers(second)


@pytest.mark.parametrize("most", [4096, 20])
def test_a_whole_text_is_read_in_windows(most: int, model: Path, tasks: Path, tmp_path: Path) -> None:
    """lighteval's own model gives nothing to compare with here: it returns no answers for perplexities."""
    from transformers import AutoModelForCausalLM

    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), byte_tokenizer()
    for detail in run("ours", "texts|0", model, tasks, tmp_path, max_length=most):
        ids = [tokenizer.bos_token_id, *tokenizer.encode(detail.doc.query, add_special_tokens=False)]
        total = 0.0
        for at in range(0, len(ids) - 1, most):
            window = torch.tensor([ids[at : at + most + 1]])
            logprobs = plain(window[:, :-1]).logits.float().log_softmax(dim=-1)
            total += float(logprobs.gather(2, window[:, 1:, None]).sum())
        assert detail.model_response.logprobs == pytest.approx([total], abs=1e-3)


def test_the_command_runs_this_model(
    model: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"model_name={model},dtype=float32,batch_size=4,cache_dir={tmp_path / 'answers'}"
    options = ["--custom-tasks", str(tasks), "--output-dir", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["lighteval", name, "letters|2", *options])
    detached: list[Attached] = []
    monkeypatch.setattr(Attached, "detach", lambda self: detached.append(self))
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("kvboost.integrations.lighteval", run_name="__main__")
    assert not ended.value.code
    assert detached  # the model was ours
    assert "letters" in capsys.readouterr().out
