"""What lies in a cache directory, in SQLite: sizes, recency, successors, contents. A hint; the files are the truth.

Used by the disk tier; several processes share one index. A chunk is entered before its file is written, with the
writer's name, and counts from then on: so the sum of all sizes never exceeds the budget, whoever writes. Invariants:
sizes by space and successors by chunk are kept by triggers, in the transaction that changes them; a chunk with
successors, or one that is being written, is no victim.
"""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from kvboost.store.tiers.base import Place
from kvboost.store.tiers.disk.database import NOBODY, Database, enter_space
from kvboost.types import BlockInfo, Namespace

# The column "generation" is approx_depth: indexes on users' disks have the older name.
_INFO = "key, parent, content, nbytes, bitwise, start, context, generation"
_PLACES = "SELECT c.id, s.space, c.key FROM chunks c JOIN spaces s ON s.id = c.space"
_VICTIM = "SELECT c.id, s.space, c.key, c.size, s.tenant, c.last_used FROM chunks c JOIN spaces s ON s.id = c.space"
EVICTED_AT_ONCE = 64
"""Chunks evicted in one transaction: others must get their turn."""
BETWEEN_STEPS_S = 0.005
"""Time between two such transactions: whoever waits looks more often than that."""
_NO_SPACE = 0  # their numbers begin with 1
_MAX_ANCESTORS = 10_000  # that are counted
_STALE_NS = 24 * 3600 * 10**9  # what was not used for a day is kept from nobody: its tenant may be gone


@dataclass(frozen=True, slots=True)
class Limits:
    """What may lie in the directory, in bytes."""

    capacity: int
    tenant_quota: int | None = None

    @property
    def least(self) -> int:
        """The smaller of both."""
        return self.capacity if self.tenant_quota is None else min(self.capacity, self.tenant_quota)


