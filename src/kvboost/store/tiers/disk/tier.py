"""Blocks on a local disk, one file each, shared by every process that opens the same directory.

Made by the engine for a namespace; used as a :class:`kvboost.extend.Tier`. A block found by its key needs no index:
its file has the key's name. Invariants: the files in the directory, of all namespaces, never take more than the
capacity of the process that writes; only whole records that passed their checks are handed out.

What survives: a killed process loses nothing whose ``store`` returned STORED. A power loss loses nothing that was
stored before the last ``flush`` returned; of what came after, files may be torn, which their checksums show. Recency
is written in batches: a killed process loses the last few hundred uses.
"""

from __future__ import annotations

import copy
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kvboost.errors import RecordError
from kvboost.store.health import Troubles
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.disk.directory import TROUBLE, Directory
from kvboost.store.tiers.disk.files import Files, Layout
from kvboost.store.tiers.disk.index import ChunkIndex, Limits, Place
from kvboost.store.tiers.disk.recovery import charge, is_recorded
from kvboost.types import BlockInfo, KVBlock, PutOutcome, StoreStats

_MAX_VARIANTS = 8  # of one content in a lookup, as in memory
_MAX_UNWRITTEN = 512  # uses and missing files remembered before they go into the index
_MAX_UNSYNCED = 1024  # files that wait for a flush; beyond, the oldest is synced at once
_DROPPED_AT_ONCE = 256  # chunks in one transaction: others must get their turn

T = TypeVar("T")


