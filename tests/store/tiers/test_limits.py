"""The limit of a directory: set by the last engine that gives one, kept by all, reached in small steps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.disk import directory_bytes
from kvboost.store import DiskTier
from kvboost.store.record.format import RecordFormat
from kvboost.store.record.header import info_of
from kvboost.store.tiers.disk import directory as directory_module
from kvboost.store.tiers.disk.index import ChunkIndex, Limits, NewEntry, Room
from kvboost.types import PutOutcome
from tests.contracts.blocks import block_of, namespace
from tests.contracts.content import prompt
from tests.helpers.places import Place

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
def test_the_last_that_gives_a_limit_sets_it_and_those_who_run_are_told_once(place: Place) -> None:
    words = [f"chunk {number}" for number in range(100)]
    first = tier_of(place, LARGE)
    store(first, *words)
    later = tier_of(place, SMALL)
    assert kept(later, *words) == 100, "opening evicts nothing"
    told_what = f"limit of {SMALL:,} .* {LARGE:,} is not used; .* disk_cache_bytes"
    with pytest.warns(RuntimeWarning, match=told_what) as told:
        store(first, "one more", "another")
    assert len(told) == 1
    assert first.stats().bytes <= SMALL == first.stats().capacity_bytes
    assert kept(first, "one more", "another") == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unset = tier_of(place, None)  # who asks for nothing changes nothing, and is told nothing
        store(unset, "a third")
        store(later, "a fourth")
    assert unset.stats().capacity_bytes == later.stats().capacity_bytes == SMALL
    for tier in (first, later, unset):
        tier.close()


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_one_that_starts_with_a_smaller_limit_trims_what_lies_there(place: Place) -> None:
    words = [f"chunk {number}" for number in range(100)]
    tier = tier_of(place, LARGE)
    store(tier, *words)
    held = directory_bytes(tier)
    tier.close()
    tier = tier_of(place, SMALL)
    assert store(tier, "one more") == [PutOutcome.STORED]
    assert directory_bytes(tier) <= SMALL < held
    assert kept(tier, *words[-3:]) == 3, "the least recently used go first"
    tier.close()
    tier = tier_of(place, LARGE)
    assert tier.stats().capacity_bytes == LARGE, "a larger one holds as well"
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
    tier.close()
    tier = tier_of(place, SMALL)
    monkeypatch.setattr(disk_tier, "_MAX_STEPS", 1)
    outcomes = []
    for left in (150 - 64, 150 - 128):
        outcomes += store(tier, "new")
        assert tier.stats().chunks == left
    assert outcomes == [PutOutcome.REFUSED] * 2
    assert store(tier, "new") == [PutOutcome.STORED]
    assert tier.stats().bytes <= SMALL
    tier.close()
