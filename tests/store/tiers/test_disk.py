"""The disk tier: its contract, order of eviction, quotas, and who may read the directory."""

from __future__ import annotations

import os
import random
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.disk import directory_bytes
from kvboost.errors import ConfigError
from kvboost.extend import Tier
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.disk import directory as disk_directory
from kvboost.store.tiers.disk.files import Files, Layout, Presence
from kvboost.store.tiers.disk.index import ChunkIndex, NewEntry
from kvboost.store.tiers.disk.index import Limits as DiskLimits
from kvboost.store.tiers.disk.tier import DiskTier
from kvboost.types import BlockInfo, Chunk, Namespace, PutOutcome
from tests.contracts import TierContract
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt

EACH = 2 * 4096 + 1024
"""What the blocks of these tests take: a page of header, one of tokens and tensors, a row."""


def open_tier(directory: Path, *, room: int = 1000, of: Namespace | None = None, **options: Any) -> DiskTier:
    records = options.pop("records", None) or RecordFormat(of or namespace())
    return DiskTier(directory, capacity_bytes=room * EACH, records=records, **options)


def keys(chunks: Sequence[Chunk]) -> list[bytes]:
    return [chunk.prefix_key for chunk in chunks]


def store_all(tier: DiskTier, chunks: Sequence[Chunk]) -> list[PutOutcome]:
    return [tier.store(block_of(chunk)) for chunk in chunks]


def there(tier: DiskTier, *words: str) -> list[bool]:
    return tier.contains(keys(prompt(*words)))


