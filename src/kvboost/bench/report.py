"""What `kvboost bench` and every benchmark print with: the machine line, medians with spread, tables.

Invariant: nothing written here names a path, only a folder's name.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

_CPU_KINDS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Machine:
    """Where and on what the numbers were taken."""

    date: str
    cpu: str
    cores: int
    threads: int
    torch: str
    transformers: str
    dtype: str
    model: str

    @property
    def line(self) -> str:
        """The line every table starts with."""
        return (
            f"{self.date}; {self.cpu}; {self.cores} cores, {self.threads} torch threads; torch {self.torch}, "
            f"transformers {self.transformers}; dtype {self.dtype}; model {self.model}"
        )


def describe_machine(*, dtype: str = "none", model: str | None = None) -> Machine:
    """This machine now, with the dtype and the model folder's name (never its path)."""
    return Machine(
        date=datetime.now(UTC).date().isoformat(),
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=metadata.version("transformers"),  # only kvboost.hf imports it
        dtype=dtype,
        model=Path(model).expanduser().resolve().name if model else "none",
    )


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as Linux gives it, with its kinds of vectors and matrices; or what Python knows elsewhere."""
    try:
        rows = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        rows = []  # not Linux
    values = {name.strip(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
    if "model name" not in values:
        return platform.processor() or platform.machine() or "unknown CPU"
    # The name of a virtual machine's CPU says little, and bfloat16 without instructions for it is several times slower.
    kinds = [kind for kind in _CPU_KINDS if kind in values.get("flags", "").split()]
    return " ".join([values["model name"], *([f"({', '.join(kinds)})"] if kinds else [])])


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some samples."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Of at least one sample."""
        if not samples:
            raise ValueError("no samples")
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))

    def text(self, digits: int = 2) -> str:
        """``median [min max]``."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f} {self.high:.{digits}f}]"


def ratios(upper: Sequence[float], lower: Sequence[float]) -> list[float]:
    """``upper / lower``, pair by pair: what was measured in the same turn is divided by each other."""
    return [a / b for a, b in zip(upper, lower, strict=True)]


@dataclass
class Table:
    """A titled table whose first line names the machine."""

    title: str
    machine: Machine
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Append a row."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append([str(cell) for cell in cells])

    def markdown(self) -> str:
        """The machine line, the title, the table with aligned columns, the notes."""
        everything = [list(self.columns), *self.rows]
        widths = [max(len(row[i]) for row in everything) for i in range(len(self.columns))]

        def line(cells: Sequence[str]) -> str:
            padded = [
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            return "| " + " | ".join(padded) + " |"

        rule = [("-" * width if index == 0 else "-" * (width - 1) + ":") for index, width in enumerate(widths)]
        lines = [self.machine.line, "", f"**{self.title}**", "", line(self.columns), line(rule)]
        lines += [line(row) for row in self.rows]
        lines += ["", *self.notes] if self.notes else []
        return "\n".join(lines) + "\n"


def say(text: str) -> None:
    """One line on stderr, where it does not mix with the tables."""
    print(text, file=sys.stderr, flush=True)
