"""Where streamed weights come from: the slabs' files, or host memory that holds them.

Read by a link, on its own thread. Invariant: ``read`` gives the same bytes from either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvboost.direct_io import page_aligned
from kvboost.errors import CapacityError
from kvboost.offload.weights.slabs import SlabFolder


@dataclass(frozen=True)
class Extent:
    """A part of one slab, of whole pages."""

    slab: str
    begin: int
    size: int


class Source(Protocol):
    """Gives out parts of slabs."""

    def held(self, extent: Extent) -> torch.Tensor | None:
        """The bytes, if they lie in host memory a device can copy from; else None."""
        ...

    def read(self, extent: Extent, into: memoryview) -> None:
        """Write the bytes to ``into``, which begins at a page. Raises CapacityError if they cannot be read."""
        ...


class FileSource:
    """Reads the files every time, past the page cache: when even the host's memory is too small."""

    def __init__(self, folder: SlabFolder) -> None:
        self._folder = folder

    def held(self, extent: Extent) -> torch.Tensor | None:
        """Nothing is held."""
        return None

    def read(self, extent: Extent, into: memoryview) -> None:
        """One read of the whole extent, straight to its place."""
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
