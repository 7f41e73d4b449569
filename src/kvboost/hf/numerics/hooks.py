"""Hooks on a model that several threads run at once.

Used by the runner, which hooks the decoder for a request. Invariant: its hooks act in the thread of the request alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for this thread; in any other it changes nothing, also if torch calls it while it is removed here."""
    owner = threading.get_ident()

    def guarded(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == owner else None

    return guarded
