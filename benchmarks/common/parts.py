"""Long proofs in parts, so that one can be stopped, continued, and later made longer.

Invariants: a finished part is a line of the file before the next one begins; a part's random numbers are from the seed,
its kind and its number alone; what raised is a line too, so that the run that continues knows of it.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.journal import Journal, Kind
from benchmarks.common.report import Progress
from kvboost.bench.report import describe_machine

_FILE = Kind("kvboost proof", 1, ("kind", "part"))

Work = Callable[[str, int, random.Random], dict[str, Any]]
"""Does about so many of a kind. Returns their number, under the name of what is counted, and what was seen."""


def add_part_arguments(parser: argparse.ArgumentParser) -> None:
    """``--seed`` and ``--out``."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="keep finished parts here; a run with it goes on there"
    )


def run_parts(
    args: argparse.Namespace, proof: str, counted: str, wanted: Mapping[str, int], size: int, work: Work
) -> list[dict[str, Any]]:
    """Do as many of every kind as ``wanted``, in parts of ``size``. Returns all parts of the file, those before too.

    The kind that is furthest behind is next, so that a run that is stopped has some of every kind.
    """
    settings = {"proof": proof, "seed": args.seed}  # not how many: a run for more continues one for less
    out = args.out.expanduser() if args.out is not None else None
    with Journal(out, _FILE, settings, describe_machine()) as journal:
        done, parts = Counter[str](), Counter[str]()
        for part in journal.samples:
            done[part["kind"]] += part[counted]
            parts[part["kind"]] += 1
        progress = Progress(counted, sum(max(0, count - done[kind]) for kind, count in wanted.items()))
        while behind := [kind for kind, count in wanted.items() if done[kind] < count]:
            kind = min(behind, key=lambda kind: done[kind] / wanted[kind])
            line: dict[str, Any] = {"kind": kind, "part": parts[kind]}
            start = time.perf_counter()
            try:
                rng = random.Random(f"{args.seed} {kind} {parts[kind]}")
                line |= work(kind, min(size, wanted[kind] - done[kind]), rng)
            except Exception as error:
                journal.add(line | {counted: 0, "error": "".join(traceback.format_exception_only(error))})
                raise
            journal.add(line | {"seconds": round(time.perf_counter() - start, 1)})
            done[kind] += line[counted]
            parts[kind] += 1
            progress.step(line[counted])
        return journal.samples


def total(parts: Sequence[Mapping[str, Any]], kind: str, name: str) -> int:
    """The sum of a count over the parts of a kind."""
    return sum(part.get(name, 0) for part in parts if part["kind"] == kind)
