"""Compiles grammars in a process of its own first: only so can a compiler be stopped that takes minutes or all memory.

Used by :mod:`kvboost.serve.generation.structured`. Invariants: a grammar that passes took at most ``COMPILE_S`` and
``MEMORY_BYTES`` there, and takes about as much again here; a grammar is refused only for what it did itself; the
process ends with this one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from time import monotonic
from typing import Any

from kvboost.serve.errors import ApiError

COMPILE_S = 3.0  # usual schemas take milliseconds
MEMORY_BYTES = 2**30  # more than at the start; the worst schema that is known and ends in time takes a quarter of it
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 50_000,  # work of one mask, a quarter of llguidance's own limit
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,  # of 1 to 2 kB each, in every answer
}
TOO_LONG = f"compiling it takes more than {COMPILE_S:g} s; simplify its patterns, or name fewer of them"
_TOO_LARGE = "compiling it takes too much memory; simplify its patterns, or name fewer of them"
_FAILED = "llguidance failed while compiling it; simplify its patterns"
_START_S = 60.0
_CHILD = """
import json, sys
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
limits, more = json.loads(sys.argv[1])
if sys.platform == "linux":  # others do not tell what is taken, or keep no limit
    import resource
    with open("/proc/self/statm") as sizes:
        most = int(sizes.read().split()[0]) * resource.getpagesize() + more
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # clients could fill a disk with them
limits, tokenizer = LLParserLimits(**limits), LLTokenizer("byte")
print(flush=True)
for line in sys.stdin:
    matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some find out only here that nothing can follow
    print(json.dumps(matcher.get_error().splitlines()[0] if matcher.is_error() else ""), flush=True)
"""


class GrammarCheck:
    """Says which grammars can be compiled within the limits. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def check(self, grammar: str, *, within: float = COMPILE_S) -> tuple[float, str]:
        """How long compiling it took, and why it cannot be used; empty if it can."""
        with self._lock:
            seconds, why = self._ask(grammar, within)
            if why is None:  # the process was killed from outside, as a rule, which says nothing about the grammar
                seconds, why = self._ask(grammar, within)
            return seconds, _FAILED if why is None else why

    def _ask(self, grammar: str, within: float) -> tuple[float, str | None]:
        """The same; no reason if the process ended without one."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        began, timer = monotonic(), threading.Timer(within, stop)
        timer.start()
        try:
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        seconds = monotonic() - began
        if answer.endswith("\n"):
            why: str = json.loads(answer)
            return seconds, why
        self._end()  # now: a process that is dying still looks alive to the next grammar
        if late.is_set():
            return seconds, TOO_LONG
        return seconds, _TOO_LARGE if process.returncode == -signal.SIGABRT else None  # what Rust does without memory

    def _running(self) -> subprocess.Popen[str]:
        """The process, started if there is none."""
        process = self._process
        if not self._closed and (process is None or process.poll() is not None):
            self._end()
            process = self._process = subprocess.Popen(
                # -P: nothing is imported from the directory that the server was started in.
                [sys.executable, "-P", "-c", _CHILD, json.dumps([LIMITS, MEMORY_BYTES])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdout is not None
            # Waited for: a start that is slow on a busy machine is not the grammar's time.
            timer = threading.Timer(_START_S, process.kill)
            timer.start()
            started = self._closed or process.stdout.readline()
            timer.cancel()
            if not started and not self._closed:
                self._end()
                raise RuntimeError(
                    f"{sys.executable} cannot run llguidance, which compiles schemas; see whether it starts"
                )
        if process is None or self._closed:  # looked at after the process is known: close() or this sees the other
            self._end()
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """End the process, also while it compiles. Whatever is asked from now on is refused."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # whoever has the lock waits for this process
        with self._lock:
            self._end()
