"""Failures below a request, which become misses; and log lines about exceptions without what a client sent.

Stores and tiers count theirs with :class:`Failures`; the scheduler and the server log theirs. Invariants: what
:meth:`Failures.ask` calls never fails a request; an exception's message is logged only at the level ``debug``.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")

_RAISED = "it failed and is treated as empty for this request"
_MAX_CALLS = 6
_MAX_CAUSES = 3


class Failures:
    """Counts what failed of one store or tier, by kind; the first of each kind is a warning. Thread-safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Of all kinds."""
        return self._counts.total()

    def counts(self) -> dict[str, int]:
        """How often each kind of failure was seen."""
        with self._lock:
            return dict(self._counts)

    def count(self, kind: str) -> bool:
        """Count one more; whether it is the first of its kind."""
        with self._lock:
            self._counts[kind] += 1
            return self._counts[kind] == 1

    def failed(self, kind: str, cause: object, *, remedy: str = "") -> None:
        """Count one more failure of ``kind``; ``remedy`` says what the user can do about it."""
        if self.count(kind):
            warnings.warn(
                f"{self._what}: {kind}: {cause}{'; ' if remedy else ''}{remedy}. The cache goes on; more of these are "
                "only counted (cache_stats()['store_errors']).",
                RuntimeWarning,
                stacklevel=4,
            )

    def raised(self, error: BaseException) -> None:
        """A call raised what it should not have."""
        self.failed(_RAISED, repr(error))

    def ask(self, otherwise: T, method: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """What ``method`` answers, or ``otherwise`` if it raises: a cache may only help."""
        try:
            return method(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - whatever a store or a tier raises, the request goes on
            self.raised(error)
            return otherwise


def log_failure(log: logging.Logger, error: BaseException, text: str, *args: Any) -> None:
    """Log ``text``, the exception's type and where it was raised."""
    trace = error if log.isEnabledFor(logging.DEBUG) else None
    log.error(text + ": %s", *args, raised_at(error), exc_info=trace)


def raised_at(error: BaseException) -> str:
    """The type of an exception and its innermost calls, the last one first; then the same of its causes."""
    found: list[str] = []
    current: BaseException | None = error
    while current is not None and len(found) < _MAX_CAUSES:
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(current.__traceback__)]
        kind = type(current).__qualname__
        found.append(f"{kind} at {_calls(reversed(frames[-_MAX_CALLS:]))}" if frames else kind)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return ", from ".join(found)


def at_work(thread: threading.Thread) -> str:
    """The innermost calls of a thread that runs, the last one first."""
    frame = sys._current_frames().get(thread.ident or 0)
    return _calls((inner.f_code, line) for inner, line in islice(traceback.walk_stack(frame), _MAX_CALLS))


def _calls(frames: Iterable[tuple[CodeType, int]]) -> str:
    return " < ".join(f"{_short(code.co_filename)}:{line} in {code.co_name}" for code, line in frames)


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])
