"""The command line of the measurements: one subcommand per module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

from kvboost.bench import (
    codec,
    disk,
    eviction,
    exactness,
    fidelity,
    found,
    grid,
    growth,
    limit,
    moved,
    prefetch,
    reasoning,
    remote,
    repair,
    restart,
    rivals,
)
from kvboost.bench.report import BenchError, Report
from kvboost.errors import KVBoostError


class _Measurement(Protocol):
    """What every measurement module offers."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Report]


_MEASUREMENTS = {
    module.__name__.rpartition(".")[2]: cast(_Measurement, module)
    for module in (
        limit,
        rivals,
        grid,
        growth,
        exactness,
        fidelity,
        found,
        repair,
        moved,
        reasoning,
        restart,
        prefetch,
        disk,
        codec,
        remote,
        eviction,
    )
}


def make_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = argparse.ArgumentParser(prog="python -m kvboost.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="NAME")
    for name, module in _MEASUREMENTS.items():
        summary = (sys.modules[f"kvboost.bench.{name}"].__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
        command.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to FILE")
        module.add_arguments(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one measurement. Exit code 1: a proof did not hold; 2: it could not start."""
    args = make_parser().parse_args(arguments)
    try:
        for file in (args.json, args.markdown):
            if file is not None and not file.expanduser().resolve().parent.is_dir():
                raise BenchError(f"there is no folder to write {file} into; create it first")
        report = _MEASUREMENTS[args.command].run(args)
    except (BenchError, KVBoostError) as error:
        print(f"kvboost.bench {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(report.markdown(), end="")
    if args.markdown is not None:
        args.markdown.expanduser().write_text(report.markdown(), encoding="utf-8")
    if args.json is not None:
        options = {name: value for name, value in vars(args).items() if name not in ("command", "json", "markdown")}
        args.json.expanduser().write_text(report.json(options), encoding="utf-8")
    return 1 if report.failed else 0
