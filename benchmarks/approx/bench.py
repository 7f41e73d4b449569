"""Ten workloads on one model: our engine against rivals in processes of their own, request by request in turn.

The rivals: plain Transformers, a cache kept by hand, continuous batching, vLLM alone and with our connector, llama.cpp
and kvboost 0.9. A second run with the same ``--out`` goes on where the first one stopped. What `kvboost bench` does in
one process, against plain Transformers only, this does where nobody shares memory or threads with another.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench.contestants import RIVALS
from benchmarks.bench.page import html_report
from benchmarks.bench.run import KIND, Bench, Options
from benchmarks.bench.summary import report_of
from benchmarks.bench.workloads import RECIPES
from benchmarks.common.journal import Journal
from benchmarks.common.measure import DTYPES, positive
from benchmarks.common.report import BenchError, Report
from kvboost.bench.compare import quality_settings
from kvboost.bench.report import describe_machine

QUICK = {
    "tokens": 384,
    "new": 3,
    "cold": 2,
    "workloads": ("document", "chat", "rag", "random"),
    "rivals": ("plain", "kept-cache"),
    "alone": False,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model's folder or hub name")
    parser.add_argument("--workload", action="append", choices=RECIPES, help="only this one; may be repeated")
    parser.add_argument("--against", action="append", choices=RIVALS, help="only this rival; may be repeated")
    parser.add_argument(
        "--rival", action="append", default=[], metavar="NAME=PYTHON", help="the Python of a rival's own environment"
    )
    parser.add_argument("--tokens", type=positive, default=2000, help="length of the longest prompts (default 2000)")
    parser.add_argument("--new", type=positive, default=16, help="tokens of an answer (default 16)")
    parser.add_argument("--repeat", type=positive, default=1, help="run every workload so often, with other texts")
    parser.add_argument("--seed", type=int, default=1, help="of the texts (default 1)")
    parser.add_argument(
        "--quality", default="fast", help="of the second engine, where text moves; exact for none (default fast)"
    )
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="default: the checkpoint's")
    parser.add_argument(
        "--data", dest="questions", type=Path, metavar="FILE", help="questions with passages for rag, such as MuSiQue's"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model for llama-cpp")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append every sample to FILE, and skip those in it")
    parser.add_argument("--report", dest="page", type=Path, metavar="FILE", help="write one HTML page with plots")
    # What only the short form has otherwise.
    parser.set_defaults(cold=3, workloads=tuple(RECIPES), rivals=tuple(RIVALS), alone=True)


def run(args: argparse.Namespace) -> Report:
    """Measure what is not in the file yet."""
    if args.model is None:
        raise BenchError("this benchmark needs a model; give its folder or hub name")
    quality_settings(args.quality)  # says what is wrong before anything is loaded
    options = Options(
        str(args.model),
        dtype=args.dtype,
        tokens=args.tokens,
        new=args.new,
        repeat=args.repeat,
        seed=args.seed,
        cold=args.cold,
        quality=args.quality,
        data=args.questions,
        gguf=args.gguf,
        pythons=_pythons(args.rival),
    )
    machine = describe_machine(dtype=args.dtype, model=options.model)
    out = args.out.expanduser() if args.out is not None else None
    with Journal(out, KIND, options.settings(), machine) as journal:
        workloads, rivals = args.workload or args.workloads, args.against or args.rivals
        Bench(options, journal).run(list(dict.fromkeys(workloads)), list(dict.fromkeys(rivals)), alone=args.alone)
        report = report_of(journal.header, journal.samples)
        if args.page is not None:
            args.page.expanduser().write_text(html_report([(journal.header, journal.samples)]), encoding="utf-8")
    return report


def _pythons(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in given:
        name, equals, python = entry.partition("=")
        if not equals or not python:
            raise BenchError(f"--rival {entry!r} does not say which Python has it; write NAME=PATH/TO/python")
        if name not in RIVALS:
            raise BenchError(f"there is no rival {name!r}; give one of {', '.join(RIVALS)}")
        if not Path(python).expanduser().is_file():
            raise BenchError(f"there is no {python}; give --rival {name}= the Python of its environment")
        found[name] = str(Path(python).expanduser())
    return found
