"""The disk tier when the disk fails, lies or is full: a miss and one warning, no error and no wrong block."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from benchmarks.common.disk import directory_bytes
from kvboost.direct_io import DIRECT
from kvboost.store.record.header import PAGE, seal_of
from kvboost.store.tiers.disk import directory as disk_directory
from kvboost.store.tiers.disk.files import Files
from kvboost.store.tiers.disk.tier import DiskTier
from kvboost.types import PutOutcome
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt
from tests.helpers.failing import Failing
from tests.store.tiers.test_disk import EACH, keys, open_tier, record_files, store_all, there

CHUNKS = prompt("a", "b", "c")


@contextmanager
def one_warning() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [str(w.category.__name__) for w in caught] == ["RuntimeWarning"], [str(w.message) for w in caught]


def consistent(tier: DiskTier, directory: Path) -> None:
    """The books are the files: nothing half written, nothing uncounted."""
    files = record_files(directory)
    assert tier.stats().chunks == len(files)
    assert directory_bytes(tier) == sum(-(-f.stat().st_size // PAGE) * PAGE + 1024 for f in files)
    assert [p.name for p in (directory / "tmp").iterdir() if not p.name.endswith(".lock")] == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    ("call", "number"), [(c, n) for c in ("write", "rename", "fsync", "read") for n in range(1, 6)]
)
def test_every_call_may_fail_once(tmp_path: Path, call: str, number: int, error: int) -> None:
    """Whatever is handed out is right; after the failure everything works as before."""
    files = Failing(call, number, error)
    tier = open_tier(tmp_path, room=4, files=files)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for chunks in (CHUNKS, prompt("a", "x"), prompt("y", "z")):
            store_all(tier, chunks)
            for found, chunk in zip(tier.load(keys(chunks)), chunks, strict=True):
                if found is not None:
                    assert_same(found, block_of(chunk))
            tier.used(keys(chunks))
            tier.flush()
    assert files.failed
    assert len(caught) == 1
    consistent(tier, tmp_path)
    assert directory_bytes(tier) <= 4 * EACH
    again = prompt("after", "all")
    assert store_all(tier, again) == [PutOutcome.STORED] * 2
    assert all(block is not None for block in tier.load(keys(again)))
    tier.close()


def test_a_file_that_cannot_be_made_safe_is_not_kept(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, files=Failing("fsync", 1, errno.EIO))
    store_all(tier, prompt("a"))
    with one_warning():
        tier.flush()
    assert there(tier, "a") == [False]
    tier.close()


def test_a_full_index_is_a_refusal(tmp_path: Path) -> None:
    """SQLite's own full disk: no page more."""
    tier = open_tier(tmp_path)
    index = tier._directory.index()
    pages = index._database._write.execute("PRAGMA page_count").fetchone()[0]
    index._database._write.execute(f"PRAGMA max_page_count = {pages}")
    with one_warning():
        outcomes = [tier.store(block_of(prompt(f"text {n}")[0])) for n in range(100)]
    assert outcomes[-1] is PutOutcome.REFUSED
    consistent(tier, tmp_path)
    index._database._write.execute("PRAGMA max_page_count = 1000000")
    assert store_all(tier, prompt("room again")) == [PutOutcome.STORED]
    tier.close()


class _SaysItIsEmpty(Files):
    """As if others filled the disk at the same moment: the floor is kept only as far as it is seen."""

    def _free(self, directory: Path) -> tuple[int, int]:
        return 2**40, 2**40


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_a_refusal(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tier = open_tier(tmp_path / "cache", files=_SaysItIsEmpty())
            outcomes = [tier.store(block_of(prompt(f"text {n}")[0])) for n in range(100)]
            assert PutOutcome.STORED in outcomes
            assert outcomes[-1] is PutOutcome.REFUSED
            for number, outcome in enumerate(outcomes):
                (found,) = tier.load(keys(prompt(f"text {number}")))
                assert (found is not None) == (outcome is PutOutcome.STORED)
            tier.flush()
            tier.close()
        assert len(caught) == 1, [str(w.message) for w in caught]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, whom the permissions hold")
def test_a_read_only_directory_is_still_read() -> None:
    script = """
import os, sys, warnings
from tests.store.tiers.test_disk import open_tier, prompt, keys, block_of, Path
os.setgid(65534); os.setuid(65534)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tier = open_tier(Path(sys.argv[1]))
    found = list(tier.load(keys(prompt("a", "b", "c"))))
    assert [b and b.key for b in found] == keys(prompt("a", "b", "c")), found
    assert tier.store(block_of(prompt("x")[0])).value == "refused"
    tier.used(keys(prompt("a"))); tier.flush(); tier.clear(); tier.variants([b""]); tier.close()
print(len(caught))
"""
    with tempfile.TemporaryDirectory() as folder:  # not below pytest's folder, which is closed to others
        directory = Path(folder)
        tier = open_tier(directory)
        store_all(tier, CHUNKS)
        tier.close()
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o500 if path.is_dir() else 0o400)
            os.chown(path, 65534, 65534)
        command = [sys.executable, "-c", script, folder]
        ran = subprocess.run(command, capture_output=True, text=True, env=_environment())
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip() == "1"
        assert len(record_files(directory)) == 3


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


