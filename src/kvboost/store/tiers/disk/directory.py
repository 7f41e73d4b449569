"""A cache directory that several processes share: opening it, refusing one of other programs, a usable index.

Used by the disk tier. Invariant: nobody but this user can read what lies in the directory. The index must lie on a
local file system, as SQLite's log needs shared memory.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvboost.config import DEFAULT_PLACE_BYTES
from kvboost.errors import ConfigError
from kvboost.failures import Failures
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.base import Place
from kvboost.store.tiers.disk.database import IndexUnavailableError, is_damaged
from kvboost.store.tiers.disk.files import Files, Layout, Presence, read_capacity, write_capacity
from kvboost.store.tiers.disk.index import ChunkIndex
from kvboost.store.tiers.disk.recovery import index_lock, inode, is_recorded, rebuild, reconcile

FAILURES = (sqlite3.Error, OSError, IndexUnavailableError)
"""What using a directory may raise; :meth:`Directory.failed` takes it."""

_TIMEOUT_S = 2.0  # with other processes that open the index at the same time


class Directory:
    """The directory as one tier of one process sees it. Thread-safe."""

    def __init__(
        self,
        layout: Layout,
        *,
        records: RecordFormat,
        files: Files,
        health: Failures,
        is_being_written: Callable[[Place], bool],
    ) -> None:
        """``is_being_written`` tells what this tier is writing now from what it failed to write."""
        self._layout = layout
        self._records = records
        self._files = files
        self._health = health
        self._is_being_written = is_being_written
        self._lock = threading.RLock()
        self._index: ChunkIndex | None = None
        self._presence: Presence | None = None
        self.is_usable = True
        """Whether the last access to the index, or the last write, succeeded."""

    def open(self) -> None:
        """Make the directory for this user alone and open its index.

        Raises ConfigError for one that is used for other things; any other failure is a warning.
        """
        try:
            claim(self._layout)
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
                with index_lock(self._layout, timeout_s=timeout_s):
                    index = self._make(self._layout.index)
                try:
                    self.recover(index)
                    reconcile(index, self._layout, self._files)
                except FAILURES:
                    index.close()
                    raise
                self._index = index
            return self._index

    def capacity(self, index: ChunkIndex, wanted: int | None) -> int:
        """The directory's limit. If it has none yet, ``wanted``; if that is None, the default or what lies there.

        Read each time: ``kvboost cache limit`` may have changed it. Raises what FAILURES names.
        """
        found = read_capacity(self._layout)
        if found is not None:
            return found
        with index_lock(self._layout, timeout_s=_TIMEOUT_S):
            found = read_capacity(self._layout)  # another process may have come first
            if found is None:
                found = max(DEFAULT_PLACE_BYTES, index.totals(whole=True).bytes) if wanted is None else wanted
                write_capacity(self._layout, found)
        return found

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
            return self._is_being_written(place) if writer == presence.writer else presence.is_alive(writer)

        presence.reap()  # first: their bytes are free only once their files are gone
        index.recover(is_being_written, lambda place, size: is_recorded(self._layout.record(*place), size))

    def worked(self) -> None:
        """An access to the index, or a write, succeeded."""
        self.is_usable = True

    def failed(self, error: Exception) -> None:
        """Count a failure, warn of the first one, and rebuild the index if it is broken."""
        self.is_usable = False
        if not is_damaged(error):
            remedy = "look for a full disk, missing permissions or a file system without locks"
            self._health.failed("the directory cannot be used", error, remedy=remedy)
            return
        self._health.failed("the index was damaged and is rebuilt", error, remedy="look at the disk if it goes on")
        with self._lock:
            broken = inode(self._layout.index)
            if self._index is not None:
                self._index.close()
                self._index = None
            try:
                rebuild(self._layout, self._files, self.new_file()[1], broken, self._make)
            except FAILURES as again:
                self._health.failed("the index cannot be rebuilt", again, remedy="remove the directory's index files")

    def close(self) -> None:
        """Let go of the directory."""
        with self._lock:
            if self._index is not None:
                self._index.close()
            if self._presence is not None:
                self._presence.close()
            self._index = self._presence = None

    def _writer(self) -> Presence:
        if self._presence is None:
            self._layout.tmp.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._presence = Presence(self._layout.tmp)
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
