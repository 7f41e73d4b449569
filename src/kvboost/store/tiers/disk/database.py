"""The SQLite file behind a directory's index: its schema, connections and transactions.

Used by :mod:`kvboost.store.tiers.disk.index`. One connection writes and one reads, so that a reader never waits for a
transaction of this process. Every method may raise sqlite3.Error.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kvboost.types import Namespace

_TIMEOUT_S = 2.0  # for another process's transaction; they take a millisecond
_LOOK_MS = 4  # SQLite's own waits grow to 100 ms, and miss every gap between the steps of an eviction
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spaces (
    id INTEGER PRIMARY KEY, space BLOB NOT NULL UNIQUE, root BLOB NOT NULL, tenant BLOB NOT NULL,
    bytes INTEGER NOT NULL DEFAULT 0, chunks INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS by_tenant ON spaces (tenant);
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY, space INTEGER NOT NULL, key BLOB NOT NULL, parent BLOB, content BLOB NOT NULL,
    size INTEGER NOT NULL, nbytes INTEGER NOT NULL, bitwise INTEGER NOT NULL, start INTEGER NOT NULL,
    context BLOB NOT NULL, generation INTEGER NOT NULL, last_used INTEGER NOT NULL, writer TEXT,
    successors INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX IF NOT EXISTS by_key ON chunks (space, key);
CREATE INDEX IF NOT EXISTS by_parent ON chunks (space, parent) WHERE parent IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_content ON chunks (space, content, last_used);
CREATE INDEX IF NOT EXISTS leaves ON chunks (last_used) WHERE successors = 0 AND writer IS NULL;
CREATE INDEX IF NOT EXISTS leaves_of ON chunks (space, last_used) WHERE successors = 0 AND writer IS NULL;
CREATE INDEX IF NOT EXISTS unfinished ON chunks (writer) WHERE writer IS NOT NULL;
CREATE TRIGGER IF NOT EXISTS chunk_added AFTER INSERT ON chunks BEGIN
    UPDATE spaces SET bytes = bytes + new.size, chunks = chunks + 1 WHERE id = new.space;
    UPDATE chunks SET successors = successors + 1 WHERE space = new.space AND key = new.parent;
    UPDATE chunks SET successors =
        (SELECT COUNT(*) FROM chunks WHERE space = new.space AND parent = new.key) WHERE id = new.id;
END;
CREATE TRIGGER IF NOT EXISTS chunk_removed AFTER DELETE ON chunks BEGIN
    UPDATE spaces SET bytes = bytes - old.size, chunks = chunks - 1 WHERE id = old.space;
    UPDATE chunks SET successors = successors - 1 WHERE space = old.space AND key = old.parent;
END;
"""
_KEYS_FROM = "FROM chunks WHERE space = (SELECT id FROM spaces WHERE space = ?) AND key >= ? AND (key < ? OR ?)"


NOBODY = Namespace(bytes(32), bytes(32))
"""Of records that only another version can read."""


class IndexUnavailableError(Exception):
    """The index cannot be opened now: another process is rebuilding it."""


def is_damaged(error: BaseException) -> bool:
    """Whether this error says that the index file itself is broken."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


class Database:
    """The file as one process has it open. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._space_ids: dict[bytes, int] = {}
        self._write = _connect(path)
        try:
            self._write.executescript(_SCHEMA)
            if self._write.execute("PRAGMA journal_mode").fetchone() == ("wal",):  # otherwise commits wait, too
                self._write.execute(f"PRAGMA busy_timeout = {_LOOK_MS}")
            self._read = _connect(path)
        except sqlite3.Error:
            self._write.close()
            raise
        self._inode = inode(path)

    @property
    def is_current(self) -> bool:
        """Whether this is still the directory's index: another process may have put a new one in its place."""
        return inode(self._path) == self._inode

    def close(self) -> None:
        """Close the connections."""
        with self._writing, self._reading:
            self._write.close()
            self._read.close()

    def rows(self, query: str, *values: object) -> list[Any]:
        """What a query finds, outside of any transaction."""
        with self._reading:
            return self._read.execute(query, values).fetchall()

    def keys_in(self, space: bytes, first: int) -> set[bytes]:
        """The keys of a space that begin with this byte, those being written included."""
        return {row[0] for row in self.rows(f"SELECT key {_KEYS_FROM}", *_keys_from(space, first))}

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """The connection that writes, alone. A ``durable`` commit waits for the disk, with all that came before."""
        with self._writing:
            if durable:
                self._write.execute("PRAGMA synchronous = FULL")
            try:
                self._begin()
                yield self._write
                if self._write.in_transaction:
                    self._write.execute("COMMIT")
            finally:
                if self._write.in_transaction:
                    self._write.execute("ROLLBACK")
                if durable:
                    self._write.execute("PRAGMA synchronous = NORMAL")

    def _begin(self) -> None:
        """Wait for other processes' transactions, and look often."""
        end = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                self._write.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise

    def space_id(self, space: bytes, namespace: Namespace) -> int:
        """The number of a space, entered if it is new."""
        number = self._space_ids.get(space)
        if number is None:
            with self.transaction() as write:
                number = enter_space(write, space, namespace)
            self._space_ids[space] = number
        return number


def enter_space(write: sqlite3.Connection, space: bytes, namespace: Namespace) -> int:
    """The number of a space, entered in the present transaction if it is new, or if it was nobody's."""
    known = "NOTHING" if namespace == NOBODY else "UPDATE SET root = excluded.root, tenant = excluded.tenant"
    write.execute(
        f"INSERT INTO spaces (space, root, tenant) VALUES (?, ?, ?) ON CONFLICT (space) DO {known}",
        (space, namespace.root, namespace.tenant),
    )
    number: int = write.execute("SELECT id FROM spaces WHERE space = ?", (space,)).fetchone()[0]
    return number


class IndexView:
    """The index of a directory, to look at only: opening it makes and changes nothing."""

    def __init__(self, path: Path) -> None:
        self._read = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=_TIMEOUT_S, check_same_thread=False)

    def namespaces(self) -> dict[bytes, Namespace]:
        """Whose spaces these are."""
        rows = self._read.execute("SELECT space, root, tenant FROM spaces").fetchall()
        return {space: Namespace(root, tenant) for space, root, tenant in rows}

    def last_used(self, space: bytes, first: int) -> dict[bytes, int]:
        """When the chunks of a space were last used whose keys begin with this byte, in nanoseconds."""
        return dict(self._read.execute(f"SELECT key, last_used {_KEYS_FROM}", _keys_from(space, first)).fetchall())

    def close(self) -> None:
        """Close the connection."""
        self._read.close()


def _keys_from(space: bytes, first: int) -> tuple[bytes, bytes, bytes, bool]:
    return space, bytes((first,)), bytes((min(first + 1, 255),)), first == 255


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute("PRAGMA synchronous = NORMAL")  # survives a killed process; see sync() for more
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def inode(path: Path) -> tuple[int, int] | None:
    """Tells a file from another one under the same name."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
