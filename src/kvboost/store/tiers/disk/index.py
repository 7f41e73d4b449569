"""What lies in a cache directory, in SQLite: sizes, recency, successors, contents. A hint; the files are the truth.

Used by the disk tier; several processes share one index. A chunk is entered before its file is written, with the
writer's name, and counts from then on: so the sum of all sizes never passes the budget, whoever writes. Invariants:
sizes by space and successors by chunk are kept by triggers, in the transaction that changes them; a chunk with
successors, or one that is being written, is no victim.
"""

from __future__ import annotations

import copy
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvboost.store.tiers.base import Place
from kvboost.types import BlockInfo, Namespace

_TIMEOUT_S = 2.0  # for another process's transaction; they take a millisecond
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spaces (
    id INTEGER PRIMARY KEY, space BLOB NOT NULL UNIQUE, root BLOB NOT NULL, tenant BLOB NOT NULL,
    bytes INTEGER NOT NULL DEFAULT 0, chunks INTEGER NOT NULL DEFAULT 0
);
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
# The column "generation" is approx_depth: indexes on users' disks have the older name.
_INFO = "key, parent, content, nbytes, bitwise, start, context, generation"


class IndexUnavailableError(Exception):
    """The index cannot be opened now: another process is rebuilding it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may lie in the directory, in bytes."""

    capacity: int
    tenant_quota: int | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Chunks and bytes, those being written included."""

    chunks: int
    bytes: int


def is_damaged(error: BaseException) -> bool:
    """Whether this error says that the index file itself is broken."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


