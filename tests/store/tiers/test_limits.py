"""The limit of a place: set by its first writer, kept by all, changed by a command, reached in small steps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.disk import directory_bytes
from benchmarks.common.servers import RedisServer
from kvboost.errors import ConfigError
from kvboost.store import DiskTier
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.store.record.header import info_of
from kvboost.store.tiers.disk import directory as directory_module
from kvboost.store.tiers.disk.index import EVICTED_AT_ONCE, ChunkIndex, Limits, NewEntry, Room
from kvboost.types import PutOutcome
from tests.contracts.blocks import block_of, namespace
from tests.contracts.content import prompt
from tests.helpers.places import Place, set_limit

RECORDS = RecordFormat(namespace())
LARGE, SMALL = 2**30, 40_000


def tier_of(place: Place, capacity: int | None) -> Any:
    return DiskTier(place.url, capacity_bytes=capacity, records=RECORDS)


def store(tier: Any, *words: str) -> list[PutOutcome]:
    """Store prompts of one chunk each."""
    return [tier.store(block_of(prompt(word)[0])) for word in words]


def kept(tier: Any, *words: str) -> int:
    return sum(tier.contains([prompt(word)[0].prefix_key for word in words]))


def _stored_with(place: Place, capacity: int, word: str) -> Any:
    tier = tier_of(place, capacity)
    store(tier, word)
    return tier


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_a_later_writer_keeps_the_limit_of_the_first_and_is_told(place: Place) -> None:
    words = [f"chunk {number}" for number in range(12)]
    first = tier_of(place, LARGE)
    store(first, *words)
    with pytest.warns(RuntimeWarning, match="kvboost cache limit .* SIZE") as told:
        later = _stored_with(place, SMALL, "one more")
    assert len(told) == 1, "it was not told, or more than once"
    assert f"{LARGE:,}" in str(told[0].message)
    assert kept(later, *words, "one more") == 13, "the later writer trimmed the place to a limit of its own"
    assert later.stats().capacity_bytes == LARGE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unset = tier_of(place, None)  # who asks for nothing is told nothing
        store(unset, "another")
    assert unset.stats().capacity_bytes == LARGE
    for tier in (first, later, unset):
        tier.close()


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_the_command_changes_the_limit_for_those_who_run(place: Place) -> None:
    words = [f"chunk {number}" for number in range(100)]
    tier = tier_of(place, None)
    store(tier, *words)
    evicted = set_limit(place.url, SMALL)
    assert evicted > EVICTED_AT_ONCE
    assert kept(tier, *words) == 100 - evicted > 0
    assert store(tier, "one more") == [PutOutcome.STORED]
    assert tier.stats().bytes <= SMALL == tier.stats().capacity_bytes
    tier.close()


def test_whoever_asks_for_nothing_never_trims_what_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of an earlier version has no limit yet."""
    words = [f"chunk {number}" for number in range(12)]
    tier = DiskTier(tmp_path, capacity_bytes=LARGE, records=RECORDS)
    store(tier, *words)
    held = directory_bytes(tier)
    tier.close()
    (tmp_path / "capacity").unlink()
    monkeypatch.setattr(directory_module, "DEFAULT_PLACE_BYTES", SMALL)
    tier = DiskTier(tmp_path, records=RECORDS)
    assert tier.stats().capacity_bytes == held > SMALL
    store(tier, "one more")
    assert kept(tier, *words, "one more") == 12
    tier.close()


def test_a_rebuilt_index_does_not_lose_the_limit(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, capacity_bytes=SMALL, records=RECORDS)
    tier.close()
    for path in tmp_path.glob("index-1.sqlite*"):
        path.unlink()
    tier = DiskTier(tmp_path, records=RECORDS)
    assert tier.stats().capacity_bytes == SMALL
    tier.close()


def test_one_transaction_evicts_a_few_and_the_next_goes_on(tmp_path: Path) -> None:
    index = ChunkIndex.open(tmp_path / "index", space=b"s" * 16, namespace=namespace())
    for number in range(200):
        index.adopt([(b"s" * 16, namespace(), NewEntry(info_of(block_of(prompt(str(number))[0])), 10, number))])
    new = NewEntry(info_of(block_of(prompt("new")[0])), 10, 1000, "writer")
    removed: list[Any] = []
    steps = []
    while not steps or steps[-1][0] is Room.NOT_YET:
        steps.append(index.reserve(new, limits=Limits(500), remove=removed.append))
        assert (index.has(new.info.key) is not None) == (steps[-1][0] is Room.MADE)
    assert steps == [(Room.NOT_YET, 64), (Room.NOT_YET, 64), (Room.MADE, 23)]
    assert (index.totals().bytes, len(removed)) == (500, 151)
    index.close()


def test_a_chain_that_cannot_fit_evicts_nobody(tmp_path: Path) -> None:
    index = ChunkIndex.open(tmp_path / "index", space=b"s" * 16, namespace=namespace())
    chain = [info_of(block_of(chunk)) for chunk in prompt(*map(str, range(40)))]
    others = [info_of(block_of(prompt(f"other {number}")[0])) for number in range(100)]
    for number, info in enumerate([*others, *chain[:-1]]):
        index.adopt([(b"s" * 16, namespace(), NewEntry(info, 10, number))])
    new = NewEntry(chain[-1], 10, 1000, "writer")
    assert index.reserve(new, limits=Limits(395), remove=pytest.fail) == (Room.NONE, 0)
    assert index.totals().chunks == 139
    index.close()


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_a_store_evicts_so_many_at_most_and_later_ones_go_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvboost.store.tiers.disk import tier as disk_tier

    tier = tier_of(place, None)
    store(tier, *map(str, range(150)))
    catalogue = open_catalogue(place.url)
    catalogue.set_limit(SMALL)
    catalogue.close()
    monkeypatch.setattr(disk_tier, "_MAX_STEPS", 1)
    outcomes = []
    for left in (150 - 64, 150 - 128):
        outcomes += store(tier, "new")
        assert tier.stats().chunks == left
    assert outcomes == [PutOutcome.REFUSED] * 2
    assert store(tier, "new") == [PutOutcome.STORED]
    assert tier.stats().bytes <= SMALL
    tier.close()


def test_the_limit_of_a_server_is_its_own(redis_at: RedisServer) -> None:
    catalogue = open_catalogue(redis_at.url)
    assert catalogue.limit() == 4 * 2**30, "its maxmemory"
    with pytest.raises(ConfigError, match="maxmemory"):
        catalogue.set_limit(SMALL)
    catalogue.close()
