"""Blocks on a local disk, one file each, shared by every process that opens the same directory.

Made by the engine for a namespace; used as a :class:`kvboost.extend.Tier`. A block found by its key needs no index:
its file has the key's name. Invariants: the files in the directory, of all namespaces, never take more than the
directory's limit, whoever writes; only whole records that passed their checks are handed out. On a file system that
is nearly full the limit shrinks, so that the cache gives way to whatever else is written there.

What survives: a killed process loses nothing whose ``store`` returned STORED. A power loss loses nothing that was
stored before the last ``flush`` returned; of what came after, files may be torn, which their checksums show. Recency
is written in batches: a killed process loses the last few hundred uses.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kvboost.store.record.format import RecordFormat
from kvboost.store.record.header import info_of
from kvboost.store.tiers.base import MAX_VARIANTS, Place, RecordTier, Unwritten, in_order
from kvboost.store.tiers.disk.directory import FAILURES, Directory, charge, is_recorded
from kvboost.store.tiers.disk.files import Files, Layout
from kvboost.store.tiers.disk.index import BETWEEN_STEPS_S, ChunkIndex, NewEntry, Room
from kvboost.types import BlockInfo, KVBlock, PutOutcome

_MAX_UNSYNCED = 1024  # files that wait for a flush; beyond, the oldest is synced at once
_MAX_STEPS = 8  # of eviction for one block; what does not fit then is tried again later
_DROPPED_AT_ONCE = 64  # chunks in one transaction: others must get their turn

T = TypeVar("T")


class DiskTier(RecordTier[Directory]):
    """Records in a directory, as many as its limit allows.

    Leaves are evicted first, and of them the least recently used.
    """

    name = "disk"
    damage_remedy = "look at the disk if it goes on"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        capacity_bytes: int | None = None,
        records: RecordFormat,
        tenant_quota_bytes: int | None = None,
        readers: int = 4,
        files: Files | None = None,
    ) -> None:
        """``records`` says whose blocks these are and how they are written; ``readers`` read at the same time.

        ``capacity_bytes`` becomes the directory's limit; None keeps the one it has, a new one gets the default.
        """
        backend = Directory(
            Layout(Path(directory).expanduser().absolute()),
            wanted_bytes=capacity_bytes,
            tenant_quota=tenant_quota_bytes,
            records=records,
            readers=readers,
            files=files if files is not None else Files(),
        )
        self._open(backend, records, owns_backend=True)
        self._directory.open()
        self._with_index(backend.limits, None)  # which sets the limit

    def _open(self, backend: Directory, records: RecordFormat, *, owns_backend: bool) -> None:
        super()._open(backend, records, owns_backend=owns_backend)
        self._layout, self._files, self._directory = backend.layout, backend.files, backend
        self._space = records.space
        self._unwritten = Unwritten()
        self._unsynced: dict[bytes, Path] = {}

    # Finding

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these have a file."""
        return [self._layout.has((self._space, key)) for key in keys]

    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        """For each content, the most recently used blocks that hold it, newest last."""
        nothing: list[list[BlockInfo]] = [[] for _ in content_keys]
        return self._with_index(lambda index: index.variants(content_keys, MAX_VARIANTS), nothing)

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        """The blocks under these keys, in this order; reading begins at once and a few run ahead."""
        reads = in_order(self._backend.pool, self._load, keys, ahead=self._backend.ahead)
        return self._counted(read.result() for _, read in reads)

    def _load(self, key: bytes) -> KVBlock | None:
        path = self._layout.record(self._space, key)
        try:
            record = self._files.read(path, max_bytes=self._records.max_bytes)
        except OSError as error:
            remedy = "look at the disk and the file's permissions"
            self._backend.health.failed("a record cannot be read", error, remedy=remedy)
            return None
        if record is None:
            with self._lock:
                self._unwritten.missed(key)
        return self._decoded(key, record)

    # Keeping

    def _store(self, block: KVBlock) -> PutOutcome:
        try:
            outcome = self._reserved(block)
            self._directory.worked()
            return outcome
        except sqlite3.IntegrityError:
            pass  # another process has entered it a moment ago and is writing it
        except FAILURES as error:
            self._directory.failed(error)
        return PutOutcome.REFUSED

    def _reserved(self, block: KVBlock) -> PutOutcome:
        """Enter the block in the index, evicting others for it, and write it."""
        size = charge(self._records.size_of(block))
        index = self._index()
        limits = self._backend.limits(index, size=size)
        if size > limits.capacity:
            if limits.capacity < self._backend.capacity_bytes:
                remedy = "free some space, or give a directory elsewhere"
                self._backend.health.failed("nothing is stored", "the file system is nearly full", remedy=remedy)
            elif limits.capacity:  # 0 turns it off
                self._backend.warn_too_small(size)
            return PutOutcome.REFUSED
        path = self._layout.record(self._space, block.key)
        writer, temporary = self._directory.new_file()
        self._write_uses(index)  # so that the right ones are evicted
        entered = index.has(block.key)
        if entered:  # by a writer that may have died
            self._directory.recover(index)
            entered = index.has(block.key)
        if entered == "":
            if is_recorded(path, size):
                return PutOutcome.PRESENT
            self._remove(index, [block.key])
        elif entered is not None:
            return PutOutcome.REFUSED
        with self._lock:
            entry = NewEntry(info_of(block), size, self._unwritten.stamp(), writer)
        recovered = False
        for _ in range(_MAX_STEPS):
            room, evicted = index.reserve(entry, limits=limits, remove=self._remove_file)
            with self._lock:
                self._counters.evictions += evicted
            if room is Room.MADE:
                return self._write(block, path, temporary, index, writer)
            if room is Room.NOT_YET:
                time.sleep(BETWEEN_STEPS_S)
            if room is Room.NONE:
                if recovered:
                    break
                self._directory.recover(index)  # dead writers may hold some of the capacity
                recovered = True
        return PutOutcome.REFUSED

    def _write(self, block: KVBlock, path: Path, temporary: Path, index: ChunkIndex, writer: str) -> PutOutcome:
        finished = False
        try:
            self._files.write(temporary, self._records.encode(block).parts)
            self._files.rename(temporary, path)
            finished = index.is_current and index.finish(block.key, writer)
        finally:
            if not finished:  # it failed, or the index was replaced and does not know this file
                with suppress(OSError):
                    self._files.remove(temporary)
                with suppress(OSError):
                    self._files.remove(path)
                with suppress(sqlite3.Error):  # if this fails too, the entry is recovered later
                    index.delete_missing([(self._space, block.key)], self._layout.has, writer=writer)
        if not finished:
            return PutOutcome.REFUSED
        self._wants_sync(block.key, path)
        return PutOutcome.STORED

    def used(self, chain: Sequence[bytes]) -> None:
        """The keys of one prompt were used: each becomes more recent than its successors."""
        with self._lock:
            is_due = self._unwritten.used(chain)
        if is_due:
            self._with_index(self._write_uses, None)

    def _write_uses(self, index: ChunkIndex) -> None:
        newest = index.newest()
        with self._lock:
            self._unwritten.follow(newest)
            uses, missing = self._unwritten.take()
        if uses:
            index.touch(uses.items())
        if missing:
            index.delete_missing([(self._space, key) for key in missing], self._layout.has)

    def flush(self) -> None:
        """Return once everything stored before is on the disk: files, names and index.

        A file that cannot be made safe is removed.
        """
        with self._lock:
            unsynced, self._unsynced = self._unsynced, {}
        for key, path in unsynced.items():
            self._sync(key, path)
        folders = {path.parent for path in unsynced.values()}
        for folder in (*folders, *{folder.parent for folder in folders}, self._layout.directory):
            try:
                self._files.sync(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._directory.failed(error)

        def sync(index: ChunkIndex) -> None:
            self._write_uses(index)
            index.sync()

        self._with_index(sync, None)

    def _wants_sync(self, key: bytes, path: Path) -> None:
        with self._lock:
            self._unsynced[key] = path
            oldest = next(iter(self._unsynced)) if len(self._unsynced) > _MAX_UNSYNCED else None
            early = self._unsynced.pop(oldest) if oldest is not None else None
        if oldest is not None and early is not None:
            self._sync(oldest, early)

    def _sync(self, key: bytes, path: Path) -> None:
        try:
            self._files.sync(path)
        except FileNotFoundError:
            pass  # evicted since
        except OSError as error:
            self._directory.failed(error)
            self.remove([key])

    # Forgetting

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove these blocks' files and entries."""
        self._with_index(lambda index: self._remove(index, keys), None)

    def _remove(self, index: ChunkIndex, keys: Sequence[bytes]) -> None:
        places = [(self._space, key) for key in keys]
        for place in places:
            self._remove_file(place)
        index.delete_missing(places, self._layout.has)

    def _forget(self, tenant: bytes | None, space: bytes | None) -> None:
        def drop(index: ChunkIndex) -> None:
            spaces = index.spaces(tenant=tenant) if space is None else [space]
            self._drop(index, spaces if tenant is not None else [*{*spaces, *self._layout.spaces()}])

        self._with_index(drop, None)

    def _drop(self, index: ChunkIndex, spaces: Sequence[bytes]) -> None:
        while index.drop(spaces, _DROPPED_AT_ONCE, self._remove_file):
            time.sleep(BETWEEN_STEPS_S)
        for space in spaces:  # also what the index has lost sight of
            for first in range(256):
                entered = index.keys_in(space, first)
                for key, path in self._layout.records(self._layout.folder(space, first)).items():
                    if key not in entered:
                        self._files.remove(path)

    # The rest

    def _totals(self) -> tuple[int, int]:
        return self._with_index(lambda index: (index.totals().chunks, index.totals().bytes), (0, 0))

    def close(self) -> None:
        """Write down recency, and close the directory if it was opened for this tier. What was stored stays."""
        self._with_index(self._write_uses, None)
        super().close()

    def on_remove(self, removed: Callable[[bytes], None]) -> None:
        """Call ``removed`` with the key of every record that this process removes, of any namespace."""
        self._backend.removed = removed

    def _remove_file(self, place: Place) -> None:
        self._files.remove(self._layout.record(*place))
        self._backend.removed(place[1])

    def _index(self) -> ChunkIndex:
        """The directory's index, for this namespace. Raises what FAILURES names."""
        return self._directory.index().for_space(self._space, self._records.namespace)

    def _with_index(self, work: Callable[[ChunkIndex], T], otherwise: T) -> T:
        """The index's answer, or ``otherwise`` if it has none: the cache may only help."""
        try:
            answer = work(self._index())
            self._directory.worked()
            return answer
        except FAILURES as error:
            self._directory.failed(error)
            return otherwise
