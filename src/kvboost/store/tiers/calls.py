"""Calls of a library that has no time limits of ours, in a few threads of their own.

Used by tiers behind a network. Invariants: a caller waits as long as it wants to and no longer; a call that hangs keeps
neither its caller nor the end of the process waiting, as the threads are daemons; what was given up before it began is
not done; time in a queue of ours is never held against the library.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

_NEARLY = 0.9  # of its time: who waits for a call began to a little before the call did

T = TypeVar("T")


class Call(Generic[T]):
    """A call that is waiting for its turn, under way, or done."""

    nbytes = 0
    """What it transfers, as soon as that is known."""

    def __init__(self, work: Callable[[Call[T]], T], *, seconds: float) -> None:
        self._work = work
        self._seconds = seconds
        self._begun: float | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._given_up = False
        self._result: T
        self._error: Exception | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether the library has had it for longer than it may take."""
        begun = self._begun
        return begun is not None and time.monotonic() - begun > _NEARLY * self._seconds

    def begins(self, nbytes: int, seconds: float) -> None:
        """Its transfer of so many bytes begins now, and may take so long."""
        self.nbytes, self._seconds = nbytes, seconds
        self._begun = time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Whether it is done within this time."""
        return self._done.wait(max(seconds, 0.0))

    def give_up(self) -> bool:
        """Nobody wants it any more; False if it is done."""
        with self._lock:
            self._given_up = not self._done.is_set()
            return self._given_up

    def result(self) -> T:
        """Of a call that is done. Raises what the work raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        """In a thread of the library's calls."""
        if self._given_up:
            return
        self._begun = time.monotonic()
        try:
            self._result = self._work(self)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._error = error
        with self._lock:
            self._begun = None
            self._done.set()


class Calls:
    """Some threads and what waits for them. Thread-safe."""

    def __init__(self, threads: int, *, name: str) -> None:
        self._limit, self._name = threads, name
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._waiting: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._running: dict[int, Call[Any]] = {}

    @property
    def is_stuck(self) -> bool:
        """Whether a call hangs."""
        return any(call.is_overdue for call in list(self._running.values()))

    def submit(self, work: Callable[[Call[T]], T], *, seconds: float) -> Call[T]:
        """Have some work done in its turn, which may take ``seconds`` from then on. Raises RuntimeError if no thread
        can be started and there is none."""
        call = Call(work, seconds=seconds)
        with self._lock:
            if len(self._threads) < self._limit:
                arguments = (self._waiting, self._running)  # not self: a thread must not keep it alive
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not self._threads:
                        raise
                else:
                    self._threads.append(thread)
        self._waiting.put(call)
        return call

    def close(self) -> None:
        """Do nothing more. What is under way goes on."""
        try:
            while (call := self._waiting.get_nowait()) is not None:
                call.give_up()
        except Empty:
            pass
        for _ in range(self._limit):
            self._waiting.put(None)

    def join(self) -> None:
        """Wait until nothing is under way, after it was closed."""
        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        self.close()


def _serve(waiting: SimpleQueue[Call[Any] | None], running: dict[int, Call[Any]]) -> None:
    own = threading.get_ident()
    while (call := waiting.get()) is not None:
        running[own] = call
        try:
            call.run()
        finally:
            del running[own]
        del call  # with its bytes
