"""Whoever evicts lets others write between its steps."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import pytest

from kvboost.store.admin.disk import DiskCatalogue
from kvboost.store.tiers.disk import database
from kvboost.store.tiers.disk.files import Files, Layout
from kvboost.store.tiers.disk.index import EVICTED_AT_ONCE, ChunkIndex, NewEntry
from kvboost.types import BlockInfo
from tests.contracts.blocks import namespace

SPACE = b"s" * 16
_STEPS = 20


@pytest.fixture
def catalogue(tmp_path: Path) -> DiskCatalogue:
    """A directory with many entries over its limit, whose files take a while to remove."""
    made = DiskCatalogue(tmp_path / "cache", create=True)
    made.set_limit(1)
    index = _open(tmp_path)
    keys = [b"%032d" % number for number in range(EVICTED_AT_ONCE * _STEPS)]
    index.adopt((SPACE, namespace(), NewEntry(BlockInfo(key, None, key, 10, True, 0, b"", 0), 10, 1)) for key in keys)
    index.close()
    return made


def _open(tmp_path: Path) -> ChunkIndex:
    return ChunkIndex.open(Layout(tmp_path / "cache").index, space=SPACE, namespace=namespace())


def test_a_writer_waits_for_a_step_of_an_eviction_and_not_for_its_end(
    catalogue: DiskCatalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "remove", lambda self, path: time.sleep(0.0002))
    steps: list[int] = []

    def evict() -> None:
        for evicted in catalogue.trim():
            steps.append(evicted)  # one by one: the other thread counts them

    evicting = threading.Thread(target=evict)
    writer = _open(tmp_path)  # connections of its own, as another process has
    waited: list[int] = []
    evicting.start()
    try:
        while evicting.is_alive() and len(steps) < _STEPS - 5:
            before = len(steps)
            writer.set_meta("x", "y")
            waited.append(len(steps) - before)
            time.sleep(0.001)
    finally:
        evicting.join()
        writer.close()
        catalogue.close()
    assert sum(steps) == EVICTED_AT_ONCE * _STEPS
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
