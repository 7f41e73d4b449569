"""Thousands of prompts over one document: ``map`` against loops and batches of ``generate``.

Each prompt is the document with a question of its own. ``map`` takes all of them, with an empty cache and the probes of
a new engine; the others a part of them, evenly spread, as they would take hours: rates are prompts per second. Where
float32 answers of that part differ, the claim fails.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common.measure import TextSource, add_model_arguments, engine_beside, load_engine, positive
from benchmarks.common.report import Progress, Report
from kvboost.bench.report import Spread, Table, describe_machine, ratios
from kvboost.engine import KVBoost
from kvboost.hf.device_memory import resident_bytes

QUICK = {"prompts": 8, "sample": 4, "context": 200, "batch": [2], "repeat": 1, "dtype": ["float32"]}
_QUESTION = 15  # tokens
_MAP, _PLAIN = "map", "loop of model.generate"
_ANSWER: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser, dtypes=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=positive, default=2000, help="for map (default 2000)")
    parser.add_argument("--sample", type=positive, default=16, help="for the others (default 16)")
    parser.add_argument("--context", type=positive, default=1500, help="tokens of the document (default 1500)")
    parser.add_argument("--batch", type=positive, nargs="+", default=[4, 16], help="sizes of plain batches")
    parser.add_argument("--repeat", type=positive, default=2, help="rounds measured (default 2)")


def run(args: argparse.Namespace) -> Report:
    """Measure every dtype."""
    report = Report("many_prompts")
    for dtype in args.dtype:
        engine = load_engine(args, dtype=dtype)
        source = TextSource(engine.tokenizer, args.text)
        document = source.window(0, args.context)
        prompts = [document + source.window(5000 + 31 * number, _QUESTION) for number in range(args.prompts)]
        step = max(1, len(prompts) // args.sample)
        report.raw[dtype] = found = _measure(engine, prompts, step, args)
        engine.close()
        table = _table(found, args, dtype)
        report.tables.append(table)
        report.failed |= dtype == "float32" and found["same"][_MAP] < found["few"]
    return report


def _measure(engine: KVBoost, prompts: list[list[int]], step: int, args: argparse.Namespace) -> dict[str, Any]:
    few, memory = prompts[::step][: args.sample], list[int]()
    runs: dict[str, Callable[[], list[tuple[int, ...]]]] = {
        _MAP: partial(_map, engine, prompts, memory),
        "loop of engine.generate": partial(_loop, engine, few),
        _PLAIN: partial(_plain, engine.model, few, 1),
        **{f"model.generate, batches of {n}": partial(_plain, engine.model, few, n) for n in args.batch},
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    answers: dict[str, list[tuple[int, ...]]] = {}
    progress = Progress("many prompts", args.repeat * len(runs))
    for number in range(args.repeat):
        for name, call in list(runs.items())[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            answers[name] = call()
            rates[name].append(len(answers[name]) / (time.perf_counter() - start))
            progress.step()
    answers[_MAP] = answers[_MAP][::step][: args.sample]
    same = {name: sum(map(tuple.__eq__, found, answers[_PLAIN])) for name, found in answers.items()}
    return {"rates": rates, "same": same, "few": len(few), "memory": memory}


def _table(found: dict[str, Any], args: argparse.Namespace, dtype: str) -> Table:
    rates, few = found["rates"], found["few"]
    table = Table(
        f"{args.prompts} questions to one document of {args.context} tokens, {_ANSWER['max_new_tokens']} new ones each",
        describe_machine(dtype=dtype, model=str(args.model)),
        ["", "prompts per second", "map is faster by", "answers as the plain loop's"],
    )
    for name, each in rates.items():
        faster = "" if name == _MAP else Spread.of(ratios(rates[_MAP], each)).text(2)
        table.add(name, Spread.of(each).text(2), faster, f"{found['same'][name]} of {few}")
    sizes = ", ".join(f"{size / 2**20:,.0f}" for size in found["memory"][-10:])
    table.notes.append(
        f"map answered all prompts, the others {few} of them. Cells are median [min max]. Memory of the process after "
        f"each tenth of map's last run: {sizes} MiB."
    )
    return table


def _map(engine: KVBoost, prompts: list[list[int]], memory: list[int]) -> list[tuple[int, ...]]:
    with engine_beside(engine, quality="exact") as new:
        found = []
        for number, result in enumerate(new.map(prompts, temperature=0, **_ANSWER), 1):
            found.append(result.token_ids)
            if number % max(1, len(prompts) // 10) == 0:
                memory.append(resident_bytes() or 0)
        return found


def _loop(engine: KVBoost, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with engine_beside(engine, quality="exact") as new:
        return [new.generate(prompt, temperature=0, **_ANSWER).token_ids for prompt in prompts]


def _plain(model: Any, prompts: list[list[int]], size: int) -> list[tuple[int, ...]]:
    """The prompts are of one length, so that batches need no padding."""
    found: list[tuple[int, ...]] = []
    for first in range(0, len(prompts), size):
        ids = torch.tensor(prompts[first : first + size])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **_ANSWER)
        found += [tuple(row) for row in out[:, ids.shape[1] :].tolist()]
    return found