class Room(enum.Enum):
    """What came of making room for a chunk."""

    MADE = "made"
    """The chunk is entered."""
    NOT_YET = "not yet"
    """Others were evicted, as many as one transaction may; more must go before the chunk is entered."""
    NONE = "none"
    """Not enough can be evicted. Nothing was."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Chunks and bytes, those being written included."""

    chunks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A chunk to be entered."""

    info: BlockInfo
    size: int
    """What it takes of the budget."""
    stamp: int
    """When it was last used, in nanoseconds."""
    writer: str | None = None
    """Who is writing it; None once it is written."""


class _Victim(NamedTuple):
    number: int
    space: bytes
    key: bytes
    size: int
    tenant: bytes
    last_used: int


class ChunkIndex:
    """The index of one directory as one process sees it, mostly for chunks of one space. Thread-safe.

    Every method may raise sqlite3.Error.
    """

    def __init__(self, database: Database, *, space: bytes | None, namespace: Namespace) -> None:
        self._database = database
        self._space = database.space_id(space, namespace) if space is not None else _NO_SPACE

    @classmethod
    def open(cls, path: Path, *, space: bytes | None = None, namespace: Namespace = NOBODY) -> Self:
        """The index in this file, made if there is none; without a ``space``, for what concerns the whole directory."""
        database = Database(path)
        try:
            return cls(database, space=space, namespace=namespace)
        except sqlite3.Error:
            database.close()
            raise

    @property
    def is_current(self) -> bool:
        """Whether this is still the directory's index: another process may have put a new one in its place."""
        return self._database.is_current

    def for_space(self, space: bytes, namespace: Namespace) -> ChunkIndex:
        """The same index, for chunks of another space, over the same connections."""
        if self._database.space_id(space, namespace) == self._space:
            return self
        return ChunkIndex(self._database, space=space, namespace=namespace)

    def close(self) -> None:
        """Close the connections, for every space."""
        self._database.close()

    # Reading

    def variants(self, contents: Sequence[bytes], limit: int) -> list[list[BlockInfo]]:
        """For each content, the most recently used chunks that hold it, newest last."""
        query = (
            f"SELECT {_INFO} FROM chunks WHERE space = ? AND content = ? AND writer IS NULL "
            "ORDER BY last_used DESC LIMIT ?"
        )
        found = [self._database.rows(query, self._space, content, limit) for content in contents]
        return [[_info(row) for row in reversed(rows)] for rows in found]

    def totals(self, *, whole: bool = False) -> Totals:
        """Of this space, or of the whole directory."""
        query = "SELECT COALESCE(SUM(chunks), 0), COALESCE(SUM(bytes), 0) FROM spaces"
        if whole:
            return Totals(*self._database.rows(query)[0])
        return Totals(*self._database.rows(f"{query} WHERE id = ?", self._space)[0])

    def spaces(self, *, tenant: bytes | None = None) -> list[bytes]:
        """The spaces that belong to a tenant, or all."""
        if tenant is None:
            return [row[0] for row in self._database.rows("SELECT space FROM spaces")]
        return [row[0] for row in self._database.rows("SELECT space FROM spaces WHERE tenant = ?", tenant)]

    def keys_in(self, space: bytes, first: int) -> set[bytes]:
        """The keys of a space that begin with this byte, those being written included."""
        return self._database.keys_in(space, first)

    def newest(self) -> int:
        """When any chunk was last used, in nanoseconds; of leaves, which are found at once."""
        query = "SELECT COALESCE(MAX(last_used), 0) FROM chunks WHERE successors = 0 AND writer IS NULL"
        newest: int = self._database.rows(query)[0][0]
        return newest

    def has(self, key: bytes) -> str | None:
        """The writer of a chunk that is entered, empty once it is written; None if it is not entered."""
        query = "SELECT COALESCE(writer, '') FROM chunks WHERE space = ? AND key = ?"
        rows = self._database.rows(query, self._space, key)
        return rows[0][0] if rows else None

    # Writing

    def reserve(self, entry: NewEntry, *, limits: Limits, remove: Callable[[Place], None]) -> tuple[Room, int]:
        """Enter a chunk that is about to be written and evict others for it, a few at a time; how many.

        ``remove`` is called for the file of each victim, before anybody else may use its bytes. Raises
        sqlite3.IntegrityError if the chunk is entered already.
        """
        with self._database.transaction() as write:
            added = _add(write, self._space, entry)
            tenant = write.execute("SELECT tenant FROM spaces WHERE id = ?", (self._space,)).fetchone()[0]
            held = _held(write)
            victims: list[Place] = []
            room = Room.MADE
            if limits.tenant_quota is not None:
                own = partial(_oldest, write, tenant)
                room = _evict(write, held, held[tenant] - limits.tenant_quota, own, victims)
            if room is Room.MADE:
                fair = partial(_fair_victim, write, held, tenant, entry.stamp - _STALE_NS)
                room = _evict(write, held, sum(held.values()) - limits.capacity, fair, victims)
            if room is Room.NOT_YET and _with_ancestors(write, self._space, entry.info.key) > limits.least:
                room = Room.NONE  # its ancestors stay, so all others would be evicted in vain
            if room is Room.NONE:
                write.execute("ROLLBACK")
                return room, 0
            if room is Room.NOT_YET:
                write.execute("DELETE FROM chunks WHERE id = ?", (added,))
            for place in victims:
                remove(place)
        return room, len(victims)

    def finish(self, key: bytes, writer: str) -> bool:
        """The chunk's file is there. False if its entry is gone."""
        query = "UPDATE chunks SET writer = NULL WHERE space = ? AND key = ? AND writer = ?"
        with self._database.transaction() as write:
            return write.execute(query, (self._space, key, writer)).rowcount == 1

    def delete_missing(
        self, places: Iterable[Place], is_there: Callable[[Place], bool], *, writer: str | None = None
    ) -> None:
        """Delete the entries of chunks whose files are not there; those being written only for their ``writer``."""
        query = "DELETE FROM chunks WHERE space = (SELECT id FROM spaces WHERE space = ?) AND key = ? AND writer IS ?"
        with self._database.transaction() as write:  # so that no file comes between the look and the deletion
            write.executemany(query, [(*place, writer) for place in places if not is_there(place)])

    def drop(self, spaces: Iterable[bytes], limit: int, remove: Callable[[Place], None]) -> int:
        """Remove up to ``limit`` written chunks of these spaces, files first; how many there were."""
        with self._database.transaction() as write:
            for space in spaces:
                query = f"{_PLACES} WHERE s.space = ? AND c.writer IS NULL LIMIT ?"
                rows = write.execute(query, (space, limit)).fetchall()
                for number, of, key in rows:
                    remove((of, key))
                    write.execute("DELETE FROM chunks WHERE id = ?", (number,))
                if rows:
                    return len(rows)
        return 0

    def touch(self, stamps: Iterable[tuple[bytes, int]]) -> None:
        """Set when chunks were last used; never back."""
        query = "UPDATE chunks SET last_used = ?1 WHERE space = ?2 AND key = ?3 AND last_used < ?1"
        with self._database.transaction() as write:
            write.executemany(query, [(stamp, self._space, key) for key, stamp in stamps])

    def recover(self, is_being_written: Callable[[str, Place], bool], is_there: Callable[[Place, int], bool]) -> None:
        """Decide about chunks whose writers are gone: written if the file is there, else deleted."""
        query = (
            "SELECT c.id, s.space, c.key, c.size, c.writer FROM chunks c JOIN spaces s ON s.id = c.space "
            "WHERE c.writer IS NOT NULL"
        )
        with self._database.transaction() as write:
            for number, space, key, size, writer in write.execute(query).fetchall():
                if is_being_written(writer, (space, key)):
                    continue
                if is_there((space, key), size):
                    write.execute("UPDATE chunks SET writer = NULL WHERE id = ?", (number,))
                else:
                    write.execute("DELETE FROM chunks WHERE id = ?", (number,))

    def adopt(self, found: Iterable[tuple[bytes, Namespace, NewEntry]]) -> None:
        """Enter chunks of any space whose files are there, unless they are entered."""
        with self._database.transaction() as write:
            for space, namespace, entry in found:
                _add(write, enter_space(write, space, namespace), entry, unless_there=True)

    def meta(self, name: str) -> str | None:
        """A note about the directory."""
        rows = self._database.rows("SELECT value FROM meta WHERE name = ?", name)
        return rows[0][0] if rows else None

    def set_meta(self, name: str, value: str, *, durable: bool = False) -> None:
        """Leave a note about the directory."""
        with self._database.transaction(durable=durable) as write:
            write.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def sync(self) -> None:
        """Return once everything entered so far is on the disk."""
        self.set_meta("synced", "yes", durable=True)


