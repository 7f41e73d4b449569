"""The index against a plain dict of sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.key_summary import keys_of
from kvboost.errors import ConfigError
from kvboost.fleet.index import FleetIndex, ShortKeys, pack_keys, short_keys, unpack_keys

# The same low bits: all of them want the same row of the table.
_KEYS = st.lists(st.integers(0, 12).map(lambda number: 7 + (number << 40)), max_size=6)
_UPDATES = st.lists(st.tuples(st.sampled_from("abc"), _KEYS, st.sampled_from(["add", "replace", "forget"])))


def short(*keys: int) -> ShortKeys:
    return np.array(keys, dtype=np.uint64)


def holders(index: FleetIndex, keys: list[int], names: Iterable[str] = "abc") -> list[set[str]]:
    rows = index.holders(np.array(keys, dtype=np.uint64))
    places = {name: place for name in names if (place := index.bit_of(name)) is not None}
    return [{n for n, p in places.items() if int(row[p // 64]) >> p % 64 & 1} for row in rows]


@settings(deadline=None)
@given(_UPDATES)
def test_it_knows_what_a_dict_of_sets_knows(updates: list[tuple[str, list[int], str]]) -> None:
    index, held = FleetIndex(), defaultdict[str, set[int]](set)
    for name, keys, kind in updates:
        if kind == "forget":
            index.forget(name)
            held.pop(name, None)
            continue
        if kind == "replace":
            index.replace(name, short(*keys))
            held[name] = set(keys)
        else:
            index.add(name, short(*keys))
            held[name] |= set(keys)
    every = [7 + (number << 40) for number in range(14)]
    assert holders(index, every) == [{name for name, own in held.items() if key in own} for key in every]
    assert {name for name in "abc" if index.bit_of(name) is not None} == set(held)
    assert keys_of(index) == len(set().union(*held.values()))


def test_it_grows_and_shrinks_with_what_is_held() -> None:
    index, rng = FleetIndex(), np.random.default_rng(0)
    for turn in range(30):
        keys = rng.integers(1, 2**63, 5000, dtype=np.uint64)
        index.replace("a", keys)
        assert keys_of(index) == len(set(keys.tolist())), turn
        assert index.holders(keys).all()
    assert index._table.nbytes <= 8 * 5000 * 16  # what was held before is not kept


def test_it_has_four_rows_for_a_key_at_most_where_it_grows_little_by_little() -> None:
    index, rng = FleetIndex(), np.random.default_rng(0)
    for _ in range(2000):
        index.add("a", rng.integers(1, 2**63, 10, dtype=np.uint64))
        assert index._table.nbytes <= max(1024 * 16, 4 * 16 * (keys_of(index) + 10))


def test_which_keys_a_replica_holds() -> None:
    index = FleetIndex()
    for number in range(70):
        index.add(f"r{number}", short(1, 2 + number))
    keys = np.array([1, 2, 71, 99], dtype=np.uint64)
    assert index.held_by("r69", keys).tolist() == [True, False, True, False]
    assert not index.held_by("nobody", keys).any()


def test_more_replicas_than_a_word_has_bits() -> None:
    index, names = FleetIndex(), [f"r{number}" for number in range(150)]
    for number, name in enumerate(names):
        index.add(name, short(1 + number % 7))
    assert holders(index, [1, 3], names) == [{f"r{n}" for n in range(150) if n % 7 == k} for k in (0, 2)]
    index.forget("r140")
    index.add("new", short(99))
    assert holders(index, [1, 99], [*names, "new"]) == [{f"r{n}" for n in range(0, 140, 7)} | {f"r{147}"}, {"new"}]


def test_a_replica_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a name"):
        FleetIndex().add("", short(1))


@settings(deadline=None)
@given(st.lists(st.integers(1, 2**64 - 1)))
def test_keys_are_read_as_they_were_sent(keys: list[int]) -> None:
    packed = pack_keys(short(*keys))
    assert (unpack_keys(packed).tolist(), len(packed)) == (keys, 8 * len(keys))


def test_a_key_of_zeros_is_a_key() -> None:
    assert short_keys([bytes(32)]).tolist() == [1]


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        short_keys([b"short"])
