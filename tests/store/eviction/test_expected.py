"""What is learnt: chances from returns, the best time to give up, and whom that lets go."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.store import LeafFirstLRU, LeastExpected
from kvboost.store.eviction import expected, returns
from kvboost.store.eviction.returns import SPANS, Kind, Watch, best_rates, rate_at


class Block:
    def __init__(self, time: int, kind: Kind) -> None:
        self.time, self.kind, self.span = time, kind, -1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.001, 0.9), min_size=SPANS, max_size=SPANS))
def test_the_index_is_the_best_over_all_times_to_give_up(chances: list[float]) -> None:
    """Held against the definition, which looks at every time."""
    rates = best_rates(chances)
    for first in range(SPANS):
        best, returned, waited, left = 0.0, 0.0, 0.0, 1.0
        for span in range(first, SPANS):
            returned += left * chances[span]
            waited += left * returns._WIDTHS[span] * (1 - chances[span] / 2)
            left *= 1 - chances[span]
            best = max(best, returned / waited)
        assert math.isclose(rates[first], best, rel_tol=1e-9)


def test_with_nothing_known_the_order_is_by_age() -> None:
    index = Kind(None).index(0, 1.0)
    rates = [rate_at(index, age) for age in (0, 1, 2, 5, 20, 100, 5000, 60000, 10**9)]
    assert rates == sorted(rates, reverse=True)


def test_chances_are_learnt_without_waiting_for_the_end() -> None:
    """Half of the blocks come back after 20 prompts, the others never: known long before those are given up."""
    watch, draw = Watch(), random.Random(5)
    kind = Kind(watch.everything)
    due: deque[tuple[int, Block]] = deque()
    for now in range(600):
        watch.tick()
        while due and due[0][0] <= now:
            watch.came_back(due.popleft()[1])
        block = Block(watch.now, kind)
        watch.start(block)
        if draw.random() < 0.5:
            due.append((now + 20, block))
    kind.index(10**6, watch.weight)
    at_20 = int(math.log2(20) * 3) + 1
    assert kind._chances[at_20] == pytest.approx(0.5, abs=0.05)
    assert all(chance < 0.02 for span, chance in enumerate(kind._chances[:22]) if abs(span - at_20) > 1)
    waiting, past = rate_at(kind._index, 12), rate_at(kind._index, 40)
    assert waiting > 10 * past


def test_no_more_is_watched_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "_MAX_WATCHED", 50)
    watch = Watch()
    blocks = []
    for _ in range(300):
        watch.tick()
        blocks.append(Block(watch.now, watch.everything))
        watch.start(blocks[-1])
    assert sum(len(queue) for queue in watch._spans) == watch._watched == 50
    assert sum(watch.everything.within) == sum(block.span >= 0 for block in blocks) == 50


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("nur")), max_size=150))
def test_what_is_within_the_spans_is_what_is_watched(calls: list[tuple[int, str]]) -> None:
    policy, stored = LeastExpected(), set[bytes]()
    for number, call in calls:
        key = bytes([number])
        if call == "n" and key not in stored:
            policy.found([])
            policy.inserted(key)
            stored.add(key)
        elif call == "u":
            policy.found([key])
            policy.used([key])
        elif call == "r" and stored:
            victim = policy.victim(lambda key: True)
            assert victim is not None
            policy.removed(victim)
            stored.remove(victim)
        queues = enumerate(policy._watch._spans)
        watched = [b for span, queue in queues for b, time in queue if (b.span, b.time) == (span, time)]
        assert {b.key for b in (*policy._blocks.values(), *policy._ghosts.values()) if b.span >= 0} <= {
            b.key for b in watched
        }
        kinds = [policy._watch.everything, *policy._kinds.values()]
        assert all(min(kind.within) >= 0 for kind in kinds)
        assert sum(policy._watch.everything.within) == len(watched)
        assert {block.key for block in policy._leaves} == stored


def serve(policy: LeastExpected | LeafFirstLRU, prompts: int, *, capacity: int = 200) -> float:
    """Ten chunks that come for ever, every 40 prompts each, in a stream of chunks that come once: the share found."""
    stored: set[bytes] = set()
    hits = asked = 0
    for number in range(prompts):
        keys = [b"once %d %d" % (number, place) for place in range(9)]
        if number % 4 == 0:
            keys.append(b"again %d" % (number // 4 % 10))
            asked += number > prompts // 2
            hits += number > prompts // 2 and keys[-1] in stored
        policy.found([key for key in keys if key in stored])
        for key in keys:
            if key not in stored:
                while len(stored) >= capacity:
                    victim = policy.victim(lambda key: True)
                    assert victim is not None
                    policy.removed(victim)
                    stored.remove(victim)
                policy.inserted(key)
                stored.add(key)
        policy.used(keys)
    return hits / asked


def test_it_keeps_what_comes_back_where_lru_loses_it() -> None:
    assert serve(LeafFirstLRU(), 1500) == 0.0
    assert serve(LeastExpected(), 1500) > 0.95


def test_content_that_comes_back_behind_other_text_is_known_by_its_ghost() -> None:
    """Twenty passages, every 80 prompts each, under a new key whenever they are not stored; the rest comes once."""

    def share_found(*, told: bool) -> float:
        policy = LeastExpected()
        stored: dict[bytes, bytes] = {}  # content -> key
        place = random.Random(0)
        hits = asked = 0
        for number in range(1500):
            contents = [b"once %d %d" % (number, other) for other in range(9)]
            if number % 4 == 0:
                again = b"again %d" % (number // 4 % 20)
                contents.insert(place.randrange(10), again)  # its place must not tell
                asked += number > 750
                hits += number > 750 and again in stored
            policy.found([stored[content] for content in contents if content in stored])
            for content in contents:
                if content not in stored:
                    while len(stored) >= 100:
                        victim = policy.victim(lambda key: True)
                        assert victim is not None
                        policy.removed(victim)
                        del stored[victim.split(b"@")[0]]
                    stored[content] = content + b"@%d" % number
                    policy.inserted(stored[content], content=content if told else None)
            policy.used([stored[content] for content in contents if content in stored])
            ghosts = {ghost.content: key for key, ghost in policy._ghosts.items()} if told else {}
            assert policy._ghost_of == ghosts
        return hits / asked

    assert share_found(told=False) < 0.1
    assert share_found(told=True) > 0.9


def test_counts_survive_their_own_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of a count grows with every prompt and is taken back before it overflows."""
    monkeypatch.setattr(returns, "_MEMORY", 0.9)  # so that it happens every 263 prompts
    policy = LeastExpected()
    assert serve(policy, 1500) > 0.9
    assert policy._watch.weight < 1e12


