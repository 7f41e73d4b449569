"""Every statement of the index finds its rows by an index: a directory may hold millions of chunks."""

from __future__ import annotations

import inspect
import re
import sqlite3
from pathlib import Path

import pytest

from kvboost.store.record.header import info_of
from kvboost.store.tiers.disk import database
from kvboost.store.tiers.disk.database import IndexView
from kvboost.store.tiers.disk.index import ChunkIndex, Limits, NewEntry, Room
from tests.contracts.blocks import block_of, namespace
from tests.contracts.content import prompt

SPACE = b"s" * 16
_SCHEMA = ("PRAGMA", "CREATE", "BEGIN", "COMMIT", "ROLLBACK", "--")


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What SQLite was asked to do, with its values."""
    asked: set[str] = set()
    connect = sqlite3.connect

    def watched(*arguments: object, **options: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)  # type: ignore[call-overload]
        connection.set_trace_callback(asked.add)
        return connection

    monkeypatch.setattr(database.sqlite3, "connect", watched)
    return asked


def _use_everything(index: ChunkIndex, path: Path) -> set[str]:
    """Call every method; their names."""
    before = set(dir(object))
    infos = [info_of(block_of(chunk)) for chunk in prompt("a", "b", "c")]
    other = index.for_space(b"t" * 16, namespace("other"))
    other.adopt([(b"t" * 16, namespace("other"), NewEntry(info, 10, 1)) for info in infos])
    for number, info in enumerate(infos):
        entry = NewEntry(info, 10, number, "writer")
        assert index.reserve(entry, limits=Limits(1000, 500), remove=lambda _: None) == (Room.MADE, 0)
        index.finish(info.key, "writer")
    new = NewEntry(info_of(block_of(prompt("new")[0])), 10, 9, "writer")
    assert index.reserve(new, limits=Limits(60, 30), remove=lambda _: None)[0] is Room.MADE
    index.reserve(NewEntry(info_of(block_of(prompt("no")[0])), 10, 9, "w"), limits=Limits(0), remove=lambda _: None)
    index.variants([infos[0].content_key], 4)
    index.newest()
    index.has(infos[0].key)
    index.keys_in(SPACE, 0)
    for whole in (False, True):
        index.totals(whole=whole)
    for tenant in (None, namespace().tenant):
        index.spaces(tenant=tenant)
    index.touch([(infos[0].key, 50)])
    index.delete_missing([(SPACE, b"gone")], lambda _: False)
    index.recover(lambda writer, place: False, lambda place, size: False)
    index.recover(lambda writer, place: True, lambda place, size: True)
    index.drop([SPACE], 4, lambda _: None)
    index.set_meta("x", "y")
    index.meta("x")
    index.sync()
    assert index.is_current
    view = IndexView(path)
    view.namespaces()
    view.last_used(SPACE, 255)
    view.close()
    source = inspect.getsource(_use_everything)
    return {name for name in set(dir(ChunkIndex)) - before if re.search(rf"\b(index|other)\.{name}\b", source)}


def test_every_statement_uses_an_index(tmp_path: Path, statements: set[str]) -> None:
    index = ChunkIndex.open(tmp_path / "index", space=SPACE, namespace=namespace())
    used = _use_everything(index, tmp_path / "index")
    public = {name for name in dir(ChunkIndex) if not name.startswith("_")}
    assert public - used == {"open", "close"}, "a method is not tried here"
    asked = [text for text in statements if not text.lstrip().startswith(_SCHEMA)]
    assert len(asked) > 20
    slow = {}
    with sqlite3.connect(tmp_path / "index") as plain:
        for text in asked:
            plan = [row[3] for row in plain.execute(f"EXPLAIN QUERY PLAN {text}")]
            # Few rows: a space for each model of each tenant, and there is nothing but all of them to be added up.
            whole = "FROM spaces" in text and ("WHERE" not in text or "SUM(bytes)" in text)
            # The first of the leaves in their order is the next victim; a tenant's is the first of those of its spaces.
            scans = [step for step in plan if step.startswith("SCAN") and step != "SCAN c USING INDEX leaves"]
            sorts = (
                any("TEMP B-TREE" in step for step in plan) and "SEARCH s USING INDEX by_tenant (tenant=?)" not in plan
            )
            if sorts or (scans and not (whole and len(plan) == 1)):
                slow[text] = plan
    plain.close()
    index.close()
    assert slow == {}
