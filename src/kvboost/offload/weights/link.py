"""The interface to a device: memory within a budget, copies beside the computing, events that order the two.

Used by the streamer alone. The contract of every link, of the simulated one in ``tests/helpers`` too:

- ``allocate`` never gives out more than the budget, whatever was asked before.
- ``copy`` returns at once. The copy begins when ``after`` has happened and not before; copies run in the order asked.
- ``event`` stands for all that was computed so far by the calling thread.
- ``wait`` lets nothing computed afterwards begin before the copy is whole. A copy that failed raises here.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from kvboost.direct_io import page_aligned, up_to_page
from kvboost.errors import CapacityError
from kvboost.offload.weights.source import Extent, Source


class Link(Protocol):
    """Copies weights to where they are computed with."""

    @property
    def allocated(self) -> int:
        """Bytes given out so far."""
        ...

    def allocate(self, size: int) -> torch.Tensor:
        """Memory [bytes] that begins at a page. Raises CapacityError beyond the budget."""
        ...

    def copy(self, source: Source, extent: Extent, into: torch.Tensor, *, after: Any) -> Any:
        """Begin to copy a part of a slab, after that event; returns what :meth:`wait` waits for."""
        ...

    def event(self) -> Any:
        """What was computed so far."""
        ...

    def wait(self, copy: Any) -> None:
        """What is computed from here on sees the copied bytes."""
        ...

    def close(self) -> None:
        """End its threads. No more copies."""
        ...


class Budget:
    """Counts bytes against a limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def take(self, size: int) -> None:
        """Raises CapacityError if that is more than is left."""
        if self.used + size > self.limit:
            raise CapacityError(
                f"{size / 1e6:.1f} MB more do not fit a weight budget of {self.limit / 1e6:.1f} MB, of which "
                f"{self.used / 1e6:.1f} MB are taken; raise weight_budget"
            )
        self.used += size


class HostLink:
    """For computing on the CPU: a thread reads straight into the memory the model computes with."""

    def __init__(self, *, budget: int) -> None:
        self._budget = Budget(budget)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvboost-weights")

    @property
    def allocated(self) -> int:
        """Bytes given out so far."""
        return self._budget.used

    def allocate(self, size: int) -> torch.Tensor:
        """Memory [bytes] that begins at a page."""
        self._budget.take(up_to_page(size))
        return torch.frombuffer(page_aligned(up_to_page(size)), dtype=torch.uint8)

    def copy(self, source: Source, extent: Extent, into: torch.Tensor, *, after: None) -> Future[None]:
        """Begin to read. A CPU has computed everything before when it gets here, so there is nothing to wait for."""
        return self._worker.submit(source.read, extent, memoryview(into.numpy()))  # type: ignore[arg-type]

    def event(self) -> None:
        """Whatever was computed is done."""

    def wait(self, copy: Future[None]) -> None:
        """Return once the bytes are there."""
        copy.result()

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(wait=True, cancel_futures=True)


class AcceleratorLink:
    """For an accelerator: a stream of its own copies from pinned memory while the model's stream computes.

    Not run by this project's tests, which have no accelerator: reviewed against the contract above. Two threads meet
    here. The model's thread records events on its current stream and makes that stream wait for copies; the link's
    thread enqueues the copies on the copy stream, in order, and blocks only on files.
    """

    def __init__(self, device: torch.device, *, budget: int) -> None:
        self.device = device
        self._budget = Budget(budget)
        self._stream = torch.Stream(device)
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="kvboost-weights", initializer=self._use_copy_stream
        )
        # For sources that hold nothing: two pinned buffers, each with the copy that last read it.
        self._staging: list[tuple[torch.Tensor, Any]] = []

    @property
    def allocated(self) -> int:
        """Bytes given out so far."""
        return self._budget.used

    def allocate(self, size: int) -> torch.Tensor:
        """Device memory [bytes]. It is never given back while copies run, so the allocator cannot reuse it early."""
        self._budget.take(up_to_page(size))
        return torch.empty(up_to_page(size), dtype=torch.uint8, device=self.device)

    def copy(self, source: Source, extent: Extent, into: torch.Tensor, *, after: torch.Event) -> Future[Any]:
        """Hand the copy to the link's thread. ``after`` was recorded by the caller, so it is on its stream already."""
        return self._worker.submit(self._enqueue, source, extent, into, after)

    def event(self) -> torch.Event:
        """The calling thread's stream up to here."""
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def wait(self, copy: Future[Any]) -> None:
        """The calling thread's stream waits for the copy; the thread only until the copy is enqueued."""
        torch.accelerator.current_stream(self.device).wait_event(copy.result())

    def close(self) -> None:
        """End the thread, and return once the device is done with the buffers."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._stream.synchronize()

    def _use_copy_stream(self) -> None:
        torch.accelerator.set_stream(self._stream)  # a thread's current stream is its own; sets the device too

    def _enqueue(self, source: Source, extent: Extent, into: torch.Tensor, after: torch.Event) -> torch.Event:
        held = source.held(extent)
        staged = held is None
        if held is None:
            held = self._staged(source, extent)
        self._stream.wait_event(after)
        into[: extent.size].copy_(held, non_blocking=True)  # on the copy stream, this thread's current one
        done = torch.Event(self.device)
        done.record(self._stream)
        if staged:
            self._staging.append((self._staging.pop(0)[0], done))
        return done

    def _staged(self, source: Source, extent: Extent) -> torch.Tensor:
        """The bytes in the staging buffer that was used longest ago; the caller moves it behind the other."""
        while len(self._staging) < 2:
            self._staging.append((torch.empty(0, dtype=torch.uint8, pin_memory=True), None))
        buffer, last = self._staging[0]
        if last is not None:
            last.synchronize()  # the device may still be reading it
        if len(buffer) < extent.size:
            buffer = torch.empty(extent.size, dtype=torch.uint8, pin_memory=True)
            self._staging[0] = (buffer, None)
        source.read(extent, memoryview(buffer.numpy()))  # type: ignore[arg-type]
        return buffer[: extent.size]
