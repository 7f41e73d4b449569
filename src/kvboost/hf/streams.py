"""The streams of an accelerator: the model's own, and one for copies in each direction.

Made by the engine's stores, one object for all of them. The model runs on the current stream of the thread that runs
it, as Transformers and the user's own tensors do. Copies run on streams of their own, so that neither waits for the
other longer than an event asks. Invariant: memory that a copy uses is recorded on its stream, so that the allocator
does not give it away before the copy is done.

Not run on an accelerator here: the tests hold it to its order of calls with a device module that takes notes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvboost.streams import BlockingStreams, Copies, Event, Streams

_log = logging.getLogger(__name__)
_STAGING = 8 * 2**20  # bytes; pinned once, everything that goes to a file passes through it


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
        self._staging: torch.Tensor | None = None
        self._lock = threading.Lock()  # of the staging buffer

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
        """Copied through pinned memory, a piece at a time: pageable memory would be copied in the device's own time."""
        return tuple(tensor if tensor.device.type == "cpu" else self._download(tensor) for tensor in tensors)

    def _download(self, tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        source, target = (flat.contiguous().view(-1).view(torch.uint8) for flat in (tensor, found))
        with self._lock:
            if self._staging is None:
                self._staging = self.host_memory(_STAGING)
            for start in range(0, len(source), _STAGING):
                piece = source[start : start + _STAGING]
                staged = self._staging[: len(piece)]
                self.copy([(piece, staged)], after=None).synchronize()
                target[start : start + len(piece)].copy_(staged)
        return found

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _recorded(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event
