"""Whoever evicts lets others write between its steps."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.disk import database
from kvboost.store.tiers.disk.directory import charge
from kvboost.store.tiers.disk.files import Files, Layout
from kvboost.store.tiers.disk.index import EVICTED_AT_ONCE, ChunkIndex, NewEntry
from kvboost.store.tiers.disk.tier import DiskTier
from kvboost.types import BlockInfo, PutOutcome
from tests.contracts.blocks import block_of, namespace
from tests.contracts.content import prompt

SPACE = b"s" * 16
_STEPS = 20
NEW = block_of(prompt("new")[0])


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """Of a directory with many entries over its limit, which has room for NEW alone."""
    records = RecordFormat(namespace())
    made = DiskTier(tmp_path / "cache", capacity_bytes=charge(records.size_of(NEW)), records=records)
    index = _open(tmp_path)
    keys = [b"%032d" % number for number in range(EVICTED_AT_ONCE * _STEPS)]
    index.adopt((SPACE, namespace(), NewEntry(BlockInfo(key, None, key, 10, True, 0, b"", 0), 10, 1)) for key in keys)
    index.close()
    yield made
    made.close()


def _open(tmp_path: Path) -> ChunkIndex:
    return ChunkIndex.open(Layout(tmp_path / "cache").index, space=SPACE, namespace=namespace())


def test_a_writer_waits_for_a_step_of_an_eviction_and_not_for_its_end(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []

    def remove(files: Files, path: Path) -> None:
        time.sleep(0.0002)
        removed.append(path)  # one by one: the other thread counts them

    def evict() -> None:
        while tier.store(NEW) is PutOutcome.REFUSED:
            pass

    monkeypatch.setattr(Files, "remove", remove)
    evicting = threading.Thread(target=evict)
    writer = _open(tmp_path)  # connections of its own, as another process has
    waited: list[float] = []
    evicting.start()
    try:
        while evicting.is_alive() and len(removed) < EVICTED_AT_ONCE * (_STEPS - 5):
            before = len(removed)
            writer.set_meta("x", "y")
            waited.append((len(removed) - before) / EVICTED_AT_ONCE)
            time.sleep(0.001)
    finally:
        evicting.join()
        writer.close()
    assert len(removed) == EVICTED_AT_ONCE * _STEPS
    assert len(waited) > _STEPS / 4, "a writer has its turn again and again"
    assert max(waited) <= 5, "some of them because this machine is busy"


def test_a_commit_waits_for_readers_where_there_is_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have no shared memory, and SQLite then has no write-ahead log."""
    monkeypatch.setattr(database, "_SCHEMA", database._SCHEMA.replace("WAL", "DELETE"))
    made = database.Database(tmp_path / "index")
    reader = sqlite3.connect(tmp_path / "index", isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM spaces").fetchall()
    ending = threading.Timer(0.1, lambda: reader.execute("COMMIT"))
    ending.start()
    assert made.space_id(SPACE, namespace()) == 1
    ending.join()
    reader.close()
    made.close()