def record_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*/*.kv"))


def bytes_on_disk(directory: Path) -> int:
    """What the records take, those half written included; files may go while this looks."""
    total = 0
    for path in [*directory.glob("*/*/*.kv"), *directory.glob("tmp/*.[0-9]*")]:
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


class TestDiskTierContract(TierContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "cache"

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        return DiskTier(self.directory, capacity_bytes=capacity_bytes, records=RecordFormat(namespace))


class TestBufferedAndSecret(TestDiskTierContract):
    """Where the file system knows no direct reads, with a MAC and encryption."""

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        records = RecordFormat(namespace, mac_key=b"m" * 32, encryption_key=b"e" * 32)
        return DiskTier(self.directory, capacity_bytes=capacity_bytes, records=records, files=Files(direct=False))


# Who goes first


def test_the_least_recently_used_prompt_goes_first_from_its_end(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, room=5)
    old, young = prompt("a", "b", "c"), prompt("x", "y")
    for chunks in (old, young):
        store_all(tier, chunks)
        tier.used(keys(chunks))
    for number, left in enumerate((2, 1, 0)):
        store_all(tier, prompt(f"new {number}"))
        assert tier.contains(keys(old)) == [i < left for i in range(3)]
        assert tier.contains(keys(young)) == [True, True]
    tier.close()


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, room=3)
    for word in "abc":
        store_all(tier, prompt(word))
    tier.used(keys(prompt("a")))
    tier.close()
    tier = open_tier(tmp_path, room=3)
    store_all(tier, prompt("d"))
    assert [there(tier, word) for word in "abcd"] == [[True], [False], [True], [True]]
    tier.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_what_is_new_is_young_although_the_clock_was_set_back(
    restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A year ahead for a while, and right again: what was stored before then is older all the same."""
    right = time.time_ns()
    watching = open_tier(tmp_path, room=4)
    with monkeypatch.context() as wrong:
        wrong.setattr(time, "time_ns", lambda: right + 365 * 24 * 3600 * 10**9)
        tier = open_tier(tmp_path, room=4)
        for word in "abc":
            store_all(tier, prompt(word))
        tier.close()
    if restarted:
        watching.close()
    tier = open_tier(tmp_path, room=4) if restarted else watching
    tier.used(keys(prompt("a")))
    for word in "def":  # "d" fits; then the least recently used go, "b" and "c"
        assert store_all(tier, prompt(word)) == [PutOutcome.STORED]
    assert [there(tier, word)[0] for word in "abcdef"] == [True, False, False, True, True, True]
    tier.close()


def test_a_chain_is_used_first_chunk_last_out_also_after_a_restart(tmp_path: Path) -> None:
    """Two prompts with the same head: the one used later keeps all of its chunks."""
    tier = open_tier(tmp_path, room=4)
    store_all(tier, prompt("head", "left"))
    store_all(tier, prompt("head", "right"))
    store_all(tier, prompt("other"))
    tier.used(keys(prompt("head", "left")))
    tier.close()
    tier = open_tier(tmp_path, room=4)
    store_all(tier, prompt("new"))
    assert there(tier, "head", "left") == [True, True]
    assert there(tier, "head", "right") == [True, False]
    tier.close()


def test_many_uses_are_written_before_they_are_too_many(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store_all(tier, prompt("a"))
    for number in range(600):
        tier.used([*keys(prompt("a")), number.to_bytes(32, "little")])
    assert len(tier._unwritten.take()[0]) < 512
    tier.close()


def test_a_parent_that_comes_back_is_held_by_its_successor(tmp_path: Path) -> None:
    """The index counts successors that were there before their parent."""
    tier = open_tier(tmp_path, room=3)
    first, second = prompt("a", "b")
    store_all(tier, [first, second])
    tier.remove([first.prefix_key])
    store_all(tier, [first])
    tier.used([second.prefix_key])  # the parent is the older one now, and still must not go first
    store_all(tier, prompt("x"))
    store_all(tier, prompt("y"))
    assert there(tier, "a", "b") == [True, False]
    tier.close()


# Budgets


def test_a_limit_that_no_chunk_fits_into_is_said_once(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, room=1)
    with pytest.warns(RuntimeWarning, match=r"limit of .* takes .*: it is not stored; give a larger") as told:
        outcomes = [tier.store(block_of(prompt(word)[0], 3 * EACH)) for word in "ab"]
    assert outcomes == [PutOutcome.REFUSED] * 2
    assert len(told) == 1
    tier.close()


class _Crowded(Files):
    """A file system of which so much is free."""

    free, total = 0, 2**40

    def _free(self, directory: Path) -> tuple[int, int]:
        return self.free - bytes_on_disk(directory), self.total


def test_the_cache_gives_way_where_the_file_system_is_nearly_full(tmp_path: Path) -> None:
    files = _Crowded()
    files.free = 2**30 + 5 * EACH
    tier = open_tier(tmp_path, files=files)
    for number in range(10):
        assert store_all(tier, prompt(f"{number}")) == [PutOutcome.STORED]
        assert files._free(tmp_path)[0] >= 2**30, "the last gigabyte is not ours"
    assert 4 <= tier.stats().chunks <= 5
    assert there(tier, "9") == [True]
    assert tier.stats().evictions >= 5
    files.free -= 2 * EACH  # somebody else has written something
    assert store_all(tier, prompt("more")) == [PutOutcome.STORED]
    assert files._free(tmp_path)[0] >= 2**30
    files.free = 2**29
    before = tier.stats()
    with pytest.warns(RuntimeWarning, match="the file system is nearly full; free some space") as seen:
        assert store_all(tier, prompt("much", "more")) == [PutOutcome.REFUSED] * 2
    assert len(seen) == 1
    assert tier.stats().refused == before.refused + 2
    files.total = 20 * 2**27  # a small one: a 20th of it is enough
    assert store_all(tier, prompt("last")) == [PutOutcome.STORED]
    tier.close()


def test_a_tenant_pays_for_its_own_blocks(tmp_path: Path) -> None:
    greedy = open_tier(tmp_path, room=10, of=namespace(tenant="greedy"), tenant_quota_bytes=3 * EACH)
    modest = open_tier(tmp_path, room=10, of=namespace(tenant="modest"), tenant_quota_bytes=3 * EACH)
    other_model = open_tier(tmp_path, room=10, of=namespace("other", tenant="greedy"), tenant_quota_bytes=3 * EACH)
    store_all(modest, prompt("m"))
    store_all(other_model, prompt("o"))
    for number in range(8):
        assert store_all(greedy, prompt(f"g{number}")) == [PutOutcome.STORED]
        assert greedy.stats().bytes + other_model.stats().bytes <= 3 * EACH
    assert there(modest, "m") == [True]
    assert there(other_model, "o") == [False]  # the same tenant's, and the oldest
    assert greedy.store(block_of(prompt("large")[0], 3 * EACH)) is PutOutcome.REFUSED
    assert greedy.stats().chunks == 3
    for tier in (greedy, modest, other_model):
        tier.close()


def test_a_flood_of_one_tenant_leaves_the_others_their_blocks(tmp_path: Path) -> None:
    modest = open_tier(tmp_path, room=6, of=namespace(tenant="modest"))
    greedy = open_tier(tmp_path, room=6, of=namespace(tenant="greedy"))
    store_all(modest, prompt("m"))
    for number in range(12):
        assert store_all(greedy, prompt(f"g{number}")) == [PutOutcome.STORED]
    assert there(modest, "m") == [True]
    assert greedy.stats().chunks == 5, "what others leave free is for whoever needs it"
    for number in range(5):
        store_all(modest, prompt(f"m{number}"))
    assert greedy.stats().chunks == modest.stats().chunks == 3
    for tier in (greedy, modest):
        tier.close()


def test_what_nobody_used_for_a_day_goes_first_whosever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = open_tier(tmp_path, room=6, of=namespace(tenant="gone"))
    here = open_tier(tmp_path, room=6, of=namespace(tenant="here"))
    store_all(gone, prompt("old"))
    tomorrow = time.time_ns() + 25 * 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: tomorrow)
    for number in range(6):
        store_all(here, prompt(f"h{number}"))
    assert there(gone, "old") == [False]
    assert here.stats().chunks == 6
    for tier in (gone, here):
        tier.close()


def test_a_flood_of_several_tenants_leaves_the_others_their_blocks(tmp_path: Path) -> None:
    quiet, *loud = (open_tier(tmp_path, room=9, of=namespace(tenant=name)) for name in ("quiet", "loud", "louder"))
    store_all(quiet, prompt("q"))
    for number in range(12):
        for which, tier in enumerate(loud):
            assert store_all(tier, prompt(f"{which} {number}")) == [PutOutcome.STORED]
    assert there(quiet, "q") == [True]
    assert [tier.stats().chunks for tier in loud] == [4, 4]
    for number in range(5):
        store_all(quiet, prompt(f"q{number}"))
    assert [tier.stats().chunks for tier in (quiet, *loud)] == [3, 3, 3]
    for tier in (quiet, *loud):
        tier.close()


def test_what_is_stale_is_evicted_without_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    quiet, loud = (open_tier(tmp_path, room=9, of=namespace(tenant=name)) for name in ("quiet", "loud"))
    store_all(quiet, prompt("old"))
    monkeypatch.setattr(time, "time_ns", lambda: now + 25 * 3600 * 10**9)
    store_all(quiet, prompt("new"))
    for number in range(7):
        store_all(loud, prompt(f"{number}"))
    assert loud.store(block_of(prompt("large")[0], 3 * EACH)) is PutOutcome.STORED  # several go for it at once
    assert (there(quiet, "old"), there(quiet, "new")) == ([False], [True])
    for tier in (quiet, loud):
        tier.close()


def test_one_budget_for_all_namespaces(tmp_path: Path) -> None:
    tiers = [open_tier(tmp_path, room=4, of=namespace(f"model {n}", tenant=f"tenant {n}")) for n in range(3)]
    for number in range(12):
        store_all(tiers[number % 3], prompt(f"text {number}"))
        assert bytes_on_disk(tmp_path) <= directory_bytes(tiers[0]) <= 4 * EACH
    assert directory_bytes(tiers[0]) == 4 * EACH == sum(tier.stats().bytes for tier in tiers)
    for tier in tiers:
        tier.close()


def test_purging_a_tenant_leaves_nothing_of_it(tmp_path: Path) -> None:
    ours = [open_tier(tmp_path, of=namespace(model, tenant="gone")) for model in ("one", "two")]
    others = open_tier(tmp_path, of=namespace("one", tenant="stays"))
    for tier in (*ours, others):
        store_all(tier, prompt("a", "b"))
    lost = record_files(tmp_path)[0]  # a file the index has lost sight of goes too
    lost.with_name("ab" * 32 + ".kv").write_bytes(lost.read_bytes())
    others.purge(namespace(tenant="gone").tenant)
    assert [tier.stats().chunks for tier in (*ours, others)] == [0, 0, 2]
    assert there(others, "a", "b") == [True, True]
    for tier in ours:
        assert there(tier, "a", "b") == [False, False]
        assert not any(tier._space.hex() in str(path) for path in record_files(tmp_path))
    for tier in (*ours, others):
        tier.close()


def test_eight_threads_never_pass_the_budget(tmp_path: Path) -> None:
    """Bytes on the disk, not only in the books."""
    tier = open_tier(tmp_path, room=20)
    failures: list[BaseException] = []
    over: list[int] = []
    done = threading.Event()

    def work(seed: int) -> None:
        chooser = random.Random(seed)
        try:
            for _ in range(60):
                chunks = prompt(*(str(chooser.randrange(4)) for _ in range(chooser.randint(1, 4))))
                for found, chunk in zip(tier.load(keys(chunks)), chunks, strict=True):
                    assert found is None or found.tokens == chunk.tokens
                for chunk in chunks:
                    tier.store(block_of(chunk, chooser.choice((100, 2000, 9000))))
                tier.used(keys(chunks))
                if chooser.random() < 0.1:
                    tier.remove(keys(chunks)[-1:])
        except BaseException as error:  # noqa: BLE001 (a thread cannot raise into the test)
            failures.append(error)

    def watch() -> None:
        while not done.is_set():
            over.append(max(bytes_on_disk(tmp_path), directory_bytes(tier)) - 20 * EACH)

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in (watcher, *workers):
        thread.start()
    for worker in workers:
        worker.join()
    done.set()
    watcher.join()
    assert not failures, failures
    assert max(over) <= 0
    assert tier.stats().evictions > 0
    assert tier.stats().chunks == len(record_files(tmp_path))
    assert list(tier.health()) == []
    tier.close()


# Whose directory


def test_only_the_user_can_read_anything(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "new" / "cache")
    chunks = prompt("a", "b")
    store_all(tier, chunks)
    tier.used(keys(chunks))
    tier.flush()
    for path in [tmp_path / "new" / "cache", *(tmp_path / "new" / "cache").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    tokens = block_of(chunks[0]).tokens
    for path in (tmp_path / "new").rglob("*"):
        assert path.is_dir() or path.suffix == ".kv" or tokens not in path.read_bytes()
    tier.close()


def test_a_directory_that_others_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="new one"):
        open_tier(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    with pytest.raises(ConfigError, match="no directory"):
        open_tier(tmp_path / "notes")
    with pytest.raises(ConfigError, match="no directory"):
        open_tier(tmp_path / "notes" / "below")


@pytest.mark.parametrize("filled", [False, True])
def test_a_directory_that_is_open_to_others_is_refused_with_what_to_do(tmp_path: Path, filled: bool) -> None:
    if filled:
        open_tier(tmp_path).close()
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigError, match=f"run: chmod 700 {tmp_path}"):
        open_tier(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(ConfigError, match=f"belongs to another user.* run: chown -R 54321 {tmp_path}"):
        open_tier(tmp_path)


def test_other_secrets_and_codecs_live_beside_each_other(tmp_path: Path) -> None:
    formats = [RecordFormat(namespace(), mac_key=key, codec=c) for key in (None, b"k" * 32) for c in ("raw", "int8")]
    tiers = [open_tier(tmp_path, records=records) for records in formats]
    (chunk,) = prompt("a")
    for number, tier in enumerate(tiers):
        assert there(tier, "a") == [False]
        assert tier.store(block_of(chunk, 100 + number)) is PutOutcome.STORED
    for number, tier in enumerate(tiers):
        assert_same(next(tier.load([chunk.prefix_key])), block_of(chunk, 100 + number))
        tier.close()


# After a power loss


def test_files_the_index_forgot_are_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a power loss: the index is older than the files. It is looked at once per start of the machine."""
    tier = open_tier(tmp_path)
    store_all(tier, prompt("a", "b", "c"))
    tier.close()
    tier = open_tier(tmp_path)
    index = tier._directory.index()
    a, b, c = keys(prompt("a", "b", "c"))
    index.delete_missing([(tier._space, b), (tier._space, c)], lambda place: False)
    tier._layout.record(tier._space, a).unlink()
    strange = tier._layout.record(tier._space, b).with_name(b.hex()[:2] + "00" * 31 + ".kv")
    strange.write_bytes(tier._layout.record(tier._space, b).read_bytes())  # whole, but not what its name says
    tier.close()
    for boot, chunks in (("same", 1), ("other", 2), ("other", 2)):
        if boot == "other":
            monkeypatch.setattr(disk_directory, "_boot_id", lambda: "after the power came back")
        tier = open_tier(tmp_path)
        assert (tier.stats().chunks, directory_bytes(tier)) == (chunks, chunks * EACH)
        tier.close()
    assert not strange.exists()
    assert len(record_files(tmp_path)) == 2


def test_records_of_another_version_count_and_go_by_their_age(tmp_path: Path) -> None:
    chunks = prompt(*"abc")
    tier = open_tier(tmp_path, room=4, of=namespace(tenant="old"))
    store_all(tier, chunks)
    tier.close()
    space = tier._space
    for path in record_files(tmp_path):
        data = bytearray(path.read_bytes())
        data[8] += 1  # the version, as if this code were older or newer than the one that wrote them
        path.write_bytes(data)
    tier._layout.index.unlink()
    tier = open_tier(tmp_path, room=4)
    assert directory_bytes(tier) == 3 * EACH, "nobody counts them"
    store_all(tier, prompt("x"))
    store_all(tier, prompt("y"))
    assert directory_bytes(tier) == bytes_on_disk(tmp_path) + 4 * 1024 == 4 * EACH
    assert (there(tier, "x"), there(tier, "y")) == ([True], [True])
    # The version that can read them says whose they are.
    other = open_tier(tmp_path, room=4, of=namespace(tenant="old"))
    assert other._space == space
    tier.purge(namespace(tenant="old").tenant)
    assert len(record_files(tmp_path)) == 2
    other.close()
    tier.close()


def test_what_others_write_meanwhile_stays_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody stores a block between the look at the folder and the look at the index."""
    other = open_tier(tmp_path)
    monkeypatch.setattr(disk_directory, "_boot_id", lambda: "after the power came back")
    look, found = Layout.records, []

    def look_slowly(self: Layout, folder: Path) -> dict[bytes, Path]:
        records = look(self, folder)
        if folder.name == prompt("a")[0].prefix_key.hex()[:2]:
            found.append(store_all(other, prompt("a")))
        return records

    monkeypatch.setattr(Layout, "records", look_slowly)
    tier = open_tier(tmp_path)
    assert [PutOutcome.STORED] in found
    assert tier.stats().chunks == len(record_files(tmp_path)) == 1
    tier.close()
    other.close()


def test_a_block_must_fit_the_format(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, records=RecordFormat(namespace(), max_bytes=5000))
    with pytest.warns(RuntimeWarning, match="smaller chunks"):
        assert tier.store(block_of(prompt("a")[0], 2000)) is PutOutcome.REFUSED
    odd = replace(block_of(prompt("a")[0], 10), key=b"short")
    assert tier.store(odd) is PutOutcome.REFUSED
    assert tier.health() == {"a block cannot be written": 2}
    tier.close()


def test_everything_is_removed_whosever_it_is(tmp_path: Path) -> None:
    own, other = open_tier(tmp_path), open_tier(tmp_path, of=namespace(tenant="other"))
    store_all(own, prompt("a", "b"))
    store_all(other, prompt("a"))
    own.purge(None)
    assert record_files(tmp_path) == []
    assert directory_bytes(own) == 0


def test_a_writer_lives_until_it_closes(tmp_path: Path) -> None:
    one, other = Presence(tmp_path), Presence(tmp_path)
    assert one.is_alive(one.writer)
    assert one.is_alive(other.writer)
    one.reap()
    assert one.is_alive(other.writer)
    other.close()
    assert not one.is_alive(other.writer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{one.writer}.lock"]


def _entry(name: int, *, parent: int | None = None, size: int = 10, writer: str | None = None) -> NewEntry:
    above = None if parent is None else b"%032d" % parent
    return NewEntry(BlockInfo(b"%032d" % name, above, b"c" * 32, 10, True, 0, b"", 0), size, name, writer)


def test_nothing_is_evicted_for_a_chunk_that_does_not_fit_with_those_before_it(tmp_path: Path) -> None:
    index = ChunkIndex.open(tmp_path / "index", space=b"s" * 16, namespace=namespace())
    others = [_entry(number) for number in range(100, 200)]
    chain = [_entry(0), _entry(1, parent=0)]
    index.adopt((b"s" * 16, namespace(), entry) for entry in [*chain, *others, *chain])  # those entered are left alone
    assert (index.totals().chunks, index.totals().bytes) == (102, 1020)
    removed: list[Any] = []
    wide = _entry(2, parent=1, size=1001, writer="w")
    assert index.reserve(wide, limits=DiskLimits(1020), remove=removed.append)[0].value == "none"
    assert (removed, index.totals().bytes) == ([], 1020)
    fits = _entry(2, parent=1, size=1000, writer="w")
    assert index.reserve(fits, limits=DiskLimits(1020), remove=removed.append)[0].value == "not yet"
    assert len(removed) == 64
    index.close()
