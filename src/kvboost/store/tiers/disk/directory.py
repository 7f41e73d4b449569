"""A cache directory that several processes share: opening it, refusing one of other programs, a usable index.

Used by the disk tier. The index is brought in line with the files after a power loss, or because it is broken.
Invariants: nobody but this user can read what lies in the directory; a file that is kept is entered with the size it
has; what is no record under its own name is removed. Records of another version count as well, and are evicted by their
age. The index must lie on a local file system, as SQLite's log needs shared memory.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from kvboost.config import DEFAULT_PLACE_BYTES
from kvboost.errors import ConfigError, RecordError, RecordVersionError
from kvboost.store.record.format import RecordFormat, inspect, space_of
from kvboost.store.record.header import PAGE, aligned, header_length, info_of
from kvboost.store.tiers.base import Backend, Place
from kvboost.store.tiers.disk.database import NOBODY, IndexUnavailableError, inode, is_damaged
from kvboost.store.tiers.disk.files import Files, Layout, Presence, locked, read_capacity, write_capacity
from kvboost.store.tiers.disk.index import ChunkIndex, Limits, NewEntry
from kvboost.types import BlockInfo, Namespace

FAILURES = (sqlite3.Error, OSError, IndexUnavailableError)
"""What using a directory may raise; :meth:`Directory.failed` takes it."""

_TIMEOUT_S = 2.0  # with other processes that open the index at the same time


class Directory(Backend):
    """The directory as the tiers of one process see it, and the threads that read it. Thread-safe."""

    def __init__(
        self,
        layout: Layout,
        *,
        wanted_bytes: int | None,
        tenant_quota: int | None,
        records: RecordFormat,
        readers: int,
        files: Files,
    ) -> None:
        super().__init__("disk", capacity_bytes=DEFAULT_PLACE_BYTES if wanted_bytes is None else wanted_bytes)
        self._wanted_bytes, self._has_set_limit = wanted_bytes, False
        self._warned: set[str] = set()
        self.removed: Callable[[bytes], None] = lambda key: None
        """Called with the key of every record that is removed."""
        self.layout, self.files = layout, files
        self._records, self._tenant_quota = records, tenant_quota
        self.ahead = readers + 2
        self.pool = ThreadPoolExecutor(readers, thread_name_prefix="kvboost-disk")
        self._lock = threading.RLock()
        self._index: ChunkIndex | None = None
        self._presence: Presence | None = None
        self._is_usable = True

    @property
    def is_available(self) -> bool:
        """Whether the last access to the index, or the last write, succeeded."""
        return self._is_usable

    def open(self) -> None:
        """Make the directory for this user alone and open its index.

        Raises ConfigError for one that is used for other things; any other failure is a warning.
        """
        try:
            claim(self.layout)
            self.index(timeout_s=_TIMEOUT_S)
        except FAILURES as error:
            self.failed(error)

    def index(self, *, timeout_s: float = 0.0) -> ChunkIndex:
        """The index as it is now: another process may have rebuilt it. Raises what FAILURES names."""
        with self._lock:
            if self._index is not None and not self._index.is_current:
                self._index.close()
                self._index = None
            if self._index is None:
                self._writer()  # before the index: see recover
                with index_lock(self.layout, timeout_s=timeout_s):
                    index = self._make(self.layout.index)
                try:
                    self.recover(index)
                    reconcile(index, self.layout, self.files)
                except FAILURES:
                    index.close()
                    raise
                self._index = index
            return self._index

    def limits(self, index: ChunkIndex, *, size: int = 0) -> Limits:
        """What may lie in the directory now, together with a record of ``size``. Raises what FAILURES names."""
        self.capacity_bytes = self._capacity(index)
        if self._wanted_bytes not in (None, self.capacity_bytes):
            self._warn_once(
                "limit",
                f"{self.layout.directory} has a limit of {self.capacity_bytes:,} bytes now, set by another engine, so "
                f"{self._wanted_bytes:,} is not used; give all engines that use it the same disk_cache_bytes",
            )
        capacity, spare = self.capacity_bytes, self.files.spare(self.layout.directory)
        if spare < size:
            capacity = min(capacity, max(0, index.totals(whole=True).bytes + spare))
        return Limits(capacity, self._tenant_quota)

    def _capacity(self, index: ChunkIndex) -> int:
        """The directory's limit. The wanted one is set for everybody, once; without it a directory that has no limit
        yet gets the default, or what lies there.

        Read each time: another engine may have set it. Raises what FAILURES names.
        """
        found, wanted = read_capacity(self.layout), self._wanted_bytes
        if found is None or not (self._has_set_limit or wanted in (None, found)):
            with index_lock(self.layout, timeout_s=_TIMEOUT_S):
                found = wanted if wanted is not None else read_capacity(self.layout)  # another may have come first
                if found is None:
                    found = max(DEFAULT_PLACE_BYTES, index.totals(whole=True).bytes)
                write_capacity(self.layout, found)
        self._has_set_limit = True
        return found

    def warn_too_small(self, size: int) -> None:
        """A record does not fit, whatever is evicted: nothing else shows that nothing is stored."""
        self._warn_once(
            "size",
            f"{self.layout.directory} has a limit of {self.capacity_bytes:,} bytes, and a chunk takes {size:,}: it is "
            "not stored; give a larger disk_cache_bytes",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        with self._lock:
            was_said, self._warned = kind in self._warned, {*self._warned, kind}
        if not was_said:
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def new_file(self) -> tuple[str, Path]:
        """This writer's name, and a name for a file of its own that nobody uses. Raises OSError."""
        with self._lock:
            presence = self._writer()
            return presence.writer, presence.new_path()

    def recover(self, index: ChunkIndex) -> None:
        """Free what dead writers hold. Raises what FAILURES names."""
        with self._lock:
            presence = self._writer()

        def is_being_written(writer: str, place: Place) -> bool:
            return self.is_being_written(place) if writer == presence.writer else presence.is_alive(writer)

        presence.reap()  # first: their bytes are free only once their files are gone
        index.recover(is_being_written, lambda place, size: is_recorded(self.layout.record(*place), size))

    def worked(self) -> None:
        """An access to the index, or a write, succeeded."""
        self._is_usable = True

    def failed(self, error: Exception) -> None:
        """Count a failure, warn of the first one, and rebuild the index if it is broken."""
        self._is_usable = False
        if not is_damaged(error):
            remedy = "look for a full disk, missing permissions or a file system without locks"
            self.health.failed("the directory cannot be used", error, remedy=remedy)
            return
        self.health.failed("the index was damaged and is rebuilt", error, remedy="look at the disk if it goes on")
        with self._lock:
            broken = inode(self.layout.index)
            if self._index is not None:
                self._index.close()
                self._index = None
            try:
                rebuild(self.layout, self.files, self.new_file()[1], broken, self._make)
            except FAILURES as again:
                self.health.failed("the index cannot be rebuilt", again, remedy="remove the directory's index files")

    def close(self) -> None:
        """Let go of the directory and end the readers."""
        self.pool.shutdown(cancel_futures=True)
        with self._lock:
            if self._index is not None:
                self._index.close()
            if self._presence is not None:
                self._presence.close()
            self._index = self._presence = None

    def _writer(self) -> Presence:
        if self._presence is None:
            self.layout.tmp.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._presence = Presence(self.layout.tmp)
        return self._presence

    def _make(self, path: Path) -> ChunkIndex:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its other files the same permissions
        return ChunkIndex.open(path, space=self._records.space, namespace=self._records.namespace)


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Raise ConfigError for a directory that a tier would refuse: cheap enough to know before a model is loaded."""
    with suppress(OSError):  # a tier goes on without such a directory, and warns
        claim(Layout(Path(directory).expanduser().absolute()))


def claim(layout: Layout) -> None:
    """Make the directory for this user alone. Raises OSError, and ConfigError for one that others can use."""
    directory = layout.directory
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{directory} belongs to another user, who could change what lies there; give one of your own, or run: "
                f"chown -R {os.geteuid()} {shlex.quote(str(directory))}"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            if not layout.index.exists() and any(directory.iterdir()):
                raise ConfigError(f"{directory} holds other things, open to other users; give a new one for the cache")
            raise ConfigError(f"{directory} is open to other users; run: chmod 700 {shlex.quote(str(directory))}")
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{directory} is no directory; give another one for the cache") from error


_ROW_BYTES = 1024  # of the index for one chunk, indexes included
_BOOT = "boot"


def charge(record_bytes: int) -> int:
    """What a record takes of the budget: whole pages, and its row in the index."""
    return aligned(record_bytes, PAGE) + _ROW_BYTES


def is_recorded(path: Path, charged: int) -> bool:
    """Whether a file is there and takes as much as it is entered with."""
    try:
        return charge(path.stat().st_size) == charged
    except FileNotFoundError:
        return False


@contextmanager
def index_lock(layout: Layout, *, timeout_s: float) -> Iterator[None]:
    """Held while the index is opened or replaced. Raises IndexUnavailableError if another process holds it."""
    descriptor = os.open(layout.index_lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while not locked(descriptor):
            if time.monotonic() > deadline:
                raise IndexUnavailableError("another process is opening or rebuilding the index")
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def reconcile(index: ChunkIndex, layout: Layout, files: Files) -> None:
    """Enter files that the index does not know and delete entries without a file, if a power loss may have
    come between: the machine was started since this was last done."""
    boot = _boot_id()
    if index.meta(_BOOT) == boot:
        return
    for space in {*index.spaces(), *layout.spaces()}:
        for first in range(256):
            there, entered = layout.records(layout.folder(space, first)), index.keys_in(space, first)
            if gone := entered - there.keys():  # or written by others since: the index looks again
                index.delete_missing([(space, key) for key in gone], layout.has)
            if unknown := there.keys() - entered:
                index.adopt(list(_found(layout, files, space, {key: there[key] for key in unknown})))
    index.set_meta(_BOOT, boot)


def rebuild(
    layout: Layout, files: Files, new: Path, broken: tuple[int, int] | None, make: Callable[[Path], ChunkIndex]
) -> None:
    """Put an index made from the records' headers in place of a broken one, unless another process did already.

    ``new`` is a free name in ``tmp/``, ``broken`` the inode of the broken index. Recency starts with the times
    the files were written.
    """
    with index_lock(layout, timeout_s=0.0):
        if inode(layout.index) != broken:
            return
        try:
            index = make(new)
            try:
                reconcile(index, layout, files)
            finally:
                index.close()  # the last connection: everything is in the one file now
            _unlink(layout.index)  # an old log must never meet the new index
            os.replace(new, layout.index)
        finally:
            _unlink(new)  # if it failed: it is tried again, with another name each time


def _unlink(index: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{index}{suffix}").unlink(missing_ok=True)


def _found(
    layout: Layout, files: Files, space: bytes, unknown: dict[bytes, Path]
) -> Iterator[tuple[bytes, Namespace, NewEntry]]:
    for key, path in unknown.items():
        try:
            status = path.stat()
            first = files.head(path, PAGE)
            header = inspect(files.head(path, header_length(first)) if header_length(first) > PAGE else first)
            place = layout.record(space_of(header), header.key)
            if (header.key, place, header.record_bytes) != (key, path, status.st_size):
                raise RecordError("the file is not the record its name says")
        except FileNotFoundError:
            continue  # evicted meanwhile
        except RecordVersionError:
            unread = BlockInfo(key, None, key, 0, bitwise=False, start=0, context=b"", approx_depth=0)
            yield space, NOBODY, NewEntry(unread, charge(status.st_size), status.st_mtime_ns)
            continue
        except RecordError:
            files.remove(path)
            continue
        yield space, header.namespace, NewEntry(info_of(header), charge(status.st_size), status.st_mtime_ns)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"  # not Linux: then only a broken index is rebuilt
