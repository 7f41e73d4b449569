"""A script that calls model.generate, as it is and with one line more: many questions to one text.

Both answer the same prompts in a loop, in turn. What was attached begins with an empty cache in every round, so its
time includes the first reading. Tokens are held against the plain script's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import kvboost
from benchmarks.common.measure import TextSource, add_model_arguments, alternate, load_engine, positive, wall_ms
from benchmarks.common.report import Report
from kvboost.bench.report import Spread, Table, describe_machine, ratios

QUICK = {"prompts": 3, "context": 200, "repeat": 1, "dtype": ["float32"]}
_QUESTION = 15  # tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser, dtypes=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=positive, default=20, help="questions to the text (default 20)")
    parser.add_argument("--context", type=positive, default=1500, help="tokens of the text (default 1500)")
    parser.add_argument("--new", type=positive, default=8, help="tokens of an answer (default 8)")
    parser.add_argument("--repeat", type=positive, default=3, help="rounds measured (default 3)")


def run(args: argparse.Namespace) -> Report:
    """Measure every dtype. The claim fails where float32 answers differ."""
    report = Report("attached")
    for dtype in args.dtype:
        engine = load_engine(args, dtype=dtype)
        model, tokenizer = engine.model, engine.tokenizer
        engine.close()
        source = TextSource(tokenizer, args.text)
        text = source.window(0, args.context)
        asked = [source.window(5000 + 100 * number, _QUESTION) for number in range(args.prompts)]
        prompts = [torch.tensor([text + question]) for question in asked]
        answers: dict[str, list[list[int]]] = {}

        def script(name: str, prompts: Any = prompts, model: Any = model, answers: Any = answers) -> None:
            given = {"max_new_tokens": args.new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            answers[name] = [
                model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, ids.shape[1] :].tolist()
                for ids in prompts
            ]

        def attached(model: Any = model, script: Callable[[str], None] = script) -> None:
            with kvboost.attach(model):
                script("attached")

        times = alternate(
            {"plain": lambda run=script: wall_ms(lambda: run("plain")), "attached": lambda run=attached: wall_ms(run)},
            repeat=args.repeat,
            warmups=1,
            label=f"{args.prompts} prompts, {dtype}",
        )
        same = sum(map(list.__eq__, answers["plain"], answers["attached"]))
        machine = describe_machine(dtype=dtype, model=str(args.model))
        title = f"{args.prompts} questions to one text of {args.context} tokens, {args.new} new tokens each"
        columns = ["script", "seconds", "plain / attached", "same answers"]
        table = Table(title, machine, columns)
        report.tables.append(table)
        table.add("plain", Spread.of([ms / 1000 for ms in times["plain"]]).text(1), "", "")
        table.add(
            "attached, making the engine included",
            Spread.of([ms / 1000 for ms in times["attached"]]).text(1),
            Spread.of(ratios(times["plain"], times["attached"])).text(2),
            f"{same} of {args.prompts}",
        )
        report.raw[dtype] = {"times": times, "answers": answers}
        report.failed |= dtype == "float32" and same < args.prompts
    return report
