"""Refusing is right or wrong by who comes back first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvboost.store.eviction import duels
from kvboost.store.eviction.duels import Duels


def fight(duel: Duels, *, winner: str, rounds: int) -> None:
    for number in range(rounds):
        new, old = b"new %d" % number, b"old %d" % number
        duel.start(newcomer=new, holder=old)
        duel.end(old if winner == "holder" else new)


def test_refusing_pays_after_holders_came_first_and_not_before() -> None:
    duel = Duels()
    assert not duel.refusing_pays
    fight(duel, winner="holder", rounds=100)
    assert duel.refusing_pays
    fight(duel, winner="newcomer", rounds=100)
    assert not duel.refusing_pays


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=200))
def test_every_open_duel_has_two_sides(calls: list[tuple[int, int, bool]]) -> None:
    duel = Duels()
    for first, second, ends in calls:
        if ends:
            duel.end(bytes([first]))
            assert bytes([first]) not in duel._open
        else:
            duel.start(newcomer=bytes([first]), holder=bytes([second]))
        assert all(duel._open[other] == (key, -result) for key, (other, result) in duel._open.items())


def test_duels_are_bounded() -> None:
    duel = Duels()
    for number in range(2000):
        duel.start(newcomer=b"n%d" % number, holder=b"h%d" % number)
    assert len(duel._open) == duels._MOST
