"""Log lines about exceptions without their messages: a message may hold what a client sent.

Used by the scheduler and the server. Invariant: a message is written only where everything is, at the level ``debug``.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

_MAX_CALLS = 6
_MAX_CAUSES = 3


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
