"""The tables, and one HTML page with plots, of runs that `python -m benchmarks bench --out FILE` has written.

No model is loaded. Without files it shows the published samples.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.bench.page import html_report
from benchmarks.bench.run import KIND
from benchmarks.bench.summary import report_of
from benchmarks.common.journal import load
from benchmarks.common.report import Report

QUICK: dict[str, object] = {}
_PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="what --out has written, one or several")
    parser.add_argument("--html", dest="page", type=Path, metavar="FILE", help="write one page that needs nothing else")


def run(args: argparse.Namespace) -> Report:
    """Show what was measured."""
    runs = [load(file.expanduser(), KIND) for file in args.files or sorted(_PUBLISHED.glob("*.jsonl"))]
    report = Report("bench_report")
    for header, samples in runs:
        shown = report_of(header, samples)
        report.tables += shown.tables
        report.failed |= shown.failed
    if args.page is not None:
        args.page.expanduser().write_text(html_report(runs), encoding="utf-8")
    return report
