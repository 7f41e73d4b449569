"""Records as files: written under another name and renamed, read past the page cache.

Used by the disk tier. Every system call that can fail goes through :class:`Files`, so that tests can make each one
fail. Invariant: under a record's name there is a whole record or nothing; a process that dies leaves only files in
``tmp/``, which :class:`Presence` tells from those of live processes.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvboost.direct_io import DirectFile, page_aligned, up_to_page
from kvboost.store.tiers.base import Place

_MAX_PARTS = 512  # of one writev; the system allows 1,024
_SUFFIX = ".kv"
_FLOOR_BYTES, _FLOOR_SHARE = 2**30, 20  # left free for others: this, or a 20th of a small file system
_MAX_DIGITS = 19


class Files:
    """The system calls of the disk tier."""

    def __init__(self, *, direct: bool = True, memory: Callable[[int], memoryview] = page_aligned) -> None:
        """Records are read into ``memory``, which must be page-aligned."""
        self.direct, self._memory = direct, memory
        """Whether reads go past the page cache; turned off where the file system refuses."""

    def write(self, path: Path, parts: Sequence[memoryview]) -> None:
        """A new file with these bytes. Raises OSError; the file may then be there in part."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            left = [part for part in parts if len(part)]
            while left:
                written = self._writev(descriptor, left[:_MAX_PARTS])
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]
        finally:
            os.close(descriptor)

    def read(self, path: Path, *, max_bytes: int) -> memoryview | None:
        """The bytes of a file, beginning at a page; None if there is none. Of too many, ``max_bytes`` and one more."""
        try:
            with DirectFile(path, direct=self.direct, flags=os.O_NOFOLLOW) as file:
                size = min(file.size, max_bytes + 1)
                buffer = self._memory(up_to_page(size))
                done = self._read(file, buffer)
                self.direct &= file.direct
        except FileNotFoundError:
            return None
        return buffer[: min(done, size)]

    def head(self, path: Path, length: int) -> bytes:
        """The first ``length`` bytes of a file, or all if it is shorter."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return os.read(descriptor, length)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file to its name, making the folder if it is not there."""
        try:
            self._rename(source, target)
        except FileNotFoundError:
            for folder in (target.parent.parent, target.parent):  # one by one: parents get no mode
                folder.mkdir(mode=0o700, exist_ok=True)
            self._rename(source, target)

    def sync(self, path: Path) -> None:
        """Return once the file, or the folder's list of names, is on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self._fsync(descriptor)
            if hasattr(os, "posix_fadvise"):  # nobody reads it through the page cache
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def spare(self, directory: Path) -> int:
        """Bytes that may be written before the file system is nearly full; below 0 if it is."""
        free, total = self._free(directory)
        return free - min(_FLOOR_BYTES, total // _FLOOR_SHARE)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    # What can fail. Tests override these.

    def _writev(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        return os.writev(descriptor, parts)

    def _read(self, file: DirectFile, buffer: memoryview) -> int:
        return file.read(buffer, 0)

    def _rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def _fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def _free(self, directory: Path) -> tuple[int, int]:
        usage = shutil.disk_usage(directory)
        return usage.free, usage.total


class Layout:
    """Where things lie in a cache directory: ``SPACE/AA/KEY.kv``, ``tmp/``, the index and the limit."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tmp = directory / "tmp"
        self.index = directory / "index-1.sqlite"
        self.index_lock = directory / "index-1.lock"
        self.capacity = directory / "capacity"

    def record(self, space: bytes, key: bytes) -> Path:
        """The file of a record."""
        return self.folder(space, key[0]) / (key.hex() + _SUFFIX)

    def has(self, place: Place) -> bool:
        """Whether a record has a file."""
        return os.path.exists(self.record(*place))

    def spaces(self) -> list[bytes]:
        """Every space that has a folder."""
        return [bytes.fromhex(name) for name in _names(self.directory, 32)]

    def folder(self, space: bytes, first: int) -> Path:
        """Where the records of a space lie whose keys begin with this byte."""
        return self.directory / space.hex() / f"{first:02x}"

    def records(self, folder: Path) -> dict[bytes, Path]:
        """What has a record's name in a folder, by the key it is named after."""
        return {bytes.fromhex(name[:64]): folder / name for name in _names(folder, 64, suffix=_SUFFIX)}


def _names(folder: Path, digits: int, *, suffix: str = "") -> list[str]:
    """Names made of so many hexadecimal digits; whatever else lies there is not ours."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    ours = re.compile(rf"[0-9a-f]{{{digits}}}{re.escape(suffix)}")
    return [name for name in names if ours.fullmatch(name)]


class Presence:
    """Shows other processes that this writer lives: a locked file, which the system unlocks when it dies."""

    def __init__(self, tmp: Path) -> None:
        self._tmp = tmp
        while True:
            self.writer = secrets.token_hex(8)
            path = self._lock_path(self.writer)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:  # else it was taken for a dead one before it was locked
                break
            os.close(self._descriptor)
        self._files = 0

    def new_path(self) -> Path:
        """A name for a file of this writer's that nobody uses. The caller holds a lock."""
        self._files += 1
        return self._tmp / f"{self.writer}.{self._files}"

    def is_alive(self, writer: str) -> bool:
        """Whether that writer's process is still there."""
        with self._gone(writer) as gone:
            return not gone

    def reap(self) -> None:
        """Remove what dead writers left in ``tmp/``."""
        names = os.listdir(self._tmp)
        for writer in {name.partition(".")[0] for name in names} - {self.writer}:
            with self._gone(writer) as gone:
                for name in sorted(names) if gone else ():  # the lock last, and while it is held: see __init__
                    if name.startswith(writer + "."):
                        (self._tmp / name).unlink(missing_ok=True)

    @contextmanager
    def _gone(self, writer: str) -> Iterator[bool]:
        """Whether that writer's process is gone; in this ``with`` block nobody else finds that out."""
        descriptor = -1
        with suppress(FileNotFoundError):  # its files came after its lock, so it is not just being born
            descriptor = os.open(self._lock_path(writer), os.O_RDWR)
        try:
            yield writer != self.writer and (descriptor < 0 or locked(descriptor))
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def close(self) -> None:
        """Say that this writer is gone."""
        if self._descriptor >= 0:
            self._lock_path(self.writer).unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock_path(self, writer: str) -> Path:
        return self._tmp / f"{writer}.lock"


def locked(descriptor: int) -> bool:
    """Lock a file; False if somebody else has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_capacity(layout: Layout) -> int | None:
    """The directory's limit in bytes; None if it has none yet. Raises OSError."""
    try:
        text = layout.capacity.read_bytes()[: _MAX_DIGITS + 1].strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else None  # None: a torn file is written anew


def write_capacity(layout: Layout, capacity: int) -> None:
    """Set the limit for everybody who uses the directory, from their next write on. Raises OSError."""
    part = Path(f"{layout.capacity}.part")
    part.unlink(missing_ok=True)  # of a writer that was killed
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"%d\n" % capacity)
        file.flush()
        os.fsync(file.fileno())
    part.replace(layout.capacity)
