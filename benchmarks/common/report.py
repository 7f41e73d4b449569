"""What one benchmark reports: its tables, every sample, whether its claim held; and how far it is meanwhile.

Made by every benchmark, printed and written by :mod:`benchmarks.runner`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvboost.bench.report import Table, describe_machine, say
from kvboost.errors import KVBoostError

_SILENT_SECONDS = 2.0


class BenchError(KVBoostError):
    """A benchmark cannot start; the message says in one line what to do."""


@dataclass
class Report:
    """What one command measured."""

    command: str
    tables: list[Table] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    """Every single sample, for the JSON file of a benchmark."""
    failed: bool = False
    """A claim did not hold; the command then exits with 1."""

    def table(
        self, title: str, columns: Sequence[str], *, dtype: str = "none", model: str | Path | None = None
    ) -> Table:
        """A new, empty table behind the others."""
        self.tables.append(Table(title, describe_machine(dtype=dtype, model=str(model) if model else None), columns))
        return self.tables[-1]

    def markdown(self) -> str:
        """All tables."""
        return "\n".join(table.markdown() for table in self.tables)


class Progress:
    """Says on stderr how far a long benchmark is; silent for anything under two seconds."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._start = self._said = time.perf_counter()

    def step(self, count: int = 1) -> None:
        """``count`` more of the total are done."""
        self._done += count
        now = time.perf_counter()
        if now - self._said >= _SILENT_SECONDS:
            self._said = now
            took = now - self._start
            left = max(0.0, took * (self._total - self._done) / self._done)
            say(f"{self._label}: {self._done} of {self._total}, {took:.0f} s, about {left:.0f} s left")

    def leave(self, count: int) -> None:
        """``count`` of the total will not be done."""
        self._total -= count
