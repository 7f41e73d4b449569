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
from kvboost.fleet.index import FleetIndex, KeyUpdate, short_keys

# The same low bits: all of them want the same row of the table.
_KEYS = st.lists(st.integers(0, 12).map(lambda number: 7 + (number << 40)), max_size=6)
_UPDATES = st.lists(st.tuples(st.sampled_from("abc"), _KEYS, _KEYS, st.sampled_from(["some", "whole", "forget"])))

_NONE = np.empty(0, dtype=np.uint64)


def update(added: list[int], dropped: list[int] | None = None, *, whole: bool = False) -> KeyUpdate:
    return KeyUpdate(np.array(added, dtype=np.uint64), np.array(dropped or [], dtype=np.uint64), whole)


def holders(index: FleetIndex, keys: list[int], names: Iterable[str] = "abc") -> list[set[str]]:
    rows = index.holders(np.array(keys, dtype=np.uint64))
    places = {name: place for name in names if (place := index.bit_of(name)) is not None}
    return [{n for n, p in places.items() if int(row[p // 64]) >> p % 64 & 1} for row in rows]


@settings(deadline=None)
@given(_UPDATES)
def test_it_knows_what_a_dict_of_sets_knows(updates: list[tuple[str, list[int], list[int], str]]) -> None:
    index, held = FleetIndex(), defaultdict[str, set[int]](set)
    for name, added, dropped, kind in updates:
        if kind == "forget":
            index.forget(name)
            held.pop(name, None)
            continue
        index.apply(name, update(added, dropped, whole=kind == "whole"))
        held[name] = (set() if kind == "whole" else held[name] - set(dropped)) | set(added)
    keys = [7 + (number << 40) for number in range(14)]
    assert holders(index, keys) == [{name for name, own in held.items() if key in own} for key in keys]
    assert {name for name in "abc" if index.bit_of(name) is not None} == set(held)
    assert keys_of(index) == len(set().union(*held.values()))


def test_it_grows_and_shrinks_with_what_is_held() -> None:
    index, rng = FleetIndex(), np.random.default_rng(0)
    for turn in range(30):
        keys = rng.integers(1, 2**63, 5000, dtype=np.uint64)
        index.apply("a", KeyUpdate(keys, np.empty(0, dtype=np.uint64), whole=True))
        assert keys_of(index) == len(set(keys.tolist())), turn
        assert index.holders(keys).all()
    assert index._table.nbytes <= 8 * 5000 * 16  # what was held before is not kept


def test_it_has_four_rows_for_a_key_at_most_where_it_grows_little_by_little() -> None:
    index, rng = FleetIndex(), np.random.default_rng(0)
    for _ in range(2000):
        index.apply("a", KeyUpdate(rng.integers(1, 2**63, 10, dtype=np.uint64), _NONE, whole=False))
        assert index._table.nbytes <= max(1024 * 16, 4 * 16 * (keys_of(index) + 10))


def test_which_keys_a_replica_holds() -> None:
    index = FleetIndex()
    for number in range(70):
        index.apply(f"r{number}", update([1, 2 + number]))
    keys = np.array([1, 2, 71, 99], dtype=np.uint64)
    assert index.held_by("r69", keys).tolist() == [True, False, True, False]
    assert not index.held_by("nobody", keys).any()


def test_more_replicas_than_a_word_has_bits() -> None:
    index, names = FleetIndex(), [f"r{number}" for number in range(150)]
    for number, name in enumerate(names):
        index.apply(name, update([1 + number % 7]))
    assert holders(index, [1, 3], names) == [{f"r{n}" for n in range(150) if n % 7 == k} for k in (0, 2)]
    index.forget("r140")
    index.apply("new", update([99]))
    assert holders(index, [1, 99], [*names, "new"]) == [{f"r{n}" for n in range(0, 140, 7)} | {f"r{147}"}, {"new"}]


def test_a_replica_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a name"):
        FleetIndex().apply("", update([1]))


@settings(deadline=None)
@given(st.lists(st.integers(1, 2**64 - 1)))
def test_an_update_is_read_as_it_was_sent(added: list[int]) -> None:
    read = KeyUpdate.from_bytes(update(added, whole=True).to_bytes())
    assert (read.added.tolist(), read.dropped.tolist(), read.whole) == (added, [], True)


def test_a_key_of_zeros_is_a_key() -> None:
    assert short_keys([bytes(32)]).tolist() == [1]


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        short_keys([b"short"])
