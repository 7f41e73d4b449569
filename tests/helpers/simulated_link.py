"""A device for tests: byte-capped memory, a link that copies at a capped rate, and a queue that computes later.

For whoever tests streaming of weights (:class:`SimulatedLink`) or stores (:class:`SimulatedStreams`). Invariant: what a
real accelerator would only sometimes show, this one always shows: memory is poisoned from the moment a copy into it
begins, and with ``queued``, or simulated streams, the caller runs ahead of what it has computed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvboost.direct_io import page_aligned
from kvboost.offload.weights.link import Extent, Link, Source
from kvboost.streams import Copies

POISON = 0xFF  # of every byte: not a number in any floating type


class _Event:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.error: BaseException | None = None

    def synchronize(self) -> None:
        self.happened.wait()


class _Queue:
    """One thread that does what it is given, in order."""

    def __init__(self, delay: Callable[[], float], errors: list[BaseException]) -> None:
        """``delay`` gives seconds to lose before each computation; what goes wrong is added to ``errors``."""
        self._delay, self._errors = delay, errors
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def compute(self, work: Callable[[], None]) -> None:
        def run() -> None:
            time.sleep(self._delay())
            work()

        self.put(run)

    def close(self) -> None:
        """Return once everything given so far is done."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - looked at by the test, or raised by close
                self._errors.append(error)


class SimulatedLink(Link):
    """Copies on one thread; with ``queued``, computes on another, as a device does."""

    def __init__(
        self,
        *,
        budget: int,
        bytes_per_second: float = float("inf"),
        queued: bool = False,
        delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``delay`` gives seconds to lose before each copy and each computation."""
        super().__init__(budget=budget)
        self._rate, self._delay = bytes_per_second, delay
        self.copy_seconds = 0.0
        """How long copies took, without waiting for their turn."""
        self.copies: list[Extent] = []
        """What was copied, in order."""
        self.errors: list[BaseException] = []
        """What went wrong in the queue."""
        self._copying = _Queue(delay, self.errors)
        self._computing = _Queue(delay, self.errors) if queued else None

    def _memory(self, size: int) -> torch.Tensor:
        """Poisoned memory [bytes]."""
        return torch.frombuffer(page_aligned(size), dtype=torch.uint8).fill_(POISON)

    def copy(self, source: Source, extent: Extent, into: torch.Tensor, *, after: _Event) -> _Event:
        """Poison the memory, then copy as fast as the link allows."""
        done = _Event()

        def run() -> None:
            after.happened.wait()
            time.sleep(self._delay())
            begun = time.perf_counter()
            try:
                into.fill_(POISON)
                source.read(extent, memoryview(into.numpy()))  # type: ignore[arg-type]
                # The last byte comes when the link has had time for all of them.
                whole = into[: extent.size].clone()
                into.fill_(POISON)
                time.sleep(max(0.0, begun + extent.size / self._rate - time.perf_counter()))
                into[: extent.size].copy_(whole)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                done.error = error
            self.copy_seconds += time.perf_counter() - begun
            self.copies.append(extent)
            done.happened.set()

        self._copying.put(run)
        return done

    def compute(self, work: Callable[[], None]) -> None:
        """Do this behind everything computed and waited for so far: now, or with ``queued`` when its turn comes."""
        if self._computing is not None:
            self._computing.compute(work)
        else:
            work()

    def event(self) -> _Event:
        """All that was handed to :meth:`compute`."""
        event = _Event()
        if self._computing is not None:
            self._computing.put(event.happened.set)
        else:
            event.happened.set()
        return event

    def wait(self, copy: _Event) -> None:
        """Nothing is computed until the copy is whole."""
        if self._computing is not None:
            self._computing.put(lambda: _whole(copy))
        else:
            _whole(copy)

    def close(self) -> None:
        """Return once everything asked for is done."""
        if self._computing is not None:
            self._computing.close()  # first: what is computed may still wait for copies
        self._copying.close()


def _whole(copy: _Event) -> None:
    copy.happened.wait()
    if copy.error is not None:
        raise copy.error


class SimulatedStreams:
    """The :class:`kvboost.streams.Streams` of a device that lags behind, on the host's own memory.

    What is handed to :meth:`compute` runs later, on one thread. Copies run later still, on another. The targets of a
    copy are poisoned from the moment it is asked for, so whoever reads too early, or writes where something is still to
    be read, sees poison.
    """

    def __init__(self, *, delay: Callable[[], float] = lambda: 0.0) -> None:
        """``delay`` gives seconds to lose before each copy and each computation."""
        self._delay = delay
        self.errors: list[BaseException] = []
        """What went wrong in the queues: failed assertions of :meth:`compute` among them."""
        self._computing, self._copying = _Queue(delay, self.errors), _Queue(delay, self.errors)

    def compute(self, work: Callable[[], None]) -> None:
        """Do this behind everything computed so far, when its turn comes."""
        self._computing.compute(work)

    def event(self) -> _Event:
        """All that was handed to :meth:`compute`."""
        event = _Event()
        self._computing.put(event.happened.set)
        return event

    def copy(self, copies: Copies, *, after: Any) -> _Event:
        """Poison the targets, then copy when ``after`` has happened."""
        pairs, done = list(copies), _Event()
        for _, target in pairs:
            _bytes_of(target).fill_(POISON)

        def run() -> None:
            if after is not None:
                after.synchronize()
            time.sleep(self._delay())
            for source, target in pairs:
                target.copy_(source)
            done.happened.set()

        self._copying.put(run)
        return done

    def join(self) -> None:
        """Nothing is computed until the copies asked for so far are whole."""
        copied = _Event()
        self._copying.put(copied.happened.set)
        self._computing.put(copied.synchronize)

    def on_host(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies of what the tensors hold now: poison, if they are not computed yet."""
        found = tuple(torch.empty_like(tensor) for tensor in tensors)
        self.copy(zip(tensors, found, strict=True), after=None).synchronize()
        return found

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Poisoned memory [bytes]."""
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def close(self) -> None:
        """Return once everything asked for is done; raises the first error of the queues."""
        self._computing.close()  # first: copies wait for what is computed
        self._copying.close()
        if self.errors:
            raise self.errors[0]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
