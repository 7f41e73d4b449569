"""A server behind a network, as tiers see it: how long a caller waits for it, and when it is left alone.

Used by the tiers behind a network. Invariants: a request waits for a server no longer than its :class:`Patience`
allows, whatever the server or its library do: calls run in a few daemon threads, and what was given up before it began
is not done; time in a queue of ours is never held against the library; the first failure opens a :class:`Breaker`, and
nothing is asked until a look in the background, which no request waits for, finds the server well.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

_NEARLY = 0.9  # of its time: who waits for a call began to a little before the call did

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 4.0
_HEALTHY_AFTER_S = 10.0  # closed for so long, the next failure is a new one
BEHIND_S = 1.0
"""What nobody waits for in a request may take so long, beside its bytes."""

T = TypeVar("T")


class Call(Future[T]):
    """A call that is waiting for its turn, under way, or done."""

    nbytes = 0
    """What it transfers, as soon as that is known."""

    def __init__(self, work: Callable[[Call[T]], T], *, seconds: float) -> None:
        super().__init__()
        self._work = work
        self._seconds = seconds
        self._begun: float | None = None

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
        with suppress(TimeoutError, CancelledError):
            self.exception(max(seconds, 0.0))
        return self.done()

    def give_up(self) -> bool:
        """Nobody wants it any more: it is not begun if it was not yet. False if it is done."""
        return self.cancel() or not self.done()

    def run(self) -> None:
        """In a thread of the library's calls."""
        if not self.set_running_or_notify_cancel():
            return
        self._begun = time.monotonic()
        try:
            result = self._work(self)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._begun = None
            self.set_exception(error)
        else:
            self._begun = None
            self.set_result(result)


def _serve(waiting: SimpleQueue[Call[Any] | None], running: dict[int, Call[Any]]) -> None:
    own = threading.get_ident()
    while (call := waiting.get()) is not None:
        running[own] = call
        try:
            call.run()
        finally:
            del running[own]
        del call  # with its bytes


class Breaker:
    """Open while something is broken. Thread-safe."""

    def __init__(self, probe: Callable[[], bool], *, name: str) -> None:
        """``probe`` says whether all is well again; it is called in a thread of its own and must come back."""
        self._probe = probe
        self._name = name
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._open = False
        self._delay = _FIRST_DELAY_S
        self._closed_at = -_HEALTHY_AFTER_S

    @property
    def is_open(self) -> bool:
        """Whether requests must do without."""
        return self._open

    def failed(self) -> None:
        """It failed: open, and look at it in the background."""
        with self._lock:
            if self._open or self._ended.is_set():
                return
            if time.monotonic() - self._closed_at > _HEALTHY_AFTER_S:
                self._delay = _FIRST_DELAY_S
            threading.Thread(target=self._look, name=self._name, daemon=True).start()
            self._open = True  # only now: without the thread it would stay open

    def close(self) -> None:
        """Look no more; it stays open."""
        with self._lock:
            self._open = True
            self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(self._delay):
            self._delay = min(2 * self._delay, _MAX_DELAY_S)
            try:
                is_healthy = self._probe()
            except BaseException:  # noqa: BLE001 - whatever it is, it is probed again
                is_healthy = False
            if is_healthy:
                with self._lock:
                    self._open = self._ended.is_set()
                    self._closed_at = time.monotonic()
                return


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a lookup waits: some time, and what its bytes would take at the slowest rate."""

    timeout_s: float
    min_bytes_per_s: float

    def seconds(self, nbytes: int) -> float:
        """For so many bytes alone."""
        return nbytes / self.min_bytes_per_s


class UnavailableError(Exception):
    """The server cannot be used now. ``cause`` is None if that was known before, or is nobody's fault."""

    def __init__(self, cause: Exception | None) -> None:
        super().__init__(str(cause))
        self.cause = cause


class RefusedError(Exception):
    """The server is well, and does not do this."""


Report = Callable[[UnavailableError], None]


