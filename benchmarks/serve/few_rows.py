"""Linear layers over few rows, as usual and with the two sides exchanged: how many times as fast, by shape and rows.

The ways take turns over all weights of a shape, so that none stays in a cache. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.common.measure import add_model_arguments, load_engine, positive
from benchmarks.common.report import Report
from benchmarks.internals import exchanged, gains_exchanged
from kvboost.bench.report import Spread, ratios, say

QUICK = {"rows": [2, 8], "rounds": 1, "dtype": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.set_defaults(dtype="float32")
    parser.add_argument("--rows", type=positive, nargs="+", default=[2, 4, 8, 16, 32, 48, 64], help="of a step")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")


def seconds(way: Callable[..., Any], rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    """Of one way over all weights."""
    begin = time.perf_counter()
    for weight in weights:
        way(rows, weight, None)
    return time.perf_counter() - begin


@torch.no_grad()
def run(args: argparse.Namespace) -> Report:
    """Every shape of the model."""
    report = Report("few_rows")
    with load_engine(args, dtype=args.dtype) as engine:
        by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for module in engine.model.modules():
            if type(module) is torch.nn.Linear:
                by_shape.setdefault(tuple(module.weight.shape), []).append(module.weight)
        title = f"Usual / exchanged, median [min max] of {args.rounds} rounds"
        table = report.table(
            title, ["weights", "chosen", *(f"{rows} rows" for rows in args.rows)], dtype=args.dtype, model=args.model
        )
        for shape, weights in by_shape.items():
            say(f"{len(weights)} weights of {shape}")
            cells = []
            for count in args.rows:
                rows = torch.zeros(count, shape[1], dtype=weights[0].dtype)
                pairs = [
                    (seconds(linear, rows, weights), seconds(exchanged, rows, weights)) for _ in range(args.rounds + 1)
                ]
                cells.append(Spread.of(ratios(*zip(*pairs[1:], strict=True))).text())
            table.add("x".join(map(str, shape)), "yes" if gains_exchanged(weights[0]) else "no", *cells)
    return report
