"""The matrices of each decoder layer in one file, page by page as they are read back; everything else in another.

Made once from a checkpoint, in a folder of its own, and used by every later start. ``slabs.json`` says what lies where.
Invariants: a file under its name is whole (written under another name and renamed); ``slabs.json`` names only such
files, so an interrupted run goes on where it stopped; every weight carries the digest the fingerprint uses.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from kvboost.direct_io import DirectFile, page_aligned, up_to_page
from kvboost.errors import ConfigError
from kvboost.hf.weights import weight_hasher

_VERSION = 1
_HEADER = "slabs.json"
_PIECE = 8 * 2**20  # bytes read, hashed or written at once
REST = "rest"

Pieces = Callable[[str], Iterable[memoryview]]
"""The bytes of a weight, by its name, as they lie in the slab."""


@dataclass(frozen=True)
class Weight:
    """One weight and where it lies in its slab."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next weight may begin: every weight begins at a page."""
        return self.offset + up_to_page(self.size)

    def view(self, buffer: torch.Tensor, *, begin: int = 0) -> torch.Tensor:
        """This weight within a buffer [bytes] that holds its slab from ``begin`` on."""
        first = self.offset - begin
        return buffer[first : first + self.size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Slab:
    """One file of weights."""

    name: str
    weights: tuple[Weight, ...]

    @property
    def size(self) -> int:
        """Bytes of the file: whole pages."""
        return self.weights[-1].end if self.weights else 0


def lay_out(name: str, weights: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> Slab:
    """A slab of these weights, in this order, each beginning at a page."""
    placed: list[Weight] = []
    for weight, dtype, shape in weights:
        placed.append(Weight(weight, dtype, tuple(shape), placed[-1].end if placed else 0))
    return Slab(name, tuple(placed))


class SlabFolder:
    """The slabs of one checkpoint, whole and checked."""

    def __init__(self, directory: Path, slabs: Sequence[Slab], digests: dict[str, str]) -> None:
        self.directory = directory
        self.rest = next(slab for slab in slabs if slab.name == REST)
        self.layers = tuple(slab for slab in slabs if slab.name != REST)
        self.digests = digests
        """Of every weight, as the fingerprint has it."""
        self._files: dict[str, DirectFile] = {}
        self._lock = threading.Lock()

    def file(self, slab: str) -> DirectFile:
        """The opened file of a slab."""
        with self._lock:
            if slab not in self._files:
                self._files[slab] = DirectFile(self.directory / _file_name(slab))
            return self._files[slab]

    def pieces(self, slab: str, weight: Weight) -> Iterator[memoryview]:
        """The bytes of a weight, a few megabytes at a time; each piece is overwritten by the next."""
        file = self.file(slab)
        buffer = page_aligned(min(_PIECE, up_to_page(weight.size)))
        for done in range(0, weight.size, _PIECE):
            wanted = min(_PIECE, weight.size - done)
            found = file.read(buffer[: up_to_page(wanted)], weight.offset + done)
            if found < wanted:
                raise OSError(f"{file.path} ends too early")
            yield buffer[:wanted]

    def digest(self, slab: str, weight: Weight, *, name: str | None = None) -> str:
        """The digest of what the file holds now, under its own name or another."""
        hasher = weight_hasher(name or weight.name, weight.dtype, weight.shape)
        for piece in self.pieces(slab, weight):
            hasher.update(piece)
        return hasher.hexdigest()

    def damaged(self) -> list[str]:
        """Names of slabs whose bytes are not the ones that were written. Reads everything once."""

        def wrong(item: tuple[str, Weight]) -> str | None:
            slab, weight = item
            try:
                return slab if self.digest(slab, weight) != self.digests[weight.name] else None
            except OSError:
                return slab

        items = [(slab.name, weight) for slab in (self.rest, *self.layers) for weight in slab.weights]
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:  # reading and hashing release the GIL
            return sorted({name for name in pool.map(wrong, items) if name is not None})

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()


def make_slabs(directory: Path, slabs: Sequence[Slab], *, pieces: Pieces, key: str) -> SlabFolder:
    """The slabs as files in ``directory``: those that are there and whole, and the others made from ``pieces``.

    ``key`` stands for the checkpoint: slabs of another one in the same folder are made again. Every byte is read and
    compared with its digest; a damaged slab is made again.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory):
            done = _read_header(directory, slabs, key)
            _check_free_space(directory, [slab for slab in slabs if slab.name not in done])
            for slab in slabs:
                if slab.name not in done:
                    done[slab.name] = _write(directory, slab, pieces)
                    _write_header(directory, slabs, key, done)
            folder = _folder(directory, slabs, done)
            bad = folder.damaged()
            if bad:
                folder.close()
                for slab in slabs:
                    if slab.name in bad:
                        done[slab.name] = _write(directory, slab, pieces)
                _write_header(directory, slabs, key, done)
                folder = _folder(directory, slabs, done)
                if folder.damaged():
                    raise ConfigError(
                        f"what was written to {directory} cannot be read back; check that disk, or give another "
                        "folder with weight_dir="
                    )
            return folder
    except OSError as error:
        raise ConfigError(
            f"the layers' weights cannot be kept in {directory} ({error}); give another folder with weight_dir="
        ) from error


def _folder(directory: Path, slabs: Sequence[Slab], done: dict[str, dict[str, str]]) -> SlabFolder:
    return SlabFolder(directory, slabs, {name: digest for of_slab in done.values() for name, digest in of_slab.items()})


def _write(directory: Path, slab: Slab, pieces: Pieces) -> dict[str, str]:
    """Write one slab. Returns the digests of its weights."""
    target = directory / _file_name(slab.name)
    unfinished = target.with_suffix(".part")
    digests: dict[str, str] = {}
    with unfinished.open("wb") as file:
        for weight in slab.weights:
            hasher = weight_hasher(weight.name, weight.dtype, weight.shape)
            file.seek(weight.offset)
            written = 0
            for piece in pieces(weight.name):
                hasher.update(piece)
                written += file.write(piece)
            if written != weight.size:
                raise ConfigError(f"{weight.name} has {written} bytes in the checkpoint instead of {weight.size}")
            digests[weight.name] = hasher.hexdigest()
        file.truncate(slab.size)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # nobody reads it through the page cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    os.replace(unfinished, target)
    return digests


def _write_header(directory: Path, slabs: Sequence[Slab], key: str, done: dict[str, dict[str, str]]) -> None:
    header = {
        "version": _VERSION,
        "checkpoint": key,
        "slabs": [_described(slab, done[slab.name]) for slab in slabs if slab.name in done],
    }
    unfinished = directory / (_HEADER + ".part")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(header, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, directory / _HEADER)


def _described(slab: Slab, digests: dict[str, str]) -> dict[str, Any]:
    return {"name": slab.name, "file": _file_name(slab.name), "bytes": slab.size} | {
        "weights": [
            {
                "name": weight.name,
                "dtype": str(weight.dtype).removeprefix("torch."),
                "shape": list(weight.shape),
                "offset": weight.offset,
                "sha256": digests[weight.name],
            }
            for weight in slab.weights
        ]
    }


def _read_header(directory: Path, slabs: Sequence[Slab], key: str) -> dict[str, dict[str, str]]:
    """The digests of the slabs that are there as asked for, by slab; whatever else the folder holds is ignored."""
    try:
        header = json.loads((directory / _HEADER).read_text(encoding="utf-8"))
        if header["version"] != _VERSION or header["checkpoint"] != key:
            return {}
        found: dict[str, dict[str, str]] = {}
        by_name = {slab["name"]: slab for slab in header["slabs"]}
        for slab in slabs:
            if slab.name not in by_name:
                continue
            digests = {str(weight["name"]): str(weight["sha256"]) for weight in by_name[slab.name]["weights"]}
            path = directory / _file_name(slab.name)
            if not path.exists() or path.stat().st_size != slab.size:
                continue
            if digests.keys() == {w.name for w in slab.weights} and by_name[slab.name] == _described(slab, digests):
                found[slab.name] = digests
        return found
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}  # none yet, or not ours: all are made


def _check_free_space(directory: Path, missing: Sequence[Slab]) -> None:
    needed = sum(slab.size for slab in missing)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ConfigError(
            f"the layers' weights take {needed / 1e9:.1f} GB and {directory} has {free / 1e9:.1f} GB left; free some, "
            "or give another folder with weight_dir="
        )


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time makes slabs; the others wait and find them."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _file_name(slab: str) -> str:
    return f"{slab}.slab"
