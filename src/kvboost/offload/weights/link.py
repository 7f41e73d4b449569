"""Where streamed weights come from, and how they get to where they are computed with: within a budget, in order.

Used by the streamer alone. Invariants: a source gives the same bytes from the slabs' files and from host memory; a link
keeps the contract of :class:`Link`, the simulated one in ``tests/helpers`` too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.direct_io import page_aligned, up_to_page
from kvboost.errors import CapacityError
from kvboost.offload.weights.slabs import SlabFolder


@dataclass(frozen=True)
class Extent:
    """A part of one slab, of whole pages."""

    slab: str
    begin: int
    size: int


class FileSource:
    """Reads the files every time, past the page cache: when even the host's memory is too small."""

    def __init__(self, folder: SlabFolder) -> None:
        self._folder = folder

    def held(self, extent: Extent) -> torch.Tensor | None:
        """The bytes, if they lie in host memory a device can copy from: they never do."""
        return None

    def read(self, extent: Extent, into: memoryview) -> None:
        """Read the whole extent straight to ``into``, which begins at a page. Raises CapacityError if that fails."""
        try:
            file = self._folder.file(extent.slab)
            found = file.read(into[: extent.size], extent.begin)
        except OSError as error:
            raise CapacityError(
                f"weights cannot be read from {self._folder.directory} ({error}); load the model again"
            ) from error
        if found != extent.size:
            raise CapacityError(f"{file.path} became shorter while it was in use; load the model again")


class HostSource:
    """Keeps every slab in host memory, from where an accelerator copies by itself."""

    def __init__(self, folder: SlabFolder, device: torch.device) -> None:
        files = FileSource(folder)
        self._slabs: dict[str, torch.Tensor] = {}
        for slab in folder.layers:
            # Pinned memory begins at a page, as the reads need it.
            held = (
                torch.empty(slab.size, dtype=torch.uint8, pin_memory=True)
                if device.type != "cpu"
                else torch.frombuffer(page_aligned(slab.size), dtype=torch.uint8)
            )
            files.read(Extent(slab.name, 0, slab.size), memoryview(held.numpy()))  # type: ignore[arg-type]
            self._slabs[slab.name] = held

    def held(self, extent: Extent) -> torch.Tensor | None:
        """The bytes, where they lie."""
        return self._slabs[extent.slab][extent.begin : extent.begin + extent.size]

    def read(self, extent: Extent, into: memoryview) -> None:
        """Copy the bytes."""
        held = self.held(extent)
        assert held is not None
        into[: extent.size] = memoryview(held.numpy())  # type: ignore[arg-type]


Source = FileSource | HostSource
"""Gives out parts of slabs."""


class Link(ABC):
    """Copies weights to where they are computed with. Copies run in the order in which they were asked for."""

    def __init__(self, *, budget: int) -> None:
        """``budget`` in bytes, of all that is given out."""
        self._budget = budget
        self.allocated = 0
        """Bytes given out so far."""

    def allocate(self, size: int) -> torch.Tensor:
        """Memory [bytes] that begins at a page. Raises CapacityError beyond the budget, whatever was asked before."""
        size = up_to_page(size)
        if self.allocated + size > self._budget:
            raise CapacityError(
                f"{size / 1e6:.1f} MB more do not fit a weight budget of {self._budget / 1e6:.1f} MB, of which "
                f"{self.allocated / 1e6:.1f} MB are taken; raise weight_budget"
            )
        self.allocated += size
        return self._memory(size)

    @abstractmethod
    def _memory(self, size: int) -> torch.Tensor:
        """So many whole pages of new memory."""

    @abstractmethod
    def copy(self, source: Source, extent: Extent, into: torch.Tensor, *, after: Any) -> Any:
        """Copy a part of a slab once that event has happened, and not before. Returns at once what to wait for."""

    @abstractmethod
    def event(self) -> Any:
        """All that was computed so far by the calling thread."""

    @abstractmethod
    def wait(self, copy: Any) -> None:
        """Let nothing be computed from here on before the copy is whole. A copy that failed raises here."""

    @abstractmethod
    def close(self) -> None:
        """End its threads. No more copies."""


class HostLink(Link):
    """For computing on the CPU: a thread reads straight into the memory the model computes with."""

    def __init__(self, *, budget: int) -> None:
        super().__init__(budget=budget)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvboost-weights")

    def _memory(self, size: int) -> torch.Tensor:
        return torch.frombuffer(page_aligned(size), dtype=torch.uint8)

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


class AcceleratorLink(Link):
    """For an accelerator: a stream of its own copies from pinned memory while the model's stream computes.

    Not run by this project's tests, which have no accelerator: reviewed against the contract above. Two threads meet
    here. The model's thread records events on its current stream and makes that stream wait for copies; the link's
    thread enqueues the copies on the copy stream, in order, and blocks only on files.
    """

    def __init__(self, device: torch.device, *, budget: int) -> None:
        super().__init__(budget=budget)
        self.device = device
        self._stream = torch.Stream(device)
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="kvboost-weights", initializer=self._use_copy_stream
        )
        # For sources that hold nothing: two pinned buffers, each with the copy that last read it.
        self._staging: list[tuple[torch.Tensor, Any]] = []

    def _memory(self, size: int) -> torch.Tensor:
        """On the device. It is never given back while copies run, so the allocator cannot reuse it early."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

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
