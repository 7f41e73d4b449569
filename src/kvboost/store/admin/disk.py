"""The records of a cache directory, read from its files: they are the truth, its index only says when each was used.

Used by ``kvboost cache`` and ``kvboost warm``. Invariant: nothing but :meth:`DiskCatalogue.remove`, ``purge`` and
``check_writable`` changes the directory; engines may use it meanwhile.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

from kvboost.errors import PlaceError
from kvboost.store.admin.base import MAX_RECORD_BYTES, Catalogue, Entry, examine, head_of
from kvboost.store.tiers.disk.database import IndexUnavailableError, IndexView, is_damaged
from kvboost.store.tiers.disk.directory import claim
from kvboost.store.tiers.disk.files import Files, Layout, Presence
from kvboost.store.tiers.disk.index import ChunkIndex
from kvboost.types import Namespace

_AT_ONCE = 64  # chunks in one transaction: others must get their turn
_MAX_TRIED = 16  # records of a space that are asked whose it is, before the index is believed


class DiskCatalogue(Catalogue):
    """A directory that disk tiers share."""

    def __init__(self, directory: Path, *, create: bool = False) -> None:
        """Raises PlaceError if it is no cache directory, unless ``create`` makes one."""
        self._layout = Layout(directory.expanduser().absolute())
        super().__init__(str(self._layout.directory))
        self._files = Files()
        self._owners: dict[bytes, Namespace | None] = {}
        with self._used():
            if self._layout.directory.exists() and not self._layout.directory.is_dir():
                raise PlaceError(f"{directory} is no directory; give another place for the records")
            if not create and not self._layout.directory.is_dir():
                raise PlaceError(f"there is no directory {directory}; give the one an engine has as disk_cache_dir")
            is_cache = self._layout.index.exists() or self._layout.tmp.exists() or bool(self._layout.spaces())
        if not create and not is_cache:
            raise PlaceError(f"{directory} is no cache directory; give the one an engine has as disk_cache_dir")

    def entries(self) -> Iterator[Entry]:
        """Every file with a record's name, one space after the other."""
        with self._used(), self._view() as view:
            for space in sorted(self._layout.spaces()):
                owner = self._owner(space, view)
                for first in range(256):
                    yield from self._entries(space, first, owner.tenant if owner is not None else None, view)

    def _entries(self, space: bytes, first: int, tenant: bytes | None, view: IndexView | None) -> Iterator[Entry]:
        there = self._layout.records(self._layout.folder(space, first))
        used: dict[bytes, int] = {}
        if there and view is not None:
            try:
                used = view.last_used(space, first)
            except sqlite3.Error:
                used = {}  # broken: the next engine rebuilds it; files have a time of their own
        for key, path in sorted(there.items()):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # evicted since
            yield Entry(space, key, tenant, status.st_size, used.get(key, status.st_mtime_ns) / 1e9)

    def _head(self, entry: Entry) -> bytes | None:
        path = self._layout.record(entry.space, entry.key)
        with self._used(), suppress(FileNotFoundError):
            return head_of(lambda length: self._files.head(path, length))
        return None

    def _record(self, entry: Entry) -> memoryview | None:
        with self._used():
            return self._files.read(self._layout.record(entry.space, entry.key), max_bytes=MAX_RECORD_BYTES)

    def remove(self, entries: Sequence[Entry]) -> int:
        """Remove these files and what the index says about them."""
        removed = 0
        with self._used(), self._index() as index:
            for begin in range(0, len(entries), _AT_ONCE):
                some = entries[begin : begin + _AT_ONCE]
                for entry in some:
                    path = self._layout.record(entry.space, entry.key)
                    removed += path.exists()
                    self._files.remove(path)
                if index is not None:
                    index.delete_missing([(entry.space, entry.key) for entry in some], self._layout.has)
        return removed

    @contextmanager
    def _index(self) -> Iterator[ChunkIndex | None]:
        """The index, to delete entries; None if there is none, as one that is made later comes from the files."""
        index = None
        try:
            index = ChunkIndex.open(self._layout.index) if self._layout.index.exists() else None
        except sqlite3.Error as error:
            if not is_damaged(error):  # the next engine rebuilds a broken one from the files
                raise
        with closing(index) if index is not None else nullcontext():
            yield index

    def check_writable(self) -> None:
        """Make the directory if it is not there, and a file in it for a moment."""
        with self._used():
            claim(self._layout)
            self._layout.tmp.mkdir(mode=0o700, exist_ok=True)
            Presence(self._layout.tmp).close()

    def _owner(self, space: bytes, view: IndexView | None) -> Namespace | None:
        """Whose space this is: as a record in it proves, else as the index says."""
        if space not in self._owners:
            self._owners[space] = self._proven_owner(space) or self._entered_owner(space, view)
        return self._owners[space]

    def _proven_owner(self, space: bytes) -> Namespace | None:
        tried = 0
        for first in range(256):
            for key in self._layout.records(self._layout.folder(space, first)):
                head = self._head(Entry(space, key, None, 0, None))
                # The space is a digest of the namespace: a header that fits it tells the truth.
                if head is not None and (header := examine(head, space=space, key=key).header) is not None:
                    return header.namespace
                tried += 1
                if tried == _MAX_TRIED:
                    return None
        return None

    def _entered_owner(self, space: bytes, view: IndexView | None) -> Namespace | None:
        try:
            return view.namespaces().get(space) if view is not None else None
        except sqlite3.Error:
            return None  # broken, see _entries

    @contextmanager
    def _view(self) -> Iterator[IndexView | None]:
        view = None
        with suppress(sqlite3.Error):  # broken, see _entries
            view = IndexView(self._layout.index) if self._layout.index.exists() else None
        with closing(view) if view is not None else nullcontext():
            yield view

    @contextmanager
    def _used(self) -> Iterator[None]:
        """In this ``with`` block, what the directory fails with is a PlaceError."""
        try:
            yield
        except (OSError, sqlite3.Error, IndexUnavailableError) as error:
            remedy = "look at the disk and the permissions"
            raise PlaceError(f"{self.place} cannot be used ({error}); {remedy}") from error
