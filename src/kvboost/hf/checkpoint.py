"""A checkpoint's safetensors files: where they are, and their weights read past the page cache, a few megabytes at a
time.

Used for the digests of weights, and by :mod:`kvboost.offload.weights`, once per checkpoint, to make slabs. The
safetensors library is not used, as it maps files into memory outside of any budget. Invariant: no whole weight is in
memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from kvboost.direct_io import PAGE, DirectFile, page_aligned, up_to_page
from kvboost.errors import ConfigError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SAMPLES = 4  # pages of each tensor: two fine-tunes differ all over, and more reads would delay every start
_READERS = 8  # at once: over a network each read waits
_PIECE = 8 * 2**20  # bytes
_MAX_HEADER = 100 * 10**6  # what the safetensors library allows


@dataclass(frozen=True)
class ShardTensor:
    """Where a checkpoint keeps a tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Shards:
    """The tensors of a checkpoint's files, by name."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the files' headers. Raises ConfigError if a file is not a safetensors file."""
        self._files = files
        self.tensors: dict[str, ShardTensor] = {}
        for file in files:
            self.tensors |= _tensors_of(file)

    @cached_property
    def key(self) -> str:
        """Changes when the checkpoint does: names, sizes and times of its files, and what they hold.

        In the hub's cache a file's own name is the digest of its content.
        """
        parts = [
            *(str((file.resolve().name, (stat := file.stat()).st_size, stat.st_mtime_ns)) for file in self._files),
            *(f"{name}:{tensor.dtype}:{tensor.shape}" for name, tensor in sorted(self.tensors.items())),
            self.sample(),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def sample(self) -> str:
        """A digest over a few pages of every tensor, read now: the files' times may say nothing."""
        spans: dict[Path, list[tuple[int, int]]] = {file: [] for file in self._files}
        for _, tensor in sorted(self.tensors.items()):
            spans[tensor.file].append((tensor.begin, tensor.end))
        return "|".join(sample_pages(file, of_file) for file, of_file in spans.items())

    def identify(self) -> list[Any]:
        """What tells these files from others that have been here before, or will be: read now."""
        found: list[Any] = [self.sample()]
        for file in self._files:
            stat = file.stat()
            # The time of change too: nobody can set it back, and a deleted file's inode may come back at once. In an
            # image or on a FUSE mount none of these need say anything, hence the sample.
            times = stat.st_mtime_ns, stat.st_ctime_ns
            with file.open("rb") as opened:
                header = hashlib.sha256(_header_of(opened)).hexdigest()
            found.append([str(file), stat.st_ino, stat.st_size, *times, header])
        return found

    def pieces(self, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
        """A tensor's bytes as ``dtype``, piece by piece; each piece is overwritten by the next."""
        tensor = self.tensors[name]
        buffer = page_aligned(_PIECE + 2 * PAGE)
        with DirectFile(tensor.file) as file:
            for start in range(tensor.begin, tensor.end, _PIECE):
                end = min(start + _PIECE, tensor.end)
                page = start // PAGE * PAGE
                if file.read(buffer[: up_to_page(end - page)], page) < end - page:
                    raise ConfigError(f"{tensor.file} ends too early; download the checkpoint again")
                piece = buffer[start - page : end - page]
                yield piece if dtype == tensor.dtype else _as(piece, tensor.dtype, dtype)


def sample_pages(file: Path, spans: Iterable[tuple[int, int]]) -> str:
    """A digest over the first page of each span, the last one and some between them. Spans of a few pages are whole."""
    pages: list[tuple[int, int]] = []
    for begin, end in spans:
        last = max(end - PAGE, begin)
        starts = {begin + (last - begin) * number // (_SAMPLES - 1) for number in range(_SAMPLES)}
        pages += ((start, min(PAGE, end - start)) for start in sorted(starts))
    with file.open("rb", buffering=0) as opened, ThreadPoolExecutor(_READERS) as pool:
        if hasattr(os, "posix_fadvise"):  # nothing is to be read ahead
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

        def read(part: list[tuple[int, int]]) -> bytes:
            hasher = hashlib.sha256()
            for start, size in part:
                hasher.update(os.pread(opened.fileno(), size, start))
            return hasher.digest()

        parts = [pages[reader::_READERS] for reader in range(_READERS)]
        return hashlib.sha256(b"".join(pool.map(read, parts))).hexdigest()


def _as(piece: memoryview, found: torch.dtype, wanted: torch.dtype) -> memoryview:
    # Through a copy: the piece may be unaligned.
    numbers = torch.frombuffer(bytearray(piece), dtype=found).to(wanted)
    return memoryview(numbers.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _header_of(opened: BinaryIO) -> bytes:
    length = int.from_bytes(opened.read(8), "little")
    return opened.read(min(length, _MAX_HEADER))  # what is cut off is no JSON


def _tensors_of(file: Path) -> dict[str, ShardTensor]:
    try:
        with file.open("rb") as opened:
            text = _header_of(opened)
        header, length = json.loads(text), len(text)
        found: dict[str, ShardTensor] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            tensor = ShardTensor(file, _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), begin, end)
            if end - begin != prod(tensor.shape) * tensor.dtype.itemsize or end > file.stat().st_size:
                raise ValueError(f"{name} does not lie where it should")
            found[name] = tensor
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no safetensors file this can read ({error!r}); check the checkpoint") from error


def checkpoint_files(source: str, gguf_file: str | None = None, hub: dict[str, Any] | None = None) -> list[Path]:
    """The checkpoint's files."""
    hub = hub or {}

    def find(name: str) -> str | None:
        found: str | None = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub)
        return found

    if gguf_file is not None:
        only = find(gguf_file)
        if only is not None:
            return [Path(only)]
    elif (index := find("model.safetensors.index.json")) is not None:
        return [Path(file) for file in get_checkpoint_shard_files(source, index, **hub)[0]]
    elif (only := find("model.safetensors")) is not None:
        return [Path(only)]
    raise ConfigError(
        f"{source} has no safetensors files, from which weights are streamed; save the model again with "
        "save_pretrained, or leave weight_budget out"
    )
