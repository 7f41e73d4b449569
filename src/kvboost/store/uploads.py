"""The way from a tier to the devices of a model: pinned memory to read into, and few large copies out of it.

Made by the engine for a model on accelerators; the disk tier reads into it, lookups upload what any tier gave them.
Invariant: memory is given up only once the copies out of it are done; no copy begins in pageable memory, unless no more
can be pinned; a block that was uploaded keeps no memory of the host.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvboost.direct_io import PAGE, page_aligned, up_to_page
from kvboost.streams import Event, Streams
from kvboost.types import KVBlock

_BATCH_BYTES = 16 * 2**20  # uploaded together
_SLAB_BYTES = 32 * 2**20  # a power of two: torch rounds pinned memory up to one, and keeps it for the next slab
_MAX_GAP = 64 * 2**10  # between what is copied together: headers and rests of pages

Pair = tuple[torch.Tensor, torch.Tensor]  # a source and its target

_log = logging.getLogger(__name__)


class Uploads:
    """Moves blocks to the devices of one model. Thread-safe."""

    def __init__(self, streams: Streams, *, devices: Callable[[KVBlock], Sequence[torch.device] | None]) -> None:
        """``devices`` says where a block's tensors belong; None if it is to stay as it is."""
        self._streams, self._devices = streams, devices
        self._slabs: deque[weakref.ref[Any]] = deque(maxlen=32)  # few are in use
        self._rest: Any = np.empty(0, np.uint8)  # of the newest
        self._pins = True
        self._under_way: tuple[Event | None, Sequence[Pair]] = (None, ())  # the last batch, and when it is there
        self._lock = threading.Lock()

    def memory(self, nbytes: int) -> memoryview:
        """Pinned and page-aligned memory for what will be uploaded, the caller's as long as anything refers to it."""
        size = up_to_page(nbytes)
        with self._lock:
            if size > len(self._rest) and self._pins:
                try:
                    slab: Any = self._streams.host_memory(max(_SLAB_BYTES, size + PAGE)).numpy()
                    self._slabs.append(weakref.ref(slab))
                    self._rest = slab[-slab.ctypes.data % PAGE :]
                except (RuntimeError, MemoryError) as error:  # also what torch raises if memory cannot be pinned
                    self._pins = False
                    _log.warning("blocks are uploaded from pageable memory, no more can be pinned: %s", error)
            if size > len(self._rest):
                return page_aligned(nbytes)
            taken, self._rest = self._rest[:nbytes], self._rest[size:]
        return memoryview(taken)

    def upload(self, blocks: Iterable[KVBlock | None]) -> Iterator[KVBlock | None]:
        """The same in order, each on its devices once ``ready`` has happened."""
        batch: list[tuple[KVBlock, Sequence[torch.device]]] = []
        for block in blocks:
            devices = None if block is None else self._devices(block)
            if block is not None and devices is not None:
                batch.append((block, devices))
            if devices is None or sum(block.nbytes for block, _ in batch) >= _BATCH_BYTES:
                uploaded, batch = self._uploaded(batch), []  # what they were read into is wanted for the next ones
                yield from uploaded
            if devices is None:
                yield block
        yield from self._uploaded(batch)

    def _uploaded(self, batch: Sequence[tuple[KVBlock, Sequence[torch.device]]]) -> list[KVBlock]:
        placed: list[KVBlock] = []
        pairs: list[Pair] = []
        for block, devices in batch:
            targets = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if device.type != "cpu" else tensor.clone()
                for tensor, device in zip(block.tensors, devices, strict=True)
            )
            pairs += [pair for pair in zip(block.tensors, targets, strict=True) if pair[1].device.type != "cpu"]
            placed.append(replace(block, tensors=targets))
        if not pairs:
            return placed
        slabs = self._in_use()
        pairs = [(self._pinned(source, slabs), target) for source, target in pairs]
        copies = list(_together(pairs, self._in_use()))
        # Only now: the memory of any target may still be in use by what was computed before it was given out.
        ready = self._streams.copy(copies, after=self._streams.event())
        with self._lock:
            before, self._under_way = self._under_way, (ready, pairs)
        if before[0] is not None:
            before[0].synchronize()  # before its memory is given up
        return [replace(block, ready=ready) for block in placed]

    def _pinned(self, source: torch.Tensor, slabs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same in pinned memory."""
        if not source.nbytes or _slab_of(source, slabs) is not None:
            return source
        room = torch.frombuffer(self.memory(source.nbytes), dtype=torch.uint8)
        return room.view(source.dtype).view(source.shape).copy_(source)

    def _in_use(self) -> list[torch.Tensor]:
        slabs = (slab() for slab in self._slabs.copy())
        return [torch.from_numpy(slab) for slab in slabs if slab is not None]


def _together(pairs: Sequence[Pair], slabs: Sequence[torch.Tensor]) -> Iterator[Pair]:
    """The same copies, but neighbours in a slab go to a device as one and are taken apart there."""
    runs: list[list[Pair]] = []
    for source, target in sorted(pairs, key=lambda pair: (str(pair[1].device), pair[0].data_ptr())):
        last, beside = runs[-1][-1] if runs else (source, target)
        together = target.device == beside.device and _slab_of(source, slabs) is _slab_of(last, slabs)
        if not runs or not together or source.data_ptr() - last.data_ptr() > last.nbytes + _MAX_GAP:
            runs.append([])
        runs[-1].append((source, target))
    for run in runs:
        first, last = run[0][0], run[-1][0]
        slab = _slab_of(first, slabs)
        if slab is None or len(run) == 1:
            yield from run
            continue
        begin = first.data_ptr()
        host = slab.narrow(0, begin - slab.data_ptr(), last.data_ptr() + last.nbytes - begin)
        whole = torch.empty(len(host), dtype=torch.uint8, device=run[0][1].device)
        yield host, whole
        for source, target in run:
            part = whole.narrow(0, source.data_ptr() - begin, source.nbytes)
            yield part.view(target.dtype).view(target.shape), target


def _slab_of(tensor: torch.Tensor, slabs: Iterable[torch.Tensor]) -> torch.Tensor | None:
    return next((slab for slab in slabs if 0 <= tensor.data_ptr() - slab.data_ptr() < len(slab)), None)
