"""Streams of a device as the store needs them: copies beside the computing, and events that order the two.

Used by the stores; :mod:`kvboost.hf.streams` has the ones of an accelerator, and tests simulate
some. One object owns the copy streams of an engine. The contract:

- ``event`` stands for all that the calling thread has computed so far; None where that is done already.
- ``copy`` returns at once. The copy begins when ``after`` has happened and not before. Until the returned event has
  happened nobody may read the targets, write to the sources or give either to somebody else.
- ``join`` orders the calling thread's computing behind all copies to the device that were asked for before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a source and its target, equal in shape and dtype."""


class Event(Protocol):
    """Something that happens on a device."""

    def synchronize(self) -> None:
        """Return once it has happened."""
        ...


class Streams(Protocol):
    """The streams of the devices of one model. Thread-safe."""

    def event(self) -> Event | None:
        """What the calling thread has computed so far."""
        ...

    def copy(self, copies: Copies, *, after: Event | None) -> Event | None:
        """Copy between device and host; returns when it will be done, None if it is."""
        ...

    def join(self) -> None:
        """What the calling thread computes from here on sees what was copied to the device."""
        ...

    def on_host(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The values of tensors that are computed, in host memory; themselves if they lie there. Blocks."""
        ...

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory [bytes] that the device copies to and from without another copy. Raises if there is none."""
        ...


class BlockingStreams:
    """For the CPU, and for devices with one queue: every copy is done when the call returns."""

    def event(self) -> None:
        """All is done."""

    def copy(self, copies: Copies, *, after: Event | None) -> None:
        """Copy now."""
        if after is not None:
            after.synchronize()
        for source, target in copies:
            target.copy_(source)

    def join(self) -> None:
        """Nothing is under way."""

    def on_host(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copied if they lie on a device."""
        return tuple(tensor.cpu() for tensor in tensors)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Memory like any other."""
        return torch.empty(nbytes, dtype=torch.uint8)
