"""A server behind a network, as tiers see it: how long a caller waits for it, and when it is left alone.

Used by the Redis tier and its kinds of servers. Invariants: a request waits for a server no longer than its
:class:`Patience` allows, whatever the server or its library do, as calls run in threads of their own; the first failure
opens a breaker, and nothing is asked until a look in the background finds the server well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from kvboost.store.tiers.breaker import Breaker
from kvboost.store.tiers.calls import Call, Calls

BEHIND_S = 1.0
"""What nobody waits for in a request may take so long, beside its bytes."""

T = TypeVar("T")


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
    """Calls of one server or library, behind a breaker. Thread-safe."""

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
        self._calls = Calls(threads, name=name)
        self._failed = failed

    @property
    def is_stuck(self) -> bool:
        """Whether a call hangs."""
        return self._calls.is_stuck

    def submit(self, work: Callable[[Call[T]], T], *, nbytes: int = 0, seconds: float | None = None) -> Call[T]:
        """Begin a call that transfers so many bytes and may take ``seconds`` beside them. Raises UnavailableError."""
        allowed = self.patience.timeout_s if seconds is None else seconds
        try:
            call = self._calls.submit(work, seconds=allowed + self.patience.seconds(nbytes))
        except RuntimeError as error:  # the machine has no thread for us
            raise UnavailableError(error) from error
        call.nbytes = nbytes
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
        return self.guarded(call.result)

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

    def guarded(self, work: Callable[[], T]) -> T:
        """Run this here. Raises UnavailableError, or RefusedError for this call alone."""
        try:
            return work()
        except (UnavailableError, RefusedError):
            raise
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> UnavailableError:
        """Leave the server alone for a while; what to raise."""
        was_known = self.breaker.is_open
        self.breaker.failed()
        self._failed()
        return UnavailableError(None if was_known else error)

    def close(self) -> None:
        """Do nothing more."""
        self.breaker.close()
        self._calls.close()

    def join(self) -> None:
        """Wait until nothing is under way, after it was closed."""
        self._calls.join()
