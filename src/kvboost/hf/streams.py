"""The streams of an accelerator: the model's own, and one for copies in each direction.

Made by the engine's stores, one object for all of them. The model runs on the current stream of the thread that runs
it, as Transformers and the user's own tensors do. Copies run on streams of their own, so that neither waits for the
other longer than an event asks. Invariant: memory that a copy uses is recorded on its stream, so that the allocator
does not give it away before the copy is done.

Not run on an accelerator here: the tests hold it to its order of calls with a device module that takes notes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvboost.streams import BlockingStreams, Copies, Event, Streams

_log = logging.getLogger(__name__)


def has_streams(device: torch.device) -> bool:
    """Whether copies run beside the computing there. MPS has one queue, and shares the host's memory."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "stream")


def timing_event(device: torch.device) -> torch.Event | None:
    """An event on the calling thread's stream that knows when it happened; None without streams."""
    if not has_streams(device):  # on MPS, reading an event's time waits for the device
        return None
    module: Any = torch.get_device_module(device)
    event: torch.Event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def streams_for(devices: Iterable[torch.device]) -> Streams:
    """The streams of a model on these devices. The CPU needs none, and MPS has one queue for everything."""
    found = sorted({device for device in devices if device.type != "cpu"}, key=str)
    if not found or not all(has_streams(device) for device in found):
        return BlockingStreams()
    module: Any = torch.get_device_module(found[0])
    try:
        for device in found:
            torch.empty(1, device=device).record_stream(module.current_stream(device))
    except NotImplementedError as error:
        _log.warning("%s cannot keep memory for copies on other streams, so each copy waits: %s", found[0], error)
        return BlockingStreams()
    return AcceleratorStreams(found, module=module)


class _Events:
    """One event for each device; they have happened when all have."""

    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class AcceleratorStreams:
    """Two copy streams for each device: the hardware copies in both directions at once."""

    def __init__(self, devices: Sequence[torch.device], *, module: Any) -> None:
        """``module`` is the devices' own, such as ``torch.cuda``."""
        self._devices, self._module = tuple(devices), module
        self._uploads = {device: module.Stream(device=device) for device in devices}
        self._downloads = {device: module.Stream(device=device) for device in devices}

    def event(self) -> Event:
        """The calling thread's streams up to here."""
        return _Events([self._recorded(self._module.current_stream(device)) for device in self._devices])

    def copy(self, copies: Copies, *, after: Event | None) -> Event:
        """Enqueue on the copy stream of each pair's device and direction."""
        used: dict[int, Any] = {}
        for source, target in copies:
            upload = target.device.type != "cpu"
            stream = (self._uploads if upload else self._downloads)[target.device if upload else source.device]
            if id(stream) not in used:
                used[id(stream)] = stream
                for event in after.events if isinstance(after, _Events) else ():
                    stream.wait_event(event)
            with self._module.stream(stream):
                target.copy_(source, non_blocking=True)
            (target if upload else source).record_stream(stream)
        return _Events([self._recorded(stream) for stream in used.values()])

    def join(self) -> None:
        """The calling thread's streams wait for the copies; the thread does not."""
        for device in self._devices:
            self._module.current_stream(device).wait_stream(self._uploads[device])

    def on_host(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copied to pinned memory: to pageable memory the copy would come in the device's own time."""
        found = tuple(tensor if tensor.device.type == "cpu" else self._like(tensor) for tensor in tensors)
        pairs = zip(tensors, found, strict=True)
        self.copy([(source, target) for source, target in pairs if source is not target], after=None).synchronize()
        return found

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _recorded(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event
