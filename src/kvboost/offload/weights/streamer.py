"""Weight streaming: brings the weights of decoder layers into memory just before they are computed with.

Sits on a model as hooks and round its decoder's forward. Invariants: a weight is a view into a buffer that holds it, or
a placeholder without memory, so an unannounced use is an error and never a wrong number; a buffer is filled
anew only after all that was computed with it; one forward pass runs at a time, as there are two buffers for all.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch

from kvboost.capacity import WeightMemory
from kvboost.hf.weights import attach_streamed_weights
from kvboost.offload.weights.link import Link, Source
from kvboost.offload.weights.skeleton import Unit, WeightPlacement
from kvboost.offload.weights.slabs import SlabFolder, Weight


@dataclass(frozen=True)
class StreamStats:
    """What weight streaming did so far."""

    streamed_bytes: int
    """Copied into the buffers, or on the way."""
    loads: int
    misses: int
    """Loads that had not begun before they were needed."""
    waited_seconds: float
    """How long the computing thread waited for weights."""


@dataclass
class _Buffer:
    memory: torch.Tensor  # [bytes]
    free_after: Any
    """The event after which it may be filled again."""
    unit: int = -1
    filled: Any = None


@dataclass(frozen=True)
class _Target:
    """A parameter of a module, which gets its weight while it is needed."""

    module: torch.nn.Module
    key: str
    weight: Weight
    placeholder: torch.nn.Parameter


class WeightStreamer:
    """Streams the weights of one model. Made by :func:`kvboost.offload.weights.load_streamed`."""

    def __init__(
        self, model: Any, *, placement: WeightPlacement, link: Link, source: Source, folder: SlabFolder
    ) -> None:
        self.placement, self.folder = placement, folder
        self._link, self._source = link, source
        self._targets = [[_target(model, weight) for weight in unit.weights] for unit in placement.units]
        self._keys = {
            (id(p.module), p.key): (unit, p) for unit in placement.streamed for p in self._targets[unit.index]
        }
        self._views: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        self._lock = threading.RLock()  # held over each forward pass
        self._current = -1
        self._waited, self._bytes, self._loads, self._misses = 0.0, 0, 0, 0
        self._next = _upcoming(placement)
        self._load_residents()
        self._buffers = [_Buffer(link.allocate(placement.buffer_bytes), None) for _ in placement.streamed[:2]]
        for buffer in self._buffers:
            buffer.free_after = link.event()
        for target in (target for unit in placement.streamed for target in self._targets[unit.index]):
            target.module._parameters[target.key] = target.placeholder
        self._aim(len(placement.units))

    def attach(self, model: Any, layers: Sequence[torch.nn.Module]) -> None:
        """Put the hooks on the model; none where everything stays."""
        weakref.finalize(model, _close, self._link, self.folder)
        if not self.placement.streamed:
            return
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        # Not a pair of hooks: torch skips the second when something other than an Exception ends the pass.
        decoder.forward = self._one_at_a_time(decoder.forward)
        if self.placement.parts_per_layer == 1:
            for unit in self.placement.units:
                layers[unit.layer].register_forward_pre_hook(partial(self.need, unit.index))
        else:
            for unit, targets in zip(self.placement.units, self._targets, strict=True):
                for module in {id(target.module): target.module for target in targets}.values():
                    module.register_forward_pre_hook(partial(self.need, unit.index))
        attach_streamed_weights(model, self)

    def need(self, index: int, *_: Any) -> None:
        """Have this unit's weights ready for what is computed next; what the last one held may be overwritten.

        As a hook it is also given the module and its arguments.
        """
        with self._lock:
            if index == self._current:
                return
            self._leave()
            self._aim(index)
            self._current = index
            if index in self.placement.resident:
                return
            number = next(n for n, buffer in enumerate(self._buffers) if buffer.unit == index)
            begun = time.perf_counter()
            try:
                self._link.wait(self._buffers[number].filled)
            except BaseException:
                self._buffers[number].unit, self._current = -1, -1  # it holds nothing whole
                raise
            self._waited += time.perf_counter() - begun
            for target, view in zip(self._targets[index], self._views_of(number, index), strict=True):
                target.module._parameters[target.key] = view

    def stats(self) -> StreamStats:
        """Counters since the model was loaded."""
        return StreamStats(self._bytes, self._loads, self._misses, self._waited)

    @property
    def memory(self) -> WeightMemory:
        """Where the weights are, in bytes."""
        return self.placement.memory

    def holds(self, module: torch.nn.Module, key: str) -> bool:
        """Whether this parameter is streamed, so that its tensor says nothing about its content."""
        return (id(module), key) in self._keys

    def digest(self, module: torch.nn.Module, key: str, name: str) -> bytes:
        """The digest of such a parameter under the name it has now."""
        unit, target = self._keys[id(module), key]
        if name == target.weight.name:
            return bytes.fromhex(self.folder.digests[name])  # was compared with the bytes when the slab was opened
        return bytes.fromhex(self.folder.digest(unit.extent.slab, target.weight, name=name))

    def _one_at_a_time(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward pass during which no other one runs, however it ends."""

        @wraps(forward)
        def alone(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._leave()
                    self._aim(len(self.placement.units))

        return alone

    def _leave(self) -> None:
        """Nothing computed from here on uses the current unit."""
        left, self._current = self._current, -1
        if left < 0 or left in self.placement.resident:
            return
        for target in self._targets[left]:
            target.module._parameters[target.key] = target.placeholder
        for buffer in self._buffers:
            if buffer.unit == left:
                buffer.free_after = self._link.event()

    def _aim(self, index: int) -> None:
        """Have the two streamed units that come next, this one included, in the buffers or on the way."""
        wanted = self._next[index]
        for unit in wanted:
            if any(buffer.unit == unit.index for buffer in self._buffers):
                continue
            buffer = next(b for b in self._buffers if all(b.unit != other.index for other in wanted))
            self._misses += unit.index == index
            self._loads += 1
            self._bytes += unit.extent.size
            buffer.unit = -1  # an interrupt here must not leave it marked as holding this unit
            buffer.filled = self._link.copy(self._source, unit.extent, buffer.memory, after=buffer.free_after)
            buffer.unit = unit.index

    def _views_of(self, number: int, index: int) -> list[torch.nn.Parameter]:
        made = self._views.get((number, index))
        if made is None:
            unit = self.placement.units[index]
            made = self._views[number, index] = _parameters(unit, self._buffers[number].memory)
        return made

    def _load_residents(self) -> None:
        for index in sorted(self.placement.resident):
            unit = self.placement.units[index]
            memory = self._link.allocate(unit.extent.size)
            self._link.wait(self._link.copy(self._source, unit.extent, memory, after=self._link.event()))
            for target, parameter in zip(self._targets[index], _parameters(unit, memory), strict=True):
                target.module._parameters[target.key] = parameter


def _close(link: Link, folder: SlabFolder) -> None:
    link.close()
    folder.close()


def _upcoming(placement: WeightPlacement) -> list[list[Unit]]:
    """For each unit, and for the end of the pass: the next two that are streamed, itself included, wrapping round."""
    streamed = placement.streamed
    upcoming: list[list[Unit]] = []
    for index in range(len(placement.units) + 1):
        later = [unit for unit in streamed if unit.index >= index]
        upcoming.append((later + [unit for unit in streamed if unit.index < index])[:2])
    return upcoming


def _parameters(unit: Unit, memory: torch.Tensor) -> list[torch.nn.Parameter]:
    view = partial(Weight.view, buffer=memory, begin=unit.extent.begin)
    return [torch.nn.Parameter(view(weight), requires_grad=False) for weight in unit.weights]


def _target(model: Any, weight: Weight) -> _Target:
    module, _, key = weight.name.rpartition(".")
    empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    return _Target(model.get_submodule(module), key, weight, torch.nn.Parameter(empty, requires_grad=False))
