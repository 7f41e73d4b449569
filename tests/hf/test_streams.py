"""The accelerator's streams, with a device module that takes notes instead of computing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost.hf.streams import AcceleratorStreams, has_streams, streams_for, timing_event
from kvboost.streams import BlockingStreams
from tests.helpers.devices import Devices, PretendedTensor

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)


class _Module:
    """Like ``torch.cuda``."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self._names = iter(["upload", "download"])
        self._events = count()
        self._current = [_Stream(self, "model")]
        module = self

        class Event:
            def __init__(self, *, enable_timing: bool = False) -> None:
                self.number, self.enable_timing = next(module._events), enable_timing

            def record(self, stream: _Stream) -> None:
                module.notes.append(("record", self.number, stream.name))

            def synchronize(self) -> None:
                module.notes.append(("synchronize", self.number))

        self.Event = Event

    def Stream(self, device: torch.device) -> _Stream:
        return _Stream(self, next(self._names))

    def current_stream(self, device: torch.device) -> _Stream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()


class _Stream:
    def __init__(self, module: _Module, name: str) -> None:
        self._module, self.name = module, name

    def wait_event(self, event: Any) -> None:
        self._module.notes.append(("wait", self.name, event.number))

    def wait_stream(self, other: _Stream) -> None:
        self._module.notes.append(("wait for stream", self.name, other.name))


class _Tensor:
    """Where it lies, and nothing in it."""

    def __init__(self, module: _Module, name: str, device: torch.device) -> None:
        self._module, self.name, self.device = module, name, device

    def copy_(self, source: _Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self._module.notes.append(("copy", source.name, self.name, self._module.current_stream(_CUDA).name))

    def record_stream(self, stream: _Stream) -> None:
        assert self.device.type != "cpu"
        self._module.notes.append(("keep", self.name, stream.name))


def test_a_copy_runs_beside_the_model_after_what_it_copies() -> None:
    module = _Module()
    streams: Any = AcceleratorStreams([_CUDA], module=module)
    host, device = _Tensor(module, "host", _CPU), _Tensor(module, "device", _CUDA)
    streams.copy([(device, host), (device, host)], after=streams.event()).synchronize()
    assert module.notes == [
        ("record", 0, "model"),
        ("wait", "download", 0),
        ("copy", "device", "host", "download"),
        ("keep", "device", "download"),
        ("copy", "device", "host", "download"),
        ("keep", "device", "download"),
        ("record", 1, "download"),
        ("synchronize", 1),
    ]


def test_the_model_waits_for_what_was_uploaded_and_the_thread_does_not() -> None:
    module = _Module()
    streams: Any = AcceleratorStreams([_CUDA], module=module)
    host, device = _Tensor(module, "host", _CPU), _Tensor(module, "device", _CUDA)
    streams.copy([(host, device)], after=streams.event())
    streams.join()
    assert module.notes == [
        ("record", 0, "model"),
        ("wait", "upload", 0),
        ("copy", "host", "device", "upload"),
        ("keep", "device", "upload"),
        ("record", 1, "upload"),
        ("wait for stream", "model", "upload"),
    ]


def test_the_cpu_needs_no_streams() -> None:
    streams = streams_for([_CPU])
    assert isinstance(streams, BlockingStreams)
    assert streams.event() is None
    source, target = torch.arange(3), torch.zeros(3, dtype=torch.long)
    streams.copy([(source, target)], after=None)
    assert target.tolist() == [0, 1, 2]
    assert streams.on_host([source])[0] is source


def test_an_event_that_times_is_on_the_models_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    event: Any = timing_event(_CUDA)
    assert event.enable_timing
    assert module.notes == [("record", 0, "model")]
    assert timing_event(_CPU) is None
    assert timing_event(torch.device("meta")) is None


def test_one_queue_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on MPS, where reading an event's time waits for the device."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=None))
    assert timing_event(torch.device("mps")) is None
    assert not has_streams(torch.device("mps"))
    assert isinstance(streams_for([torch.device("mps")]), BlockingStreams)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_device_that_keeps_no_memory_for_other_streams_copies_at_once(
    keeps: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if not keeps:
            raise NotImplementedError("Could not run 'aten::record_stream' with arguments from the 'X' backend")

    with Devices():
        monkeypatch.setattr(PretendedTensor, "record_stream", record_stream)
        monkeypatch.setattr(torch, "get_device_module", lambda device: _Module())
        assert isinstance(streams_for([_CUDA]), AcceleratorStreams if keeps else BlockingStreams)
    assert ("each copy waits" in caplog.text) is not keeps
