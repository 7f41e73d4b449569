"""The one runner: ``python -m benchmarks NAME [options]``, ``--list``, ``--quick NAME`` and ``--quick all``.

A benchmark is a module in one of the groups with ``add_arguments(parser)``, ``run(args) -> Report`` and ``QUICK``, the
values its options have in the short form (a minute at most). Invariant: a short form needs nothing from outside; where
no model, questions or traces are given, made-up ones stand in.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.report import BenchError, Report
from kvboost.errors import KVBoostError

_ROOT = Path(__file__).parent
_GROUPS = ("exact", "approx", "store", "serve", "offload", "fleet")
_WRITTEN = ("json", "markdown", "plot", "out", "page")  # options that name files
_FAILED, _UNABLE = 1, 2  # exit codes: a claim did not hold; the benchmark could not start
_USAGE = """usage: python -m benchmarks NAME [--quick] [options]    python -m benchmarks NAME --help for its options
       python -m benchmarks --list
       python -m benchmarks --quick all"""


def find_benchmarks() -> dict[str, str]:
    """Every benchmark's module by name, without importing any."""
    files = [file for group in _GROUPS for file in sorted((_ROOT / group).glob("*.py"))]
    return {file.stem: f"benchmarks.{file.parent.name}.{file.stem}" for file in files if file.stem != "__init__"}


def summary_of(module: str) -> str:
    """The first line of a module's docstring."""
    source = _ROOT.parent.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark. Exit code 1: a claim did not hold; 2: it could not start."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    quick = "--quick" in words
    words = [word for word in words if word != "--quick"]
    known = find_benchmarks()
    if words[:1] == ["--list"]:
        for name, module in known.items():
            print(f"{name:<20} {summary_of(module)}")
        return 0
    if words == ["all"] and quick:
        return _run_all(known)
    if not words or words[0] not in known:
        asked_for_help = words[:1] in (["-h"], ["--help"])
        if words and not asked_for_help:
            print(f"there is no benchmark {words[0]!r}; --list names them", file=sys.stderr)
        print(_USAGE, file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else _UNABLE
    name, *options = words
    try:
        return _run_one(name, known[name], options, quick=quick)
    except KVBoostError as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return _UNABLE


def _run_one(name: str, path: str, options: Sequence[str], *, quick: bool) -> int:
    module: Any = importlib.import_module(path)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--quick: the short form, on made-up data where none is given.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to FILE")
    module.add_arguments(parser)
    if quick:
        parser.set_defaults(**module.QUICK)
    args = parser.parse_args(options)
    for file in (getattr(args, option, None) for option in _WRITTEN):
        if file is not None and not file.expanduser().resolve().parent.is_dir():
            raise BenchError(f"there is no folder to write {file} into; create it first")
        if file is not None and file.expanduser().is_dir():
            raise BenchError(f"{file} is a folder; give a file in it")
    with tempfile.TemporaryDirectory(prefix="kvboost-bench-") as scratch:
        if quick:
            _fill_in(args, Path(scratch))
        report: Report = module.run(args)
    print(report.markdown(), end="")
    if args.markdown is not None:
        args.markdown.expanduser().write_text(report.markdown(), encoding="utf-8")
    if args.json is not None:
        told = {key: value for key, value in vars(args).items() if key not in ("json", "markdown")}
        args.json.expanduser().write_text(as_json(report, {**told, "quick": quick}), encoding="utf-8")
    if report.failed:
        print(f"{name}: the claim did not hold", file=sys.stderr)
    return _FAILED if report.failed else 0


def as_json(report: Report, arguments: Mapping[str, Any]) -> str:
    """Everything, with the command's arguments; paths are cut down to their last part."""
    document = {
        "command": report.command,
        "arguments": {name: _without_folder(value) for name, value in arguments.items()},
        "failed": report.failed,
        "tables": [asdict(table) for table in report.tables],
        "raw": report.raw,
    }
    return json.dumps(document, indent=1, default=str) + "\n"


def _without_folder(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    return [_without_folder(item) for item in value] if isinstance(value, list) else value


def _fill_in(args: argparse.Namespace, scratch: Path) -> None:
    """Stand-ins for the model, the questions and the traces that the command did not give."""
    from benchmarks.common.stand_ins import STAND_INS

    for option, make in STAND_INS.items():
        if getattr(args, option, "") is None:
            setattr(args, option, make(scratch))


def _run_all(known: dict[str, str]) -> int:
    """Every short form in a process of its own; what cannot start here is named and does not count as failed."""
    verdicts = {0: "passed", _FAILED: "FAILED", _UNABLE: "cannot run here"}
    worst = 0
    for name in known:
        begin = time.monotonic()
        command = [sys.executable, "-m", "benchmarks", name, "--quick"]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT.parent, check=False)
        last = (ran.stderr.strip().splitlines() or [""])[-1] if ran.returncode else ""
        verdict = verdicts.get(ran.returncode, "CRASHED")
        print(f"{name:<20} {verdict:<16} {time.monotonic() - begin:5.0f} s  {last}", flush=True)
        worst |= verdict.isupper()
    return _FAILED if worst else 0