class DiskTier:
    """Records in a directory, at most ``capacity_bytes`` of them."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        records: RecordFormat,
        tenant_quota_bytes: int | None = None,
        readers: int = 4,
        files: Files | None = None,
    ) -> None:
        """``records`` says whose blocks these are and how they are written; ``readers`` read at the same time."""
        self._layout = Layout(Path(directory).expanduser().absolute())
        self._records = records
        self._space = records.space
        self._limits = Limits(capacity_bytes, tenant_quota_bytes)
        self._files = files if files is not None else Files()
        self._troubles = Troubles("disk")
        self._directory = Directory(
            self._layout,
            records=records,
            files=self._files,
            troubles=self._troubles,
            is_being_written=self._is_being_written,
        )
        self._lock = threading.Lock()  # of everything below; never held while a file or the index is used
        self._being_written: set[Place] = set()
        self._ahead = readers + 2
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="kvboost-disk")
        self._is_first = True
        self._begin()
        self._directory.open()

    def _begin(self) -> None:
        """What is of one namespace alone."""
        self._uses: dict[bytes, int] = {}
        self._missing: set[bytes] = set()
        self._unsynced: dict[bytes, Path] = {}
        self._clock = 0
        self._hits = self._misses = self._rejected = self._evictions = self._refused = 0

    def beside(self, records: RecordFormat) -> DiskTier:
        """The same directory for another namespace, over the same connections and threads, with the same limits.

        Closing it leaves this one open; closing this one ends both.
        """
        other = copy.copy(self)
        other._records, other._space, other._is_first = records, records.space, False
        other._begin()
        return other

    @property
    def name(self) -> str:
        """``"disk"``."""
        return "disk"

    @property
    def outlives_process(self) -> bool:
        """Yes."""
        return True

    @property
    def is_available(self) -> bool:
        """Always: a directory is tried anew each time."""
        return True

    # Finding

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these have a file."""
        return [os.path.exists(self._layout.record(self._space, key)) for key in keys]

    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        """For each content, the most recently used blocks that hold it, newest last."""
        nothing: list[list[BlockInfo]] = [[] for _ in content_keys]
        return self._with_index(lambda index: index.variants(content_keys, _MAX_VARIANTS), nothing)

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        """The blocks under these keys, in this order; reading begins at once and a few run ahead."""
        ahead = deque(self._pool.submit(self._load, key) for key in keys[: self._ahead])
        return self._in_order(ahead, deque(keys[self._ahead :]))

    def _in_order(self, ahead: deque[Future[KVBlock | None]], keys: deque[bytes]) -> Iterator[KVBlock | None]:
        try:
            while ahead:
                block = ahead.popleft().result()
                if keys:
                    ahead.append(self._pool.submit(self._load, keys.popleft()))
                with self._lock:
                    self._hits += block is not None
                    self._misses += block is None
                yield block
        finally:
            for read in ahead:
                read.cancel()

    def _load(self, key: bytes) -> KVBlock | None:
        path = self._layout.record(self._space, key)
        try:
            data = self._files.read(path, max_bytes=self._records.max_bytes)
        except OSError as error:
            self._troubles.met("a record cannot be read", error, remedy="look at the disk and the file's permissions")
            return None
        if data is None:
            with self._lock:
                if len(self._missing) < _MAX_UNWRITTEN:
                    self._missing.add(key)  # there may be a row that says otherwise
            return None
        try:
            return self._records.decode(data, key)
        except RecordError as error:
            with self._lock:
                self._rejected += 1
            self._troubles.met("a record was damaged and is removed", error, remedy="look at the disk if it goes on")
            self.remove([key])
            return None

    # Keeping

    def store(self, block: KVBlock) -> PutOutcome:
        """Write ``block``; others go, leaves first and least recently used first, to stay within the budget."""
        outcome = PutOutcome.REFUSED
        with self._lock:
            place = (self._space, block.key)
            mine = place not in self._being_written
            self._being_written.add(place)
        try:
            if mine:
                outcome = self._reserved(block)
        except sqlite3.IntegrityError:
            pass  # somebody else has entered it a moment ago and is writing it
        except RecordError as error:
            self._troubles.met("a block cannot be written", error, remedy="use smaller chunks or another codec")
        except TROUBLE as error:
            self._directory.failed(error)
        finally:
            with self._lock:
                self._refused += outcome is PutOutcome.REFUSED
                if mine:
                    self._being_written.discard(place)
        return outcome

    def _reserved(self, block: KVBlock) -> PutOutcome:
        """Enter the block in the index, making room, and write it."""
        size = charge(self._records.size_of(block))
        if size > self._limits.capacity:
            return PutOutcome.REFUSED
        path = self._layout.record(self._space, block.key)
        index = self._index()
        writer, temporary = self._directory.new_file()
        self._write_uses(index)  # so that those who go are the right ones
        entered = index.has(block.key)
        if entered:  # by somebody who may have died
            self._directory.settle(index)
            entered = index.has(block.key)
        if entered == "":
            if is_recorded(path, size):
                return PutOutcome.PRESENT
            self._remove(index, [block.key])
        elif entered is not None:
            return PutOutcome.REFUSED
        with self._lock:
            stamp = self._stamp(1)
        for _ in range(2):
            evicted = index.reserve(
                _info(block), size=size, stamp=stamp, writer=writer, limits=self._limits, remove=self._remove_file
            )
            if evicted is not None:
                with self._lock:
                    self._evictions += evicted
                return self._write(block, path, temporary, index, writer)
            self._directory.settle(index)  # the dead may hold room
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
                with suppress(sqlite3.Error):  # if this fails too, the row is settled later
                    index.forget([block.key], self._has_file, writer=writer)
        if not finished:
            return PutOutcome.REFUSED
        self._wants_sync(block.key, path)
        return PutOutcome.STORED

    def used(self, chain: Sequence[bytes]) -> None:
        """The keys of one prompt were used: each becomes more recent than its successors."""
        with self._lock:
            stamp = self._stamp(len(chain))
            for at, key in enumerate(chain):
                self._uses[key] = stamp - at
            many = len(self._uses) >= _MAX_UNWRITTEN
        if many:
            self._with_index(self._write_uses, None)

    def _stamp(self, count: int) -> int:
        """The last of ``count`` new stamps; the lock is held. Clocks go back, stamps of one process do not."""
        self._clock = max(time.time_ns(), self._clock) + count
        return self._clock

    def _write_uses(self, index: ChunkIndex) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
            missing, self._missing = self._missing, set()
        if uses:
            index.touch(uses.items())
        if missing:
            index.forget(list(missing), self._has_file)

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
        for key in keys:
            self._remove_file((self._space, key))
        index.forget(keys, self._has_file)

    def clear(self) -> None:
        """Remove every block of this namespace."""
        self._with_index(lambda index: self._drop(index, [self._space]), None)

    def purge(self, tenant: bytes) -> None:
        """Remove every block of a tenant, of whatever model or codec. ``tenant`` is the digest in its namespace."""
        self._with_index(lambda index: self._drop(index, index.spaces(tenant=tenant)), None)

    def _drop(self, index: ChunkIndex, spaces: Sequence[bytes]) -> None:
        while index.drop(spaces, _DROPPED_AT_ONCE, self._remove_file):
            pass
        for space in spaces:  # also what the index has lost sight of
            for first in range(256):
                entered = index.keys_in(space, first)
                for key, path in self._layout.records(self._layout.folder(space, first)).items():
                    if key not in entered:
                        self._files.remove(path)

    # The rest

    def stats(self) -> StoreStats:
        """Chunks and bytes of this namespace, those being written included; counters of this process."""
        chunks, held = self._with_index(lambda index: (index.totals().chunks, index.totals().bytes), (0, 0))
        with self._lock:
            return StoreStats(
                tier=self.name,
                chunks=chunks,
                bytes=held,
                capacity_bytes=self._limits.capacity,
                hits=self._hits,
                misses=self._misses,
                rejected=self._rejected,
                evictions=self._evictions,
                refused=self._refused,
                leased=0,
            )

    def directory_bytes(self) -> int:
        """What all namespaces in the directory take of the budget, by the index."""
        return self._with_index(lambda index: index.totals(whole=True).bytes, 0)

    def troubles(self) -> dict[str, int]:
        """How often each kind of trouble was met."""
        return self._troubles.counts()

    def close(self) -> None:
        """Write down recency and let go of the directory. What was stored stays."""
        self._with_index(self._write_uses, None)
        if self._is_first:
            self._pool.shutdown(cancel_futures=True)
            self._directory.close()

    def _remove_file(self, place: Place) -> None:
        self._files.remove(self._layout.record(*place))

    def _has_file(self, key: bytes) -> bool:
        return os.path.exists(self._layout.record(self._space, key))

    def _is_being_written(self, place: Place) -> bool:
        return place in self._being_written

    def _index(self) -> ChunkIndex:
        """The directory's index, for this namespace. Raises what TROUBLE names."""
        return self._directory.index().of(self._space, self._records.namespace)

    def _with_index(self, work: Callable[[ChunkIndex], T], otherwise: T) -> T:
        """The index's answer, or ``otherwise`` if it has none: the cache may only help."""
        try:
            return work(self._index())
        except TROUBLE as error:
            self._directory.failed(error)
            return otherwise


def _info(block: KVBlock) -> BlockInfo:
    return BlockInfo(
        key=block.key,
        parent_key=block.parent_key,
        content_key=block.content_key,
        nbytes=block.nbytes,
        bitwise=block.bitwise,
        start=block.start,
        context=block.context,
        approx_depth=block.approx_depth,
    )
