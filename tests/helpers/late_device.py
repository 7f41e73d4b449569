"""A device that is asked for work at once and does it later, and the host's clock beside it, both moved by hand.

For tests of what is timed. Its events are as ``torch.cuda.Event(enable_timing=True)``; who waits for one fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest


@dataclass
class Mark:
    """An event of the device."""

    device: LateDevice
    at: float

    def query(self) -> bool:
        """Whether it has happened."""
        return self.device.now >= self.at

    def elapsed_time(self, later: Mark) -> float:
        """Milliseconds, of events that have happened."""
        assert self.query()
        assert later.query()
        return 1000.0 * (later.at - self.at)

    def synchronize(self) -> None:
        """As it would keep a request."""
        raise AssertionError("the host waits for the device")


class LateDevice:
    """Does one thing after the other."""

    def __init__(self) -> None:
        self.now = 0.0
        """The host's clock, in seconds."""
        self._free_at = 0.0

    def ask(self, *, host: float, device: float) -> None:
        """Work that the host asks for in ``host`` seconds, and that takes the device ``device`` seconds."""
        self.now += host
        self._free_at = max(self._free_at, self.now) + device

    def mark(self) -> Mark:
        """An event behind all that was asked for."""
        return Mark(self, max(self.now, self._free_at))

    def read(self) -> None:
        """The host reads a result: it has waited for the device, as the caller of a prefill does for its token."""
        self.now = max(self.now, self._free_at)

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let the stages of requests be timed by its clock."""
        clock: Any = SimpleNamespace(perf_counter=lambda: self.now)
        patch.setattr("kvboost.core.costs.time", clock)
