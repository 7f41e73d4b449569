"""The way from a tier to the devices of a model: pinned memory to read into, and few large copies out of it.

Made by the engine for a model on accelerators; the disk tier reads into it, lookups upload what any tier gave them.
Invariants: memory is given up only once the copies out of it are done; no copy begins in pageable memory, unless no
more can be pinned; a block that was uploaded keeps no memory of the host.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from kvboost.direct_io import PAGE, page_aligned, up_to_page
from kvboost.streams import Event, Streams
from kvboost.types import KVBlock

_BATCH_BYTES = 16 * 2**20  # uploaded together
_SLAB_BYTES = 32 * 2**20  # a power of two: torch rounds pinned memory up to one, and keeps it for the next slab
_SLABS = 4  # from which copies are joined
_UNDER_WAY = 2  # batches; who reads faster than the devices take it waits
_MAX_GAP = 64 * 2**10  # between what is copied together: headers and rests of pages

Pair = tuple[torch.Tensor, torch.Tensor]
"""A source and its target."""

_log = logging.getLogger(__name__)


class Uploads:
    """Moves blocks to the devices of one model. Thread-safe."""

    def __init__(self, streams: Streams, *, devices: Callable[[KVBlock], Sequence[torch.device] | None]) -> None:
        """``devices`` says where a block's tensors belong; None if it is to stay as it is."""
        self._streams, self._devices = streams, devices
        self._slabs: deque[torch.Tensor] = deque(maxlen=_SLABS)  # the newest last
        self._used = 0  # of the newest
        self._pins = True
        self._under_way: deque[tuple[Event, Sequence[Pair]]] = deque()  # what is read until then
        self._lock = threading.Lock()

    def memory(self, nbytes: int) -> memoryview:
        """Pinned and page-aligned memory for what will be uploaded, the caller's as long as anything refers to it."""
        size = up_to_page(nbytes)
        with self._lock:
            if self._pins and not (self._slabs and self._used + size <= len(self._slabs[-1])):
                try:
                    self._slabs.append(self._streams.host_memory(max(_SLAB_BYTES, size + PAGE)))
                    self._used = -self._slabs[-1].data_ptr() % PAGE
                except (RuntimeError, MemoryError) as error:  # also what torch raises if memory cannot be pinned
                    self._pins = False
                    _log.warning("blocks are uploaded from pageable memory, no more can be pinned: %s", error)
            if not self._pins:
                return page_aligned(nbytes)
            taken = self._slabs[-1].narrow(0, self._used, nbytes).numpy()
            self._used += size
        return memoryview(taken)  # type: ignore[arg-type]

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
            sources = zip(block.tensors, targets, strict=True)
            pairs += [(self._pinned(source), target) for source, target in sources if target.device.type != "cpu"]
            placed.append(replace(block, tensors=targets))
        if not pairs:
            return placed
        # The targets' memory may still be in use by what was computed before.
        ready = self._streams.copy(_together(pairs, self._slabs.copy()), after=self._streams.event())
        with self._lock:
            if ready is not None:
                self._under_way.append((ready, pairs))
            done = [self._under_way.popleft() for _ in range(len(self._under_way) - _UNDER_WAY)]
        for until, _ in done:  # which holds their memory till then
            until.synchronize()
        return [replace(block, ready=ready) for block in placed]

    def _pinned(self, source: torch.Tensor) -> torch.Tensor:
        """The same in pinned memory."""
        if not source.nbytes or _slab_of(source, self._slabs.copy()) is not None:
            return source
        room = torch.frombuffer(self.memory(source.nbytes), dtype=torch.uint8)
        return room.view(source.dtype).view(source.shape).copy_(source)


def _together(pairs: Sequence[Pair], slabs: Sequence[torch.Tensor]) -> Iterator[Pair]:
    """The same copies, but neighbours in a slab go to a device as one and are taken apart there."""
    runs: list[list[Pair]] = []
    for source, target in sorted(pairs, key=lambda pair: (str(pair[1].device), pair[0].data_ptr())):
        last, beside = runs[-1][-1] if runs else (source, None)
        near = source.data_ptr() - last.data_ptr() <= last.nbytes + _MAX_GAP
        same_slab = _slab_of(source, slabs) is _slab_of(last, slabs)
        if beside is None or target.device != beside.device or not near or not same_slab:
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
