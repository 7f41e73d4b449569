"""EleutherAI's harness with its own Hugging Face model and with ours: shots and choices, long endings, and sums.

Run it where lm-eval is installed (the extra ``evals``). Questions are made up (:mod:`benchmarks.common.eval_tasks`).
Both models run in one process, in turn, each with the best of its batch sizes. Answers are held against each other, and
a second run of ours from disk against the first.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.eval_tasks import KINDS, write_tasks
from benchmarks.common.measure import model_folder, positive
from benchmarks.common.report import BenchError, Report
from kvboost.bench.report import Spread, Table, describe_machine, ratios, say

QUICK = {"questions": 4, "repeat": 1, "dtype": ["float32"], "batch": [2]}
_TOLERANCE = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="of questions (default: all)")
    parser.add_argument("--questions", type=positive, default=500, help="of each kind (default 500)")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8], help="sizes to try; the best one counts")
    parser.add_argument("--repeat", type=positive, default=1, help="rounds measured (default 1)")


class _Answers(NamedTuple):
    """What one run of the harness gave."""

    seconds: float
    accuracy: float
    given: list[Any]
    """The log-likelihood of each choice, or the text that was generated, in the order of the questions."""


def run(args: argparse.Namespace) -> Report:
    """Every dtype and kind. The claim: float32 log-likelihoods differ by at most 1e-4, a second run in no bit."""
    try:
        import kvboost.integrations.lm_eval
    except ImportError as error:
        raise BenchError(str(error)) from error
    assert kvboost.integrations.lm_eval.KVBoostLM
    report = Report("evals")
    with tempfile.TemporaryDirectory() as folder:
        tasks = write_tasks(Path(folder), questions=args.questions)
        for dtype in args.dtype:
            machine = describe_machine(dtype=dtype, model=str(model_folder(args)))
            columns = ["questions", "batches", "hf s", "ours s", "hf / ours", "hf / again", "accuracy", "difference"]
            table = Table(f"lm-eval, {args.questions} questions of each kind", machine, columns)
            report.tables.append(table)
            for kind in args.kinds:
                found = _measure(args, dtype, kind, partial(_ask, tasks=tasks[kind], folder=Path(folder)))
                report.raw[f"{dtype} {kind}"] = found
                table.add(kind, *_row(found))
                held = dtype == "float32" and kind != "sums"  # a near tie may change a text
                report.failed |= not found["same_bits"] or (held and found["difference"] > _TOLERANCE)
            table.notes += [
                "Times are of the requests, without loading the model. Of the batch sizes tried each has its best; our "
                "scores have none.",
                "Again: a second run of ours, from disk. Difference: the largest of two log-likelihoods; of generated "
                "texts, the share that differs.",
            ]
    return report


def _row(found: dict[str, Any]) -> list[str]:
    bits = "same bits" if found["same_bits"] else "other bits"
    return [
        f"{found['batch']['hf']} and {found['batch']['ours']}",
        Spread.of(found["hf"]).text(1),
        Spread.of(found["ours"]).text(1),
        Spread.of(ratios(found["hf"], found["ours"])).text(2),
        f"{Spread.of(ratios(found['hf'], found['again'])).text(2)}, {bits}",
        " and ".join(f"{100 * share:.1f} %" for share in found["accuracy"]),
        f"{found['difference']:.1e}",
    ]


def _measure(args: argparse.Namespace, dtype: str, kind: str, ask: Callable[..., _Answers]) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    from kvboost.integrations.lm_eval import KVBoostLM

    given = {"pretrained": str(model_folder(args)), "dtype": dtype, "device": "cpu"}
    hf, ours = partial(HFLM, **given), partial(KVBoostLM, **given)
    said = f"{kind}, {dtype}"
    sizes = args.batch if kind == "sums" else args.batch[:1]  # ours scores without batches
    tried = {
        "hf": _tried(hf, ask, args.batch, f"{said}, hf"),
        "ours": _tried(ours, ask, sizes, f"{said}, ours"),
    }
    best = {name: min(times, key=times.__getitem__) for name, times in tried.items()}
    found: dict[str, Any] = {"hf": [], "ours": [], "again": [], "batch": best, "tried": tried}
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory() as disk:
            answers = {}
            for name in ("hf", "ours", "again"):
                make = hf if name == "hf" else partial(ours, disk_cache_dir=disk)
                answers[name] = _once(make, ask, best["hf" if name == "hf" else "ours"], f"{said}, {name}")
                found[name].append(answers[name].seconds)
    found["accuracy"] = [answers["hf"].accuracy, answers["ours"].accuracy]
    found["difference"] = _difference(answers["hf"].given, answers["ours"].given)
    found["same_bits"] = answers["ours"].given == answers["again"].given
    return found


def _tried(
    make: Callable[..., Any], ask: Callable[..., _Answers], sizes: Sequence[int], said: str
) -> dict[int, float | None]:
    """Seconds by batch size, of a few questions; None where there is no choice."""
    if len(sizes) == 1:
        return {sizes[0]: None}
    few = max(8, *sizes)
    return {size: _once(make, partial(ask, limit=few), size, f"{said}, {few} questions").seconds for size in sizes}


def _once(make: Callable[..., Any], ask: Callable[..., _Answers], batch: int, said: str) -> _Answers:
    """One run with a model of its own."""
    model = make(batch_size=batch)
    say(f"{said}, batches of {batch}")
    answers = ask(model)
    if hasattr(model, "engine"):
        model.engine.close()
    del model
    gc.collect()
    return answers


def _ask(model: Any, *, tasks: list[str], folder: Path, limit: int | None = None) -> _Answers:
    import lm_eval
    from lm_eval.tasks import TaskManager

    if limit is not None:  # of all tasks together
        tasks = tasks[:1]
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    start = time.perf_counter()
    found = lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, limit=limit)
    seconds = time.perf_counter() - start
    samples = [each for task in tasks for each in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])]
    right = [sample.get("acc", sample.get("exact_match")) for sample in samples]
    given = [resp[0] for sample in samples for resp in sample["resps"]]
    return _Answers(seconds, sum(right) / len(right), [one if isinstance(one, str) else one[0] for one in given])


def _difference(own: list[Any], ours: list[Any]) -> float:
    pairs = list(zip(own, ours, strict=True))
    if isinstance(own[0], str):
        return sum(a != b for a, b in pairs) / len(pairs)
    return max(abs(a - b) for a, b in pairs)
