"""Mutants: ``python -m tools.mutants run`` puts thousands of small bugs in, one at a time, and runs the tests on each.

``run`` goes on where it was stopped: results are kept in ``mutants/``, and those of changed functions are forgotten.
Mutants that took too long are run a second time at its end. ``run NAME...`` runs some again (``*`` for any text), for
example after a new test. ``report`` prints a table, ``survivors`` what was changed without a test noticing. What is
mutated and which tests judge it stands in pyproject.toml, ``[tool.mutmut]``. Needs the extra ``mutation``.

``run --sample 100`` runs a hundred mutants of each package: all of them take hours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "store.record", "store.tiers.disk", "serve.security")
_PROGRAM = Path(sys.executable).with_name("mutmut")
_FIRST = "kvboost.core.keys.x_paged_key__mutmut_1"
COLUMNS = ("killed", "survived", "timed out", "no test", "not run")

# As mutmut writes them: what pytest returned, a number of its own, or the signal by which a process ended.
_SURVIVED, _NO_TEST, _TIMED_OUT = {0}, {5, 33}, {24, 36, 152, 255, -24}


def outcome(code: int | None) -> str:
    """What a mutant's exit code says."""
    if code is None:
        return "not run"
    for name, codes in (("survived", _SURVIVED), ("timed out", _TIMED_OUT), ("no test", _NO_TEST)):
        if code in codes:
            return name
    return "killed"  # by a test, or by a crash of the process


def results(folder: Path) -> dict[str, int | None]:
    """Exit codes by mutant, of everything below ``folder``."""
    found: dict[str, int | None] = {}
    for file in sorted(folder.rglob("*.meta")):
        found.update(json.loads(file.read_text())["exit_code_by_key"])
    return found


def of_package(package: str, names: Iterable[str]) -> list[str]:
    """The mutants of one package."""
    return [name for name in names if name.startswith(f"kvboost.{package}.")]


def table(codes: dict[str, int | None]) -> str:
    """Mutants and what became of them by package, in Markdown."""
    lines = [
        "| package | mutants | " + " | ".join(COLUMNS) + " | killed of those run |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for title, names in [*((p, of_package(p, codes)) for p in PACKAGES), ("all", list(codes))]:
        counts = Counter(outcome(codes[name]) for name in names)
        ran = len(names) - counts["not run"]
        share = f"{counts['killed'] / ran:.1%}" if ran else "-"
        cells = [f"`{title}`" if title != "all" else title, f"{len(names):,}"]
        lines.append("| " + " | ".join([*cells, *(f"{counts[c]:,}" for c in COLUMNS), share]) + " |")
    return "\n".join(lines)


def environment() -> dict[str, str]:
    """That of a run: one thread per process, and programs started by tests import the mutants as well."""
    sources = [str(ROOT / "mutants" / "src"), str(ROOT / "mutants")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sources)}


def mutmut(*arguments: str) -> int:
    """Run it in the repository."""
    return subprocess.run([str(_PROGRAM), *arguments], cwd=ROOT, env=environment()).returncode


def sample(codes: dict[str, int | None], count: int) -> list[str]:
    """So many mutants of each package: the same ones each time, and those of a smaller sample among them."""
    chosen: list[str] = []
    for package in PACKAGES:
        own = sorted(of_package(package, codes))
        random.Random(package).shuffle(own)
        chosen += own[:count]
    return chosen


def run(names: Sequence[str], *, of_each: int | None, workers: int) -> int:
    """Run what has no result yet, or ``names``; then once more what took too long, as it may on a busy machine."""
    command = ["run", "--max-children", str(workers)]
    if of_each is not None:
        if not results(ROOT / "mutants"):
            mutmut(*command, _FIRST)  # mutmut makes the mutants when it runs one
        codes = results(ROOT / "mutants")
        names = [name for name in sample(codes, of_each) if codes[name] is None]
        if not names:
            return 0
    code = mutmut(*command, *names)
    late = [name for name, result in results(ROOT / "mutants").items() if outcome(result) == "timed out"]
    if code == 0 and late:
        code = mutmut(*command, *late)
    return code


def survivors() -> int:
    """Print what each of them changes."""
    codes = results(ROOT / "mutants")
    return max(
        (mutmut("show", name) for name, code in codes.items() if outcome(code) in {"survived", "no test"}), default=0
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("names", nargs="*", help="mutants to run again; all without a result if none is given")
    running.add_argument("--sample", type=int, help="so many of each package, chosen at random, the same each time")
    running.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    commands.add_parser("report")
    commands.add_parser("survivors")
    asked = parser.parse_args(arguments)
    if asked.command != "report" and not _PROGRAM.is_file():
        parser.error('mutmut is missing; run pip install -e ".[dev,mutation]"')
    if asked.command == "run":
        return run(asked.names, of_each=asked.sample, workers=asked.workers)
    if asked.command == "survivors":
        return survivors()
    print(table(results(ROOT / "mutants")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