def test_ghosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "_GHOSTS", 300)
    for capacity, most in ((20, 160), (200, 300), (400, 400)):
        policy = LeastExpected()
        serve(policy, 400, capacity=capacity)
        assert most - 9 <= len(policy._ghosts) <= most


def test_what_comes_once_is_refused_where_the_store_is_full_of_what_returns() -> None:
    """100 chunks in turn fill the store; of 3,000 others between, none comes back. Soon those are not let in."""
    policy, stored = LeastExpected(), set[bytes]()
    refused = hits = 0
    for number in range(3000):
        for key in (b"again %d" % (number % 100), b"once %d" % number):
            policy.found([key] if key in stored else [])
            hits += number > 2000 and key in stored
            if key not in stored:
                if len(stored) >= 100:
                    victim = policy.victim(lambda key: True)
                    assert victim is not None
                    if not policy.admits(key, parent=None, nbytes=1, victim=victim):
                        refused += 1
                        assert victim in policy._blocks
                        assert key in policy._ghosts
                        continue
                    policy.removed(victim)
                    stored.remove(victim)
                policy.inserted(key)
                stored.add(key)
            policy.used([key])
    assert refused > 1500
    assert hits > 950


# Duels: refusing is right or wrong by who comes back first.


def fight(duel: expected.Duels, *, winner: str, rounds: int) -> None:
    for number in range(rounds):
        new, old = b"new %d" % number, b"old %d" % number
        duel.start(newcomer=new, holder=old)
        duel.end(old if winner == "holder" else new)


def test_refusing_pays_after_holders_came_first_and_not_before() -> None:
    duel = expected.Duels()
    assert not duel.refusing_pays
    fight(duel, winner="holder", rounds=100)
    assert duel.refusing_pays
    fight(duel, winner="newcomer", rounds=100)
    assert not duel.refusing_pays


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=200))
def test_every_open_duel_has_two_sides(calls: list[tuple[int, int, bool]]) -> None:
    duel = expected.Duels()
    for first, second, ends in calls:
        if ends:
            duel.end(bytes([first]))
            assert bytes([first]) not in duel._open
        else:
            duel.start(newcomer=bytes([first]), holder=bytes([second]))
        assert all(duel._open[other] == (key, -result) for key, (other, result) in duel._open.items())


def test_duels_are_bounded() -> None:
    duel = expected.Duels()
    for number in range(2000):
        duel.start(newcomer=b"n%d" % number, holder=b"h%d" % number)
    assert len(duel._open) == expected._MOST_IN_DUELS
