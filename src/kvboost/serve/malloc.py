"""Keeps a server from growing for hours while what it holds stays the same: settings of glibc's malloc.

Used by :mod:`kvboost.serve.run`. Invariant: with another libc nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

_M_ARENA_MAX, _ARENAS = -8, 2  # glibc's name for the setting is a number
_EVERY_S = 30.0


@contextlib.contextmanager
def bounded_malloc(every_s: float = _EVERY_S) -> Iterator[None]:
    """Share malloc's areas among all threads, and give the free pages in them back to the system every so often.

    By default glibc makes eight areas for each core, and each keeps the most that it ever held. A large request also
    leaves holes, which requests of other sizes do not fill.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, _ARENAS)
        give_back = libc.malloc_trim
    except (OSError, AttributeError):
        yield
        return
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(every_s):
            give_back(0)

    thread = threading.Thread(target=work, name="kvboost-malloc", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