def _add(write: sqlite3.Connection, space: int, entry: NewEntry, *, unless_there: bool = False) -> int | None:
    insert = "INSERT OR IGNORE" if unless_there else "INSERT"
    info = entry.info
    described = (info.key, info.parent_key, info.content_key, info.nbytes, info.bitwise, info.start, info.context)
    return write.execute(
        f"{insert} INTO chunks ({_INFO}, space, size, last_used, writer) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*described, info.approx_depth, space, entry.size, entry.stamp, entry.writer),
    ).lastrowid


def _evict(
    write: sqlite3.Connection,
    held: dict[bytes, int],
    over: int,
    choose: Callable[[], _Victim | None],
    victims: list[Place],
) -> Room:
    """Delete the entries of chunks until ``over`` bytes are free; their places are added to ``victims``."""
    while over > 0:
        if len(victims) >= EVICTED_AT_ONCE:
            return Room.NOT_YET
        victim = choose()
        if victim is None:
            return Room.NONE
        write.execute("DELETE FROM chunks WHERE id = ?", (victim.number,))
        victims.append((victim.space, victim.key))
        held[victim.tenant] -= victim.size
        over -= victim.size
    return Room.MADE


def _held(write: sqlite3.Connection) -> dict[bytes, int]:
    """The bytes of each tenant that has any."""
    return dict(write.execute("SELECT tenant, SUM(bytes) FROM spaces WHERE bytes > 0 GROUP BY tenant").fetchall())


def _fair_victim(write: sqlite3.Connection, held: Mapping[bytes, int], tenant: bytes, stale: int) -> _Victim | None:
    """The chunk that goes next for a chunk of ``tenant``, which is counted already.

    Else the unique prompts of some tenants would evict what all others have: who has no more than an even share, or
    less than this tenant, loses only what was not used since ``stale``.
    """
    victim = _oldest(write)
    if victim is None or victim.tenant == tenant or victim.last_used < stale:
        return victim
    if held[victim.tenant] >= max(held[tenant], sum(held.values()) / len(held)):
        return victim
    return _oldest(write, tenant, max(held, key=held.__getitem__))


def _oldest(write: sqlite3.Connection, *tenants: bytes) -> _Victim | None:
    """The leaf that was used least recently, of these tenants or of all."""
    leaf = "c.successors = 0 AND c.writer IS NULL"
    oldest = "ORDER BY last_used LIMIT 1"
    if not tenants:
        query = f"{_VICTIM} WHERE c.id = (SELECT id FROM chunks c WHERE {leaf} {oldest})"
    else:
        query = (
            f"{_VICTIM} WHERE s.tenant IN ({', '.join('?' * len(tenants))}) AND c.id = "
            f"(SELECT id FROM chunks c WHERE space = s.id AND {leaf} {oldest}) ORDER BY c.last_used LIMIT 1"
        )
    row = write.execute(query, tenants).fetchone()
    return _Victim(*row) if row is not None else None


def _with_ancestors(write: sqlite3.Connection, space: int, key: bytes) -> int:
    """The sizes of a chunk and of those it follows, together."""
    query = (
        "WITH RECURSIVE above (parent, size) AS (SELECT parent, size FROM chunks WHERE space = ?1 AND key = ?2 "
        "UNION ALL SELECT c.parent, c.size FROM above a JOIN chunks c ON c.space = ?1 AND c.key = a.parent LIMIT ?3) "
        "SELECT SUM(size) FROM above"
    )
    total: int = write.execute(query, (space, key, _MAX_ANCESTORS)).fetchone()[0]
    return total


def _info(row: tuple[bytes, bytes | None, bytes, int, int, int, bytes, int]) -> BlockInfo:
    key, parent, content, nbytes, bitwise, start, context, approx_depth = row
    return BlockInfo(key, parent, content, nbytes, bool(bitwise), start, context, approx_depth)
