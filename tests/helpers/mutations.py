"""Code with a bug put into it, to show that a test sees it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def mutated(function: Callable[..., Any], right: str, wrong: str) -> Callable[..., Any]:
    """``function`` with ``wrong`` in its source where ``right`` stands. It still uses its module's globals."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{function.__name__} has no {right!r}, or several: the seed needs an update"
    made: dict[str, Any] = {}
    exec(source.replace(right, wrong), function.__globals__, made)
    found: Callable[..., Any] = made[function.__name__]
    return found