class ChunkIndex:
    """The index of one directory as one process sees it, mostly for chunks of one space. Thread-safe.

    Every method may raise sqlite3.Error.
    """

    def __init__(self, path: Path, *, space: bytes, namespace: Namespace) -> None:
        self._path = path
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._spaces: dict[bytes, int] = {}
        self._write = _connect(path)
        try:
            self._write.executescript(_SCHEMA)
            self._read = _connect(path)
        except sqlite3.Error:
            self._write.close()
            raise
        self._inode = _inode(path)
        with self._transaction():
            self._space = self._space_id(space, namespace)

    @property
    def is_current(self) -> bool:
        """Whether this is still the directory's index: another process may have put a new one in its place."""
        return _inode(self._path) == self._inode

    def of(self, space: bytes, namespace: Namespace) -> ChunkIndex:
        """The same index, for chunks of another space, over the same connections."""
        number = self._spaces.get(space)
        if number is None:
            try:
                with self._transaction():
                    number = self._space_id(space, namespace)
            except sqlite3.Error:
                self._spaces.pop(space, None)  # it was not written: what is entered under it would not be counted
                raise
        if number == self._space:
            return self
        other = copy.copy(self)
        other._space = number
        return other

    def close(self) -> None:
        """Close the connections."""
        with self._writing, self._reading:
            self._write.close()
            self._read.close()

    # Reading

    def variants(self, contents: Sequence[bytes], most: int) -> list[list[BlockInfo]]:
        """For each content, the most recently used chunks that hold it, newest last."""
        query = (
            f"SELECT {_INFO} FROM chunks WHERE space = ? AND content = ? AND writer IS NULL "
            "ORDER BY last_used DESC LIMIT ?"
        )
        with self._reading:
            found = [self._read.execute(query, (self._space, content, most)).fetchall() for content in contents]
        return [[_info(row) for row in reversed(rows)] for rows in found]

    def totals(self, *, whole: bool = False) -> Totals:
        """Of this space, or of the whole directory."""
        where = "" if whole else "WHERE id = ?"
        query = f"SELECT COALESCE(SUM(chunks), 0), COALESCE(SUM(bytes), 0) FROM spaces {where}"
        with self._reading:
            return Totals(*self._read.execute(query, () if whole else (self._space,)).fetchone())

    def spaces(self, *, tenant: bytes | None = None) -> list[bytes]:
        """The spaces that belong to a tenant, or all."""
        with self._reading:
            rows = self._read.execute("SELECT space FROM spaces WHERE ?1 IS NULL OR tenant = ?1", (tenant,))
            return [row[0] for row in rows]

    def keys_in(self, space: bytes, first: int) -> set[bytes]:
        """The keys of a space that begin with this byte, those being written included."""
        query = (
            "SELECT key FROM chunks WHERE space = (SELECT id FROM spaces WHERE space = ?) AND key >= ? "
            "AND (key < ? OR ?)"
        )
        below = bytes((min(first + 1, 255),))
        with self._reading:
            return {row[0] for row in self._read.execute(query, (space, bytes((first,)), below, first == 255))}

    def has(self, key: bytes) -> str | None:
        """The writer of a chunk that is entered, empty once it is written; None if it is not entered."""
        query = "SELECT COALESCE(writer, '') FROM chunks WHERE space = ? AND key = ?"
        with self._reading:
            row = self._read.execute(query, (self._space, key)).fetchone()
        return None if row is None else row[0]

    # Writing

    def reserve(
        self, info: BlockInfo, *, size: int, stamp: int, writer: str, limits: Limits, remove: Callable[[Place], None]
    ) -> int | None:
        """Enter a chunk that is about to be written and make room for it; how many others had to go, None if it cannot.

        ``remove`` is called for the file of each one that goes, before anybody else may use its room. Raises
        sqlite3.IntegrityError if the chunk is entered already.
        """
        with self._transaction():
            self._add(self._space, info, size=size, stamp=stamp, writer=writer)
            victims: list[tuple[int, Place]] = []
            tenant = self._write.execute("SELECT tenant FROM spaces WHERE id = ?", (self._space,)).fetchone()[0]
            for limit, only in ((limits.tenant_quota, tenant), (limits.capacity, None)):
                while limit is not None and self._bytes(only) > limit:
                    victim = self._victim(only)
                    if victim is None:
                        self._write.execute("ROLLBACK")
                        return None
                    self._write.execute("DELETE FROM chunks WHERE id = ?", (victim[0],))
                    victims.append(victim)
            for _, place in victims:
                remove(place)
        return len(victims)

    def finish(self, key: bytes, writer: str) -> bool:
        """The chunk's file is there. False if its entry is gone."""
        query = "UPDATE chunks SET writer = NULL WHERE space = ? AND key = ? AND writer = ?"
        with self._transaction():
            return self._write.execute(query, (self._space, key, writer)).rowcount == 1

    def forget(self, keys: Sequence[bytes], is_there: Callable[[bytes], bool], *, writer: str | None = None) -> None:
        """Strike out chunks whose files are not there; those being written only by their own writer."""
        query = "DELETE FROM chunks WHERE space = ? AND key = ? AND writer IS ?"
        with self._transaction():  # so that no file comes between the look and the stroke
            self._write.executemany(query, [(self._space, key, writer) for key in keys if not is_there(key)])

    def drop(self, spaces: Iterable[bytes], most: int, remove: Callable[[Place], None]) -> int:
        """Remove up to ``most`` written chunks of these spaces, files first; how many there were."""
        query = (
            "SELECT c.id, s.space, c.key FROM chunks c JOIN spaces s ON s.id = c.space "
            "WHERE s.space = ? AND c.writer IS NULL LIMIT ?"
        )
        with self._transaction():
            for space in spaces:
                rows = self._write.execute(query, (space, most)).fetchall()
                for number, of, key in rows:
                    remove((of, key))
                    self._write.execute("DELETE FROM chunks WHERE id = ?", (number,))
                if rows:
                    return len(rows)
        return 0

    def touch(self, stamps: Iterable[tuple[bytes, int]]) -> None:
        """Set when chunks were last used; never back."""
        query = "UPDATE chunks SET last_used = ?1 WHERE space = ?2 AND key = ?3 AND last_used < ?1"
        with self._transaction():
            self._write.executemany(query, [(stamp, self._space, key) for key, stamp in stamps])

    def settle(self, is_being_written: Callable[[str, Place], bool], is_there: Callable[[Place, int], bool]) -> None:
        """Decide about chunks whose writers are gone: written if the file is there, else struck out."""
        query = (
            "SELECT c.id, s.space, c.key, c.size, c.writer FROM chunks c JOIN spaces s ON s.id = c.space "
            "WHERE c.writer IS NOT NULL"
        )
        with self._transaction():
            for number, space, key, size, writer in self._write.execute(query).fetchall():
                if is_being_written(writer, (space, key)):
                    continue
                if is_there((space, key), size):
                    self._write.execute("UPDATE chunks SET writer = NULL WHERE id = ?", (number,))
                else:
                    self._write.execute("DELETE FROM chunks WHERE id = ?", (number,))

    def adopt(self, found: Iterable[tuple[bytes, Namespace, BlockInfo, int, int]]) -> None:
        """Enter chunks whose files are there: space, namespace, info, size and stamp of each."""
        with self._transaction():
            for space, namespace, info, size, stamp in found:
                number = self._space_id(space, namespace)
                self._add(number, info, size=size, stamp=stamp, writer=None, unless_there=True)

    def strike(self, places: Iterable[Place], is_there: Callable[[Place], bool]) -> None:
        """Strike out written chunks of any space whose files are not there."""
        query = (
            "DELETE FROM chunks WHERE space = (SELECT id FROM spaces WHERE space = ?) AND key = ? AND writer IS NULL"
        )
        with self._transaction():  # so that no file comes between the look and the stroke
            self._write.executemany(query, [place for place in places if not is_there(place)])

    def meta(self, name: str) -> str | None:
        """A note about the directory."""
        with self._reading:
            row = self._read.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def set_meta(self, name: str, value: str) -> None:
        """Leave a note about the directory."""
        with self._transaction():
            self._write.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def sync(self) -> None:
        """Return once everything entered so far is on the disk."""
        with self._writing:
            self._write.execute("PRAGMA synchronous = FULL")  # a commit now waits for the log, all of it
            try:
                with self._locked_transaction():
                    self._write.execute("INSERT OR REPLACE INTO meta VALUES ('synced', 'yes')")
            finally:
                self._write.execute("PRAGMA synchronous = NORMAL")

    def _add(
        self, space: int, info: BlockInfo, *, size: int, stamp: int, writer: str | None, unless_there: bool = False
    ) -> None:
        insert = "INSERT OR IGNORE" if unless_there else "INSERT"
        self._write.execute(
            f"{insert} INTO chunks ({_INFO}, space, size, last_used, writer) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                info.key,
                info.parent_key,
                info.content_key,
                info.nbytes,
                info.bitwise,
                info.start,
                info.context,
                info.approx_depth,
                space,
                size,
                stamp,
                writer,
            ),
        )

    def _bytes(self, tenant: bytes | None) -> int:
        where, values = ("", ()) if tenant is None else ("WHERE tenant = ?", (tenant,))
        total: int = self._write.execute(f"SELECT COALESCE(SUM(bytes), 0) FROM spaces {where}", values).fetchone()[0]
        return total

    def _victim(self, tenant: bytes | None) -> tuple[int, Place] | None:
        """The chunk that goes next, of this tenant or of all."""
        columns = "SELECT c.id, s.space, c.key FROM chunks c JOIN spaces s ON s.id = c.space"
        leaf = "c.successors = 0 AND c.writer IS NULL"
        if tenant is None:
            row = self._write.execute(
                f"{columns} WHERE c.id = (SELECT id FROM chunks c WHERE {leaf} ORDER BY last_used LIMIT 1)"
            ).fetchone()
        else:
            row = self._write.execute(
                f"{columns} WHERE s.tenant = ? AND c.id = (SELECT id FROM chunks c WHERE space = s.id AND {leaf} "
                "ORDER BY last_used LIMIT 1) ORDER BY c.last_used LIMIT 1",
                (tenant,),
            ).fetchone()
        return None if row is None else (row[0], (row[1], row[2]))

    def _space_id(self, space: bytes, namespace: Namespace) -> int:
        if space not in self._spaces:
            self._write.execute(
                "INSERT OR IGNORE INTO spaces (space, root, tenant) VALUES (?, ?, ?)",
                (space, namespace.root, namespace.tenant),
            )
            row = self._write.execute("SELECT id FROM spaces WHERE space = ?", (space,)).fetchone()
            self._spaces[space] = row[0]
        return self._spaces[space]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._writing, self._locked_transaction():
            yield

    @contextmanager
    def _locked_transaction(self) -> Iterator[None]:
        self._write.execute("BEGIN IMMEDIATE")
        try:
            yield
            if self._write.in_transaction:
                self._write.execute("COMMIT")
        finally:
            if self._write.in_transaction:
                self._write.execute("ROLLBACK")


