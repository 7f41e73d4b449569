"""Simulated devices whose copies come late, with the streams and the pinned memory of an accelerator.

For tests of what copies between tiers and devices. Computing is done at once, as in :class:`Devices`. A copy on a
copy stream is done later, on a thread of its own, and its target is poisoned from the moment it is asked for. Pinned
memory that nobody refers to is poisoned and given out again, as torch's allocator does, which knows of no copies out of
memory that came to it by way of numpy. So whoever reads too early, or gives memory up too early, gets poison.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self
from unittest import mock

import torch

from kvboost.engine import stores
from kvboost.hf.streams import AcceleratorStreams
from tests.helpers.devices import CPU, Devices, host
from tests.helpers.simulated_link import POISON, _Queue


class _Stream:
    """A copy stream; without a queue that of the model, which is never behind."""

    def __init__(self, jobs: _Queue | None) -> None:
        self.jobs = jobs

    def wait_event(self, event: _Event) -> None:
        assert self.jobs is not None
        self.jobs.put(event.synchronize)

    def wait_stream(self, other: _Stream) -> None:
        event = _Event()
        event.record(other)
        event.synchronize()  # what is computed next is computed at once


class _Event:
    def __init__(self) -> None:
        self._happened = threading.Event()

    def record(self, stream: _Stream) -> None:
        if stream.jobs is None:
            self._happened.set()
        else:
            stream.jobs.put(self._happened.set)

    def synchronize(self) -> None:
        assert self._happened.wait(60)


class _Module:
    """Like ``torch.cuda``."""

    Event = _Event

    def __init__(self, delay: Callable[[], float]) -> None:
        self.errors: list[BaseException] = []
        self._delay, self._model, self._local = delay, _Stream(None), threading.local()
        self.queues: list[_Queue] = []

    def Stream(self, device: torch.device) -> _Stream:
        self.queues.append(_Queue(self._delay, self.errors))
        return _Stream(self.queues[-1])

    def current_stream(self, device: torch.device | None = None) -> _Stream:
        return getattr(self._local, "stream", self._model)

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before


class LateDevices(Devices):
    """While it is entered, engines get streams of these devices."""

    def __init__(self, *, delay: Callable[[], float] = lambda: 0.0) -> None:
        """``delay`` gives seconds to lose before each copy."""
        super().__init__()
        self._module = _Module(delay)
        self._free: list[torch.Tensor] = []
        module, devices = self._module, self

        class Streams(AcceleratorStreams):
            def __init__(self, found: Any) -> None:
                super().__init__(sorted({device for device in found if device != CPU}, key=str), module=module)

            def host_memory(self, nbytes: int) -> torch.Tensor:
                return devices.host_memory(nbytes)

        self.streams_for: Callable[[Any], AcceleratorStreams] = Streams

    def __enter__(self) -> Self:
        super().__enter__()
        self._patches.enter_context(mock.patch.object(stores, "streams_for", self.streams_for))
        return self

    def __exit__(self, *exception: Any) -> None:
        for jobs in self._module.queues:
            jobs.close()
        super().__exit__(*exception)
        if self._module.errors:
            raise self._module.errors[0]

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Pinned memory: what was given up last, if it is as large."""
        fitting = [memory for memory in self._free if len(memory) == nbytes]
        if fitting:
            whole = fitting[-1]
            self._free = [memory for memory in self._free if memory is not whole]
        else:
            whole = torch.full((nbytes,), POISON, dtype=torch.uint8)
            self.pinned.append(whole)
        given: Any = whole.numpy()[:]
        weakref.finalize(given, self._given_up, whole)
        return torch.from_numpy(given)

    def _given_up(self, memory: torch.Tensor) -> None:
        memory.numpy().fill(POISON)
        self._free.append(memory)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies on a copy stream later, all else now."""
        jobs = self._module.current_stream().jobs
        if jobs is None or func.overloadpacket.__name__ != "copy_":
            return super().run(func, args, kwargs)
        target, source = args[:2]
        self._copied("copy_", source, target.device)
        into, values = host(target), self._as_read_later(source)
        into.view(-1).view(torch.uint8).fill_(POISON)

        def copy() -> None:
            with torch.inference_mode():  # in which some of them were made
                into.copy_(values)

        jobs.compute(copy)
        return target

    def _as_read_later(self, source: torch.Tensor) -> torch.Tensor:
        """Not kept alive, if it is pinned; of pageable memory the driver makes a copy at once."""
        if source.device != CPU:
            return host(source)
        memory = self.pinned_memory_of(source)
        if memory is None:
            return source.clone()
        start = source.data_ptr() - memory.data_ptr()
        return memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
