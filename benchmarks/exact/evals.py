"""EleutherAI's harness with its own Hugging Face model and with ours: five shots and four choices, and long endings.

Run it where lm-eval is installed (the extra ``evals``). Questions are made up: facts from a passage, one of four years;
and endings of several words after a sentence of their own. Both models run in one process, in turn. Log-likelihoods are
held against each other, and a second run of ours from disk against the first.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.measure import model_folder, positive, wall_ms
from benchmarks.common.report import BenchError, Report
from kvboost.bench.report import Spread, Table, describe_machine, ratios, say

QUICK = {"questions": 6, "repeat": 1, "dtype": ["float32"], "batch": [2]}
_TOLERANCE = 1e-4
_CHOICES = {"task": "choices", "num_fewshot": 5, "training_split": "train", "fewshot_split": "train"}
_ENDINGS = {"task": "endings", "num_fewshot": 0}
_WORDS = (
    "river",
    "stone",
    "mill",
    "bridge",
    "copper",
    "winter",
    "market",
    "harbour",
    "letter",
    "garden",
    "engine",
    "silver",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--questions", type=positive, default=500, help="of each kind (default 500)")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8], help="sizes for hf; the best one counts")
    parser.add_argument("--repeat", type=positive, default=1, help="rounds measured (default 1)")


def run(args: argparse.Namespace) -> Report:
    """Every dtype and kind of question. The claim fails where float32 log-likelihoods differ by more than 1e-4."""
    try:
        import kvboost.integrations.lm_eval
    except ImportError as error:
        raise BenchError(str(error)) from error
    assert kvboost.integrations.lm_eval.KVBoostLM
    report = Report("evals")
    with tempfile.TemporaryDirectory() as folder:
        _write_tasks(Path(folder), args.questions)
        for dtype in args.dtype:
            machine = describe_machine(dtype=dtype, model=str(model_folder(args)))
            columns = ["questions", "hf s", "ours s", "hf / ours", "again from disk", "accuracy", "largest difference"]
            table = Table(f"lm-eval, {args.questions} questions", machine, columns)
            report.tables.append(table)
            for task in ("choices", "endings"):
                found = _measure(args, dtype, task, Path(folder))
                report.raw[f"{dtype} {task}"] = found
                table.add(
                    task,
                    Spread.of(found["hf"]).text(1),
                    Spread.of(found["ours"]).text(1),
                    Spread.of(ratios(found["hf"], found["ours"])).text(2),
                    f"{Spread.of(ratios(found['hf'], found['again'])).text(2)}, "
                    + ("same bits" if found["same_bits"] else "other bits"),
                    " and ".join(f"{100 * share:.1f} %" for share in found["accuracy"]),
                    f"{found['difference']:.1e}",
                )
                report.failed |= not found["same_bits"] or (dtype == "float32" and found["difference"] > _TOLERANCE)
            table.notes.append(
                "Times are of the requests, without loading the model. hf has the best of the batch sizes given."
            )
    return report


def _measure(args: argparse.Namespace, dtype: str, task: str, folder: Path) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    from kvboost.integrations.lm_eval import KVBoostLM

    given = {"pretrained": str(model_folder(args)), "dtype": dtype, "device": "cpu"}
    sizes = {}
    for size in args.batch:  # on a few questions
        say(f"{task}, {dtype}: hf with batches of {size}")
        model = HFLM(**given, batch_size=size)
        sizes[size] = wall_ms(partial(_ask, model, task, folder, limit=max(8, size)))
    best = min(sizes, key=sizes.__getitem__)
    found: dict[str, Any] = {"hf": [], "ours": [], "again": [], "batch": best, "tried": sizes}
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory() as disk:
            answers: dict[str, Any] = {}
            for name, make in (
                ("hf", lambda: HFLM(**given, batch_size=best)),
                ("ours", lambda disk=disk: KVBoostLM(**given, disk_cache_dir=disk)),
                ("again", lambda disk=disk: KVBoostLM(**given, disk_cache_dir=disk)),
            ):
                say(f"{task}, {dtype}: {name}")
                model = make()
                start = time.perf_counter()
                answers[name] = _ask(model, task, folder)
                found[name].append(time.perf_counter() - start)
                if name != "hf":
                    model.engine.close()
    own, ours, again = (answers[name][1] for name in ("hf", "ours", "again"))
    found["accuracy"] = [answers["hf"][0], answers["ours"][0]]
    found["difference"] = max(abs(a - b) for a, b in zip(own, ours, strict=True))
    found["same_bits"] = ours == again
    return found


def _ask(model: Any, task: str, folder: Path, *, limit: int | None = None) -> tuple[float, list[float]]:
    """Accuracy, and every log-likelihood in the order of the questions."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=[task], task_manager=manager, bootstrap_iters=0, limit=limit)
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return found["results"][task]["acc,none"], [resp[0][0] for sample in samples for resp in sample["resps"]]


def _write_tasks(folder: Path, count: int) -> None:
    draw = random.Random(0)
    rows: dict[str, list[dict[str, Any]]] = {"choices": [], "train": [], "endings": []}
    for number in range(count + 20):
        name, year = " ".join(draw.sample(_WORDS, 2)).title() + " Works", draw.randint(1700, 1990)
        years = draw.sample([year, year + 7, year - 12, year + 31], 4)
        passage = (
            f"{name} was founded in {year} beside the old {draw.choice(_WORDS)} road. It makes "
            f"{draw.choice(_WORDS)} and {draw.choice(_WORDS)}, sells them on the {draw.choice(_WORDS)} market, and has "
            f"{draw.randint(9, 900)} people. In {year + draw.randint(40, 90)} it moved near the {draw.choice(_WORDS)}."
        )
        row = {"text": f"{passage}\nIn which year was {name} founded?", "choices": list(map(str, years))}
        rows["train" if number < 20 else "choices"].append({**row, "answer": years.index(year)})
        if number >= 20:
            endings = [" ".join(draw.choices(_WORDS, k=draw.randint(6, 14))) for _ in range(4)]
            rows["endings"].append({"text": passage, "choices": endings, "answer": number % 4})
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each), encoding="utf-8")
    for task in (_CHOICES, _ENDINGS):
        files = {"test": str(folder / f"{task['task']}.jsonl"), "train": str(folder / "train.jsonl")}
        shared = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "output_type": "multiple_choice",
            "test_split": "test",
            "doc_to_text": "{{text}}\nAnswer:" if task is _CHOICES else "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        # JSON is YAML.
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**task, **shared}), encoding="utf-8")
