"""What commands print: sizes, ages, notes, a progress bar, log lines and warnings.

Used by the commands, and by :mod:`kvboost.cli.main` around each. Invariants: answers go to the output, everything else
to the error output, so that ``kvboost ... | other`` gets answers only; each line of a server carries its time; no
warning is silenced. A warning is a log line of the logger ``py.warnings``: at the level ``info`` if it is for
developers (a deprecation in Transformers or torch), else at ``warning``, which is shown unless somebody asks for less.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import typer
from tqdm import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.errors import ConfigError

T = TypeVar("T")
_DELAY_S = 2.0


def progress(label: str, items: Iterable[T] | None = None, *, total: float | None = None) -> tqdm[T]:
    """A progress bar on a terminal's error output, from two seconds on: over ``items``, or updated by hand."""
    return tqdm(items, desc=label, total=total, delay=_DELAY_S, leave=False, disable=None)


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


def age(moment: float | None) -> str:
    """How long ago a moment was."""
    if moment is None:
        return "?"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


_LEVELS = ("debug", "info", "warning", "error")
_LOGGERS = ("kvboost", "py.warnings", "uvicorn", "asyncio")
_SHOWN = {"kvboost": logging.WARNING, "py.warnings": logging.WARNING, "kvboost.serve": logging.INFO}
"""From which level on, unless somebody asks: a server writes a line for each request."""
_FOR_DEVELOPERS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)


class _Handler(logging.Handler):
    """Writes a line to what is the error output now."""

    timed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; the trace of an error follows on lines of its own."""
        line = f"{record.levelname.lower()}: {' '.join(record.getMessage().split())}"
        if record.exc_info:
            line += "\n" + logging.Formatter().formatException(record.exc_info)
        if self.timed:
            line = f"{_moment(record.created)} {line}"
        note(line)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def note_with_time(text: str) -> None:
    """Print a line of a server's to the error output."""
    note(f"{_moment(time.time())} {text}")


def log_with_time(library: str | None = None) -> None:
    """Log lines carry their time from now on. Those of ``library``, which has a handler of its own, too."""
    for handler in (ours := logging.getLogger(_LOGGERS[0]).handlers):
        if isinstance(handler, _Handler):
            handler.timed = True
    if library is not None:
        logging.getLogger(library).handlers = list(ours)


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show what is logged and warned of inside. What ``python -W`` and ``PYTHONWARNINGS`` say stays in force."""
    handler = _Handler()
    before = {name: logging.getLogger(name).level for name in _SHOWN}
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(handler)
    for name, level in _SHOWN.items():
        logging.getLogger(name).setLevel(level)
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("default")
            warnings.showwarning = _show
            yield
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(handler)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def set_level(level: str | None) -> None:
    """Show what is of this level or above; of Transformers' ``info``, which is long, nothing before ``debug``.

    None changes nothing. Raises ConfigError.
    """
    if level is None:
        return
    if level.lower() not in _LEVELS:
        raise ConfigError(f"--log-level {level} is not known; use one of {', '.join(_LEVELS)}")
    for name in _SHOWN:
        logging.getLogger(name).setLevel(level.upper())
    others = "warning" if level.lower() == "info" else level.lower()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", others)  # read when it is imported


LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        envvar="KVBOOST_LOG_LEVEL",
        help=f"What goes to the error output beside answers: {', '.join(_LEVELS)}. By default warnings, and in a "
        "server a line for each request.",
    ),
]


def _show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """In place of Python's own, which also says where in the code it was."""
    level = logging.INFO if issubclass(category, _FOR_DEVELOPERS) else logging.WARNING
    logging.getLogger("py.warnings").log(level, "%s", message)