class Deadline:
    """One lookup: all its waits together take no longer than its patience."""

    def __init__(self, patience: Patience) -> None:
        self._patience, self._left = patience, patience.timeout_s

    def wait(self, call: Call[Any]) -> bool:
        """Whether a call is done in time; the bytes it transfers have time of their own."""
        begin = time.monotonic()
        done = call.wait(self._left + self._patience.seconds(call.nbytes))
        if not done and call.nbytes:  # it may have told them meanwhile
            done = call.wait(begin + self._left + self._patience.seconds(call.nbytes) - time.monotonic())
        took = time.monotonic() - begin
        self._left = max(0.0, self._left - max(0.0, took - self._patience.seconds(call.nbytes)))
        return done


class Guard:
    """Calls of one server or library in some threads, behind a breaker. Thread-safe."""

    def __init__(
        self,
        threads: int,
        *,
        name: str,
        patience: Patience,
        breaker: Breaker,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        """``failed`` is called when the server is left alone."""
        self.patience, self.breaker = patience, breaker
        self._failed, self._limit, self._name = failed, threads, name
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._waiting: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._running: dict[int, Call[Any]] = {}

    @property
    def is_stuck(self) -> bool:
        """Whether a call hangs."""
        return any(call.is_overdue for call in list(self._running.values()))

    def submit(self, work: Callable[[Call[T]], T], *, nbytes: int = 0, seconds: float | None = None) -> Call[T]:
        """Begin a call that transfers so many bytes and may take ``seconds`` beside them. Raises UnavailableError if no
        thread can be started and there is none."""
        allowed = self.patience.timeout_s if seconds is None else seconds
        call = Call(work, seconds=allowed + self.patience.seconds(nbytes))
        call.nbytes = nbytes
        with self._lock:
            if len(self._threads) < self._limit:
                arguments = (self._waiting, self._running)  # not self: a thread must not keep it alive
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    if not self._threads:
                        raise UnavailableError(error) from error
                else:
                    self._threads.append(thread)
        self._waiting.put(call)
        return call

    def done(self, work: Callable[[], T], *, seconds: float, nbytes: int = 0) -> T:
        """What comes of a call that is waited for, whoever asks. Raises UnavailableError, or RefusedError."""
        call = self.submit(lambda _: work(), nbytes=nbytes, seconds=seconds)
        return self.result(call, Deadline(replace(self.patience, timeout_s=seconds)))

    def result(self, call: Call[T], deadline: Deadline) -> T:
        """What came of a call. Raises UnavailableError, or RefusedError for this call alone."""
        if not deadline.wait(call) and call.give_up():
            # Where our own threads are busy with others' calls, that is not the server's fault.
            raise self.failed(TimeoutError("no answer in time")) if self.is_stuck else UnavailableError(None)
        try:
            return call.result()
        except (UnavailableError, RefusedError):
            raise
        except Exception as error:
            raise self.failed(error) from error

    def each(
        self, works: Iterable[tuple[Callable[[Call[T]], T], int]], *, ahead: int, deadline: Deadline, report: Report
    ) -> Iterator[T | None]:
        """What comes of each, given with its bytes, in order; some begin ahead. None for one that was refused.

        It ends where the server failed: the next ones would fare no better.
        """
        calls = (self.submit(work, nbytes=nbytes) for work, nbytes in works)
        coming: deque[Call[T]] = deque()

        def results() -> Iterator[T | None]:
            try:
                while coming:
                    try:
                        call = coming.popleft()
                        coming.extend(islice(calls, 1))
                        yield self.result(call, deadline)
                    except RefusedError as error:
                        report(UnavailableError(error))
                        yield None
            except UnavailableError as error:
                report(error)
            finally:
                for call in coming:
                    call.give_up()

        try:
            coming.extend(islice(calls, ahead))
        except UnavailableError as error:
            report(error)
        return results()

    def failed(self, error: Exception) -> UnavailableError:
        """Leave the server alone for a while; what to raise."""
        was_known = self.breaker.is_open
        self.breaker.failed()
        self._failed()
        return UnavailableError(None if was_known else error)

    def close(self) -> None:
        """Do nothing more. What is under way goes on."""
        self.breaker.close()
        self._end()

    def join(self) -> None:
        """Wait until nothing is under way, after it was closed."""
        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:  # not close(): it takes a lock, which this thread may hold
        self._end()

    def _end(self) -> None:
        try:
            while (call := self._waiting.get_nowait()) is not None:
                call.give_up()
        except Empty:
            pass
        for _ in range(self._limit):
            self._waiting.put(None)