# Records that are not what they should be


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def enlarge(path: Path) -> None:
    os.truncate(path, 2**40)  # a sparse file: it must not be read


def other_key(path: Path) -> None:
    shutil.copy(next(p for p in record_files(path.parents[2]) if p != path), path)


def other_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] += 1
    data[24:56] = seal_of(data[:PAGE], None)
    path.write_bytes(data)


def other_model(path: Path) -> None:
    other = open_tier(path.parents[2], of=namespace("other model"))
    other.store(block_of(CHUNKS[0]))
    shutil.copy(other._layout.record(other._space, CHUNKS[0].prefix_key), path)
    other.clear()
    other.close()


@pytest.mark.parametrize("damage", [flip, truncate, empty, enlarge, other_key, other_version, other_model])
def test_a_wrong_record_is_a_miss_and_goes(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    tier = open_tier(tmp_path)
    store_all(tier, CHUNKS)
    damage(tier._layout.record(tier._space, CHUNKS[0].prefix_key))
    with one_warning():
        found = list(tier.load(keys(CHUNKS)))
    assert [block is not None for block in found] == [False, True, True]
    assert tier.stats().rejected == 1
    consistent(tier, tmp_path)
    assert store_all(tier, CHUNKS) == [PutOutcome.STORED, PutOutcome.PRESENT, PutOutcome.PRESENT]
    assert all(block is not None for block in tier.load(keys(CHUNKS)))
    tier.close()


def test_a_deleted_file_is_a_miss_and_can_be_stored_again(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store_all(tier, CHUNKS)
    for chunk in CHUNKS[:2]:
        tier._layout.record(tier._space, chunk.prefix_key).unlink()
    assert there(tier, "a", "b", "c") == [False, False, True]
    assert list(tier.load(keys(CHUNKS[:1]))) == [None]
    tier.flush()  # writes down what was missed
    assert tier.stats().chunks == 2
    assert tier.variants([CHUNKS[0].content_key]) == [[]]
    assert store_all(tier, CHUNKS) == [PutOutcome.STORED, PutOutcome.STORED, PutOutcome.PRESENT]
    assert tier.health() == {}
    tier.close()


# Indexes that are not what they should be


def garbage(index: Path) -> None:
    index.write_bytes(os.urandom(8192))


def torn(index: Path) -> None:
    data = bytearray(index.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    index.write_bytes(data)


def cut(index: Path) -> None:
    os.truncate(index, 5000)


def gone(index: Path) -> None:
    index.unlink()


@pytest.mark.parametrize("damage", [garbage, torn, cut, gone])
@pytest.mark.parametrize("while_open", [False, True])
def test_a_broken_index_is_made_anew_from_the_files(
    tmp_path: Path, damage: Callable[[Path], None], while_open: bool
) -> None:
    tier = open_tier(tmp_path)
    store_all(tier, CHUNKS)
    tier.close()
    bystander = open_tier(tmp_path)
    tier = open_tier(tmp_path)
    if not while_open:
        tier.close()
        bystander.close()
    for suffix in ("-wal", "-shm"):
        if not while_open:
            Path(f"{tier._layout.index}{suffix}").unlink(missing_ok=True)
    damage(tier._layout.index)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not while_open:
            tier, bystander = open_tier(tmp_path), open_tier(tmp_path)
        for number in range(3):  # the first may find out, the others must work
            store_all(tier, prompt(f"new {number}"))
            store_all(bystander, prompt(f"other {number}"))
    if damage is gone or while_open:
        assert len(caught) <= 2  # a page that is still in memory may never be missed
    else:
        assert 1 <= len(caught) <= 2
    for found, chunk in zip(tier.load(keys(CHUNKS)), CHUNKS, strict=True):
        assert_same(found, block_of(chunk))
    for one in (tier, bystander):
        assert store_all(one, prompt("last")) in ([PutOutcome.STORED], [PutOutcome.PRESENT])
        consistent(one, tmp_path)
        assert [len(found) for found in one.variants([c.content_key for c in CHUNKS])] == [1, 1, 1]
        one.close()


def test_an_index_of_somebody_who_rebuilds_is_waited_for_by_nobody(tmp_path: Path) -> None:
    from kvboost.store.tiers.disk.directory import index_lock

    tier = open_tier(tmp_path)
    store_all(tier, CHUNKS)
    tier._layout.index.unlink()
    with index_lock(tier._layout, timeout_s=0.0), one_warning():
        assert tier.variants([CHUNKS[0].content_key]) == [[]]
        assert store_all(tier, prompt("x")) == [PutOutcome.REFUSED]
        assert all(block is not None for block in tier.load(keys(CHUNKS)))
    tier.close()


def test_a_locked_index_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvboost.store.tiers.disk import database

    monkeypatch.setattr(database, "_TIMEOUT_S", 0.05)
    tier = open_tier(tmp_path)
    store_all(tier, CHUNKS)
    blocker = sqlite3.connect(tier._layout.index)
    blocker.execute("BEGIN IMMEDIATE")
    with one_warning():
        assert store_all(tier, prompt("x")) == [PutOutcome.REFUSED]
    assert all(block is not None for block in tier.load(keys(CHUNKS)))
    blocker.close()
    assert store_all(tier, prompt("x")) == [PutOutcome.STORED]
    tier.close()


# File systems that know no direct reads


@pytest.mark.parametrize("when", ["open", "preadv"])
def test_a_file_system_without_direct_access_is_used_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It may say so on opening, or only on the first bytes."""
    call = getattr(os, when)

    def refusing(target: Any, *rest: Any, **named: Any) -> Any:
        flags = rest[0] if when == "open" else fcntl.fcntl(target, fcntl.F_GETFL)
        if flags & DIRECT:
            raise OSError(errno.EINVAL, "no direct reads")
        return call(target, *rest, **named)

    files = Files()
    tier = open_tier(tmp_path, room=10_000, files=files)
    large = block_of(CHUNKS[0], 9 * 2**20 + 1)  # more than one buffer's worth
    tier.store(large)
    monkeypatch.setattr(os, when, refusing)
    assert_same(next(tier.load([large.key])), large)
    assert not files.direct
    assert tier.health() == {}
    tier.close()


def test_large_records_come_back(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, room=10_000)
    for number, size in enumerate((4 * 2**20 - 4096 - 64, 4 * 2**20, 9 * 2**20 + 1)):
        block = block_of(prompt(str(number))[0], size)
        assert tier.store(block) is PutOutcome.STORED
        assert_same(next(tier.load([block.key])), block)
    consistent(tier, tmp_path)
    tier.close()


def test_nothing_grows_while_the_index_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    monkeypatch.setattr(tier._directory, "index", _locked_index)  # this one's: another test's tier may still be open
    with one_warning():
        for number in range(3000):
            tier.used([number.to_bytes(32, "little")])
            assert list(tier.load([number.to_bytes(32, "big")])) == [None]
    uses, missing = tier._unwritten.take()
    assert 0 < len(uses) <= 1024
    assert 0 < len(missing) <= 512
    monkeypatch.undo()
    tier.close()


def _locked_index(*_: object, **__: object) -> NoReturn:
    raise sqlite3.OperationalError("database is locked")


def test_an_index_that_cannot_be_rebuilt_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise sqlite3.OperationalError("database or disk is full")

    tier = open_tier(tmp_path)
    store_all(tier, prompt("a"))
    broken = sqlite3.DatabaseError("file is not a database")
    broken.sqlite_errorcode = sqlite3.SQLITE_NOTADB
    before = sorted((tmp_path / "tmp").iterdir())
    monkeypatch.setattr(disk_directory, "reconcile", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            tier._directory.failed(broken)
    assert any("cannot be rebuilt" in str(warning.message) for warning in caught)
    assert sorted((tmp_path / "tmp").iterdir()) == before
    monkeypatch.undo()
    tier.close()