class IndexView:
    """The index of a directory, to look at only: opening it makes and changes nothing. May raise sqlite3.Error."""

    def __init__(self, path: Path) -> None:
        self._read = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=_TIMEOUT_S, check_same_thread=False)

    def namespaces(self) -> dict[bytes, Namespace]:
        """Whose spaces these are."""
        rows = self._read.execute("SELECT space, root, tenant FROM spaces").fetchall()
        return {space: Namespace(root, tenant) for space, root, tenant in rows}

    def last_used(self, space: bytes, first: int) -> dict[bytes, int]:
        """When the chunks of a space were last used whose keys begin with this byte, in nanoseconds."""
        query = (
            "SELECT key, last_used FROM chunks WHERE space = (SELECT id FROM spaces WHERE space = ?) AND key >= ? "
            "AND (key < ? OR ?)"
        )
        below = bytes((min(first + 1, 255),))
        return dict(self._read.execute(query, (space, bytes((first,)), below, first == 255)).fetchall())

    def close(self) -> None:
        """Close the connection."""
        self._read.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute("PRAGMA synchronous = NORMAL")  # survives a killed process; see sync() for more
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _info(row: tuple[bytes, bytes | None, bytes, int, int, int, bytes, int]) -> BlockInfo:
    key, parent, content, nbytes, bitwise, start, context, approx_depth = row
    return BlockInfo(key, parent, content, nbytes, bool(bitwise), start, context, approx_depth)
