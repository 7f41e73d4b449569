"""Brings the index of a cache directory in line with its files: after a power loss, or because it is broken.

Used by the disk tier when it opens a directory. Invariant: a file that is kept is entered with the size it has; what
is no record under its own name is removed. Records of another version count as well, and are evicted by their age.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvboost.errors import RecordError, RecordVersionError
from kvboost.store.record.format import inspect, space_of
from kvboost.store.record.header import PAGE, aligned, header_length
from kvboost.store.tiers.disk.database import NOBODY, IndexUnavailableError
from kvboost.store.tiers.disk.files import Files, Layout
from kvboost.store.tiers.disk.index import ChunkIndex, NewEntry
from kvboost.types import BlockInfo, Namespace

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
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise IndexUnavailableError("another process is opening or rebuilding the index")
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


def rebuild(layout: Layout, files: Files, new: Path, broken: int | None, make: Callable[[Path], ChunkIndex]) -> None:
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


def inode(path: Path) -> int | None:
    """Tells a file from another one under the same name."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


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
        yield space, header.namespace, NewEntry(header.info, charge(status.st_size), status.st_mtime_ns)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"  # not Linux: then only a broken index is rebuilt
