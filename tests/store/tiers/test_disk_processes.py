"""Several processes on one directory: they share blocks and a budget, and the dead leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.common.disk import directory_bytes
from kvboost.store.tiers.disk.files import Files, Presence
from kvboost.types import PutOutcome
from tests.contracts.blocks import assert_same, block_of
from tests.contracts.content import prompt
from tests.store.tiers.test_disk import EACH, bytes_on_disk, open_tier, record_files, store_all, there

ROOT = Path(__file__).parents[3]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SHARE = """
import sys
from tests.store.tiers.test_disk import *
tier = open_tier(Path(sys.argv[1]))
for found, chunk in zip(tier.load(keys(prompt("a", "b"))), prompt("a", "b"), strict=True):
    assert_same(found, block_of(chunk))
assert store_all(tier, prompt("a", "b", "c")) == [PutOutcome.PRESENT, PutOutcome.PRESENT, PutOutcome.STORED]
tier.flush()
"""


def test_each_process_finds_what_the_other_stored(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store_all(tier, prompt("a", "b"))
    other = start(SHARE, str(tmp_path))
    assert other.communicate()[1] == ""
    assert other.returncode == 0
    chunk = prompt("a", "b", "c")[2]
    assert_same(next(tier.load([chunk.prefix_key])), block_of(chunk))
    tier.close()


CROWD = """
import random, sys
from kvboost.store.tiers.disk import database
from tests.store.tiers.test_disk import *
database._TIMEOUT_S = 120  # a machine may stop a process for long while it holds the index
tier = open_tier(Path(sys.argv[1]), room=10)
chooser = random.Random(int(sys.argv[2]))
for _ in range(80):
    chunks = prompt(*(str(chooser.randrange(5)) for _ in range(chooser.randint(1, 3))))
    for chunk in chunks:
        tier.store(block_of(chunk, chooser.choice((10, 3000, 20000))))
    for found, chunk in zip(tier.load(keys(chunks)), chunks, strict=True):
        assert found is None or found.tokens == chunk.tokens
    tier.used(keys(chunks))
assert tier.health() == {}, tier.health()
tier.close()
"""


def test_a_crowd_of_processes_never_passes_the_budget(tmp_path: Path) -> None:
    crowd = [start(CROWD, str(tmp_path), str(seed)) for seed in range(3)]
    most = 0
    while any(process.poll() is None for process in crowd):
        most = max(most, bytes_on_disk(tmp_path))
        time.sleep(0.001)
    for process in crowd:
        assert process.communicate()[1] == ""
        assert process.returncode == 0
    assert 0 < most <= 10 * EACH
    tier = open_tier(tmp_path, room=10)
    assert tier.stats().chunks == len(record_files(tmp_path))
    assert bytes_on_disk(tmp_path) <= directory_bytes(tier) <= 10 * EACH
    tier.close()


def test_killed_writers_lose_nothing_they_acknowledged() -> None:
    """The benchmark disk_kills does it a thousand times."""
    command = [sys.executable, "-m", "benchmarks", "disk_kills", "--kills", "16"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Interrupted(Files):
    """Does something else just before its rename."""

    def _rename(self, source: Path, target: Path) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        super()._rename(source, target)


def test_a_block_somebody_is_writing_is_not_promised_by_another(tmp_path: Path) -> None:
    files = Interrupted()
    one, other = open_tier(tmp_path, files=files), open_tier(tmp_path)
    outcomes: list[Sequence[PutOutcome]] = []
    files.meanwhile = lambda: outcomes.append(store_all(other, prompt("a")))
    assert store_all(one, prompt("a")) == [PutOutcome.STORED]
    assert outcomes == [[PutOutcome.REFUSED]]
    assert store_all(other, prompt("a")) == [PutOutcome.PRESENT]
    one.close()
    other.close()


def test_a_block_entered_by_another_in_the_last_moment_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = open_tier(tmp_path), open_tier(tmp_path)
    store_all(one, prompt("b"))
    monkeypatch.setattr(one._directory.index(), "has", lambda key: store_all(other, prompt("a")) and None)
    assert store_all(one, prompt("a")) == [PutOutcome.REFUSED]
    assert one.health() == {}
    assert there(one, "a") == [True]
    one.close()
    other.close()


def test_clearing_while_somebody_writes_leaves_no_file_uncounted(tmp_path: Path) -> None:
    files = Interrupted()
    one, other = open_tier(tmp_path, files=files), open_tier(tmp_path)
    store_all(other, prompt("x"))
    files.meanwhile = other.clear
    store_all(one, prompt("a"))
    assert one.stats().chunks == len(record_files(tmp_path)) == 1
    one.close()
    other.close()


def test_an_index_replaced_while_somebody_writes_is_not_missed(tmp_path: Path) -> None:
    """The writer's entry is lost with the old index: its file must go too, or nobody would count it."""
    files = Interrupted()
    one, other = open_tier(tmp_path, files=files), open_tier(tmp_path)

    def replace_index() -> None:
        other._layout.index.unlink()
        store_all(other, prompt("x"))

    files.meanwhile = replace_index
    assert store_all(one, prompt("a")) == [PutOutcome.REFUSED]
    assert one.stats().chunks == other.stats().chunks == len(record_files(tmp_path)) == 1
    one.close()
    other.close()


def test_a_dead_writers_room_is_free_again(tmp_path: Path) -> None:
    """Also while others go on, who were there before it died."""
    tier = open_tier(tmp_path, room=2)
    store_all(tier, prompt("a"))
    dead = "f" * 16
    tmp = tmp_path / "tmp"
    (tmp / f"{dead}.lock").touch()
    (tmp / f"{dead}.1").write_bytes(bytes(100))
    index = tier._directory.index()
    index._database._write.execute(
        "UPDATE chunks SET writer = ?", (dead,)
    )  # the file is there: it died before it said so
    index._database._write.execute(
        "INSERT INTO chunks (space, key, content, size, nbytes, bitwise, start, context, generation, last_used, "
        f"writer) VALUES (1, x'aa', x'bb', {EACH}, 1, 1, 0, x'', 0, 0, '{dead}')"  # and this one before it wrote
    )
    assert store_all(tier, prompt("b")) == [PutOutcome.STORED]
    assert store_all(tier, prompt("a")) == [PutOutcome.PRESENT]
    assert (tier.stats().chunks, there(tier, "a"), there(tier, "b")) == (2, [True], [True])
    assert sorted(path.name for path in tmp.iterdir()) == [f"{tier._directory._presence.writer}.lock"]
    tier.close()
    assert list(tmp.iterdir()) == []


def test_the_living_are_told_from_the_dead(tmp_path: Path) -> None:
    one, other = Presence(tmp_path), Presence(tmp_path)
    assert one.is_alive(other.writer)
    assert one.is_alive(one.writer)
    other.new_path().touch()
    one.reap()
    assert len(list(tmp_path.iterdir())) == 3
    os.close(other._descriptor)  # as the system does when a process dies
    other._descriptor = -1
    assert not one.is_alive(other.writer)
    one.reap()
    assert [path.name for path in tmp_path.iterdir()] == [f"{one.writer}.lock"]
    one.close()
    one.close()
