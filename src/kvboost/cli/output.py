"""What commands print: sizes, ages, notes, a progress bar.

Used by the commands. Invariant: answers go to the output, everything else to the error output, so that
``kvboost ... | other`` gets answers only.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_DELAY_S = 2.0


class ProgressBar:
    """A progress bar on a terminal's error output, from two seconds on."""

    def __init__(self, label: str, *, total: float | None = None) -> None:
        self._label = label
        self._total = total
        self._done = 0.0
        self._begin = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def advance(self, amount: float = 1) -> None:
        """Add to what is done."""
        self._done += amount
        if self._progress is None and sys.stderr.isatty() and time.monotonic() - self._begin > _DELAY_S:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(self._label, total=self._total)
            self._progress.start()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def note(text: str) -> None:
    """Print a line to the error output."""
    print(text, file=sys.stderr, flush=True)


def size(count: float) -> str:
    """Bytes in a few digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(moment: float | None, *, now: float | None = None) -> str:
    """How long ago a moment was."""
    if moment is None:
        return "?"
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
