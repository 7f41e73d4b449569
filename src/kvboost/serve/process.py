"""What a process needs to serve for long: memory that stays the same, files for all connections, short pauses.

Used by :mod:`kvboost.serve.run` and by replicas under Ray. Invariant: where a system has no such setting, nothing is
done; after the block everything is as before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

from kvboost.serve.security.limits import Limits

_log = logging.getLogger("kvboost.serve")
_OWN_FILES = 128  # beside connections: weights, tiers, their clients, pipes
# A busy thread hands the interpreter over after so long; the event loop and the model ask for it often.
_SWITCH_S = 0.001
_M_ARENA_MAX, _ARENAS = -8, 2  # glibc's name for the setting is a number
_EVERY_S = 30.0


@contextlib.contextmanager
def busy_interpreter() -> Iterator[None]:
    """Settings of this process while it serves."""
    # Imports leave some 400,000 objects. A collection that walks over them stops every request for 0.3 seconds.
    gc.collect()
    gc.freeze()
    switch = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    share_malloc()  # of a replica, which did not come through ``kvboost serve``
    try:
        with trimmed_malloc():
            yield
    finally:
        sys.setswitchinterval(switch)
        gc.unfreeze()


def share_malloc() -> None:
    """Share malloc's areas among all threads. Call it before there are threads: an area that was made stays.

    By default glibc makes eight areas for each core, and each keeps the most that it ever held.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


@contextlib.contextmanager
def trimmed_malloc(every_s: float = _EVERY_S) -> Iterator[None]:
    """Give malloc's free pages back to the system every so often.

    A large request leaves holes, which requests of other sizes do not fill.
    """
    try:
        give_back = ctypes.CDLL(None).malloc_trim
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


def with_enough_files(limits: Limits) -> Limits:
    """Let this process open a file for each connection. If it may not: limits with fewer connections, and a warning.

    Without a file left, a server takes no connections at all, not even for /health, and its tiers fail.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows, which has no such limit
        return limits
    needed = limits.max_connections + _OWN_FILES
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return limits
    raised = needed if most == resource.RLIM_INFINITY else min(needed, most)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, most))
    except (OSError, ValueError) as error:
        _log.warning("the limit of open files cannot be raised to %d (%s)", raised, error)
    else:
        allowed = raised
    fewer = max(allowed - _OWN_FILES, allowed // 2)
    if fewer >= limits.max_connections:
        return limits
    _log.warning(
        "this process may open %d files, so it takes %d connections and not %d; raise the limit (ulimit -Hn) to %d, or "
        "set max_connections",
        *(allowed, fewer, limits.max_connections, needed),
    )
    return replace(limits, max_connections=fewer)
