"""Where requests go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.core.costs import CostModel
from kvboost.core.keys import chunk_keys
from kvboost.errors import ConfigError
from kvboost.fleet.index import FleetIndex, short_keys
from kvboost.fleet.route import RouteCosts, RoutePrompt, Router

_NAMES = ("a", "b", "c")
_CHUNKS = 5
_TOKENS = np.array([30.0, 10.0, 40.0, 20.0, 5.0])
_COSTS = RouteCosts(compute=1.0, move=0.25, load=0.5, place=0.125)  # sums of these are exact
_PROMPT = RoutePrompt(np.arange(1, 6, dtype=np.uint64), np.arange(11, 16, dtype=np.uint64), _TOKENS, 112)
# A block has both keys; text behind other text has its content key only.
_HELD = st.frozensets(st.tuples(st.sampled_from(["prefix", "content"]), st.integers(0, _CHUNKS - 1)))
_FLEET = st.fixed_dictionaries(dict.fromkeys((*_NAMES, "shared"), _HELD))
_QUEUES = st.dictionaries(st.sampled_from([*_NAMES, "new"]), st.integers(0, 200).map(float), min_size=1)

Held = frozenset[tuple[str, int]]


def router(fleet: dict[str, Held], *, costs: RouteCosts = _COSTS, seed: int = 0) -> Router:
    index = FleetIndex()
    for name, held in fleet.items():
        keys = {11 + i for _, i in held} | {1 + i for kind, i in held if kind == "prefix"}
        index.replace(name, np.array(sorted(keys), dtype=np.uint64))
    return Router(index, costs, shared="shared", seed=seed)


def by_hand(own: Held, shared: Held, *, approximate: bool, costs: RouteCosts = _COSTS) -> float:
    """The same in plain words."""
    seconds, run = costs.compute * (112 - _TOKENS.sum()), True
    for i, tokens in enumerate(_TOKENS):
        here, there = ("prefix", i) in own, ("prefix", i) in shared
        run = run and (here or there)
        ways = [costs.compute]
        if run:
            ways.append(costs.place if here else costs.load)
        if approximate:
            if here or ("content", i) in own:
                ways.append(costs.move)
            if there or ("content", i) in shared:
                ways.append(costs.move + costs.load)
        seconds += tokens * min(ways)
    return float(seconds)


@settings(deadline=None)
@given(_FLEET, st.booleans(), st.sampled_from([0.125, 0.5, 2.0]), st.sampled_from([0.25, 0.75, 2.0]))
def test_expected_seconds_are_those_counted_by_hand(
    fleet: dict[str, Held], approximate: bool, load: float, move: float
) -> None:
    costs = replace(_COSTS, load=load, move=move)
    names = [*_NAMES, "new"]
    expected = router(fleet, costs=costs).expect(_PROMPT, replicas=names, approximate=approximate)
    for number, name in enumerate(names):
        own = fleet.get(name, frozenset())
        by_chunk = by_hand(own, fleet["shared"], approximate=approximate, costs=costs)
        assert expected.seconds[number] == by_chunk, name
    total = expected.exact + expected.moved + expected.loaded + expected.computed
    assert (total == 112).all()


@settings(deadline=None)
@given(_FLEET, _QUEUES, st.booleans())
def test_the_chosen_replica_is_there_and_none_is_better(
    fleet: dict[str, Held], queues: dict[str, float], approximate: bool
) -> None:
    choice = router(fleet).choose(_PROMPT, queues=queues, approximate=approximate)
    assert choice.replica in queues
    seconds = {n: by_hand(fleet.get(n, frozenset()), fleet["shared"], approximate=approximate) for n in queues}
    assert choice.seconds == seconds[choice.replica]
    assert choice.queue_seconds == queues[choice.replica]
    assert choice.known == (min(seconds.values()) < _COSTS.compute * 112)
    if choice.known:
        assert seconds[choice.replica] + queues[choice.replica] == min(seconds[n] + queues[n] for n in queues)
        # A hot document cannot swallow a replica: nobody waits longer for it than computing it elsewhere takes.
        assert queues[choice.replica] - min(queues.values()) <= _COSTS.compute * 112


@pytest.mark.parametrize(("wait", "goes_to"), [(1.25, "holder"), (1.5, "idle")])
def test_the_wait_has_a_bound_whatever_memory_turns_over(wait: float, goes_to: str) -> None:
    """Computing all of it elsewhere, and what that evicts: a quarter of it, counted twice at most."""
    everything = frozenset((kind, number) for kind in ("prefix", "content") for number in range(5))
    choosing = router({"holder": everything})
    for _ in range(10):
        choosing.choose(_PROMPT, queues={"idle": 0.0})
    others = dict.fromkeys((f"r{number}" for number in range(8)), 1e6)  # the idle one's turnover is ten times the mean
    choice = choosing.choose(_PROMPT, queues={"holder": wait * _COSTS.compute * 112, "idle": 0.0, **others})
    assert choice.replica == goes_to


@settings(deadline=None)
@given(_FLEET, _QUEUES, _HELD, st.integers(0, 100))
def test_a_chosen_replica_that_holds_more_or_waits_less_is_chosen_again(
    fleet: dict[str, Held], queues: dict[str, float], more: Held, less: int
) -> None:
    choice = router(fleet).choose(_PROMPT, queues=queues)
    name = choice.replica
    fleet = {**fleet, name: fleet.get(name, frozenset()) | more}
    better = {**queues, name: max(0.0, queues[name] - less)}
    seconds = router(fleet).expect(_PROMPT, replicas=list(better)).seconds
    total = dict(zip(better, seconds + np.array(list(better.values())), strict=True))
    if choice.known:
        assert total[name] == min(total.values())
    assert total[name] <= choice.seconds + choice.queue_seconds


@pytest.mark.parametrize("held", [frozenset(), frozenset({("prefix", 0), ("content", 3)})])
def test_equal_replicas_share_evenly(held: Held) -> None:
    names = [f"r{number}" for number in range(8)]
    choosing = router(dict.fromkeys(names, held))
    counts = Counter(choosing.choose(_PROMPT, queues=dict.fromkeys(names, 0.0)).replica for _ in range(4000))
    assert set(counts) == set(names)
    assert max(counts.values()) < 1.25 * min(counts.values())


def test_equally_good_ones_share_evenly_beside_a_worse_one() -> None:
    held = {"a": frozenset({("content", 2)}), "b": frozenset({("content", 2)}), "c": frozenset[tuple[str, int]]()}
    queues = dict.fromkeys("abc", 0.0)
    counts = Counter(router(held, seed=seed).choose(_PROMPT, queues=queues).replica for seed in range(1000))
    assert set(counts) == {"a", "b"}
    assert min(counts.values()) > 400


def test_nothing_known_takes_the_shorter_of_two_queues() -> None:
    names = [f"r{number}" for number in range(10)]
    choosing = router({})
    queues = {name: float(number) for number, name in enumerate(names)}
    counts = Counter(choosing.choose(_PROMPT, queues=queues).replica for _ in range(9000))
    # Of 45 pairs, the n-th shortest is the shorter one in 9 - n.
    for number, name in enumerate(names):
        assert counts[name] == pytest.approx(9000 * (9 - number) / 45, abs=150)
    assert not choosing.choose(_PROMPT, queues=queues).known


def test_what_all_hold_goes_to_the_shortest_queue() -> None:
    """As the system prompt that every request begins with."""
    names = [f"r{number}" for number in range(10)]
    held = dict.fromkeys(names, frozenset({("prefix", 0)}))
    queues = {name: float(number) for number, name in enumerate(names)}
    assert {router(held, seed=seed).choose(_PROMPT, queues=queues).replica for seed in range(50)} == {"r0"}


def test_a_fleet_that_is_not_busy_uses_the_memory_of_all() -> None:
    """Every prompt begins alike, so whoever has had one holds more of the next than the others do."""
    choosing = router({"a": frozenset({("prefix", 0)})})
    queues = dict.fromkeys("abc", 0.0)
    counts, tokens = Counter[str](), np.full(4, 25)
    for number in range(120):
        document = np.arange(4, dtype=np.uint64) + np.uint64(100 + 10 * number)
        prefix, content = document + np.uint64(10**6), document.copy()
        prefix[0], content[0] = 1, 11  # the common beginning
        choice = choosing.choose(RoutePrompt(prefix, content, tokens, prompt_tokens=100), queues=queues)
        keys = np.concatenate((prefix, content))
        choosing.index.add(choice.replica, keys)
        counts[choice.replica] += 1
    assert min(counts[name] for name in "abc") > 30


def test_a_hot_document_spreads_over_the_replicas() -> None:
    """Each request adds to the queue of its replica, and leaves its text there."""
    choosing = router({"a": frozenset(("prefix", i) for i in range(_CHUNKS))})
    queues = dict.fromkeys(["a", "b", "c", "d"], 0.0)
    everything = np.concatenate((_PROMPT.prefix_keys, _PROMPT.content_keys))
    counts = Counter[str]()
    for _ in range(400):
        choice = choosing.choose(_PROMPT, queues=queues)
        queues[choice.replica] += choice.seconds
        choosing.index.replace(choice.replica, everything)
        counts[choice.replica] += 1
    assert min(counts.values()) > 80


def test_a_prompt_without_chunks_goes_anywhere() -> None:
    short = RoutePrompt.of(b"root", np.arange(7, dtype=np.uint32), [])
    choice = router({"a": frozenset({("prefix", 0)})}).choose(short, queues={"a": 0.0, "b": 1.0})
    assert (choice.replica, choice.seconds, choice.known) == ("a", 7.0, False)


def test_a_prompt_of_chunks_is_found_under_their_keys() -> None:
    tokens = np.arange(100, dtype=np.uint32)
    prompt = RoutePrompt.of(b"root", tokens, [20, 50, 90])
    chunks = chunk_keys(b"root", tokens, [20, 50, 90])
    assert prompt.prefix_keys.tolist() == short_keys([chunk.prefix_key for chunk in chunks]).tolist()
    assert prompt.content_keys.tolist() == short_keys([chunk.content_key for chunk in chunks]).tolist()
    assert prompt.chunk_tokens.tolist() == [20.0, 30.0, 40.0]
    choosing = router({})
    choosing.index.replace("a", prompt.prefix_keys[:2])
    choosing.index.replace("b", prompt.content_keys[1:])
    expected = choosing.expect(prompt, replicas=["a", "b"])
    assert expected.exact.tolist() == [50.0, 0.0]
    assert expected.moved.tolist() == [0.0, 70.0]


def test_no_replica_is_an_error() -> None:
    with pytest.raises(ConfigError, match="wait until one is ready"):
        router({}).choose(_PROMPT, queues={})


def test_costs_that_make_no_sense_are_refused() -> None:
    for wrong in ({"compute": 0.0}, {"place": 1.0}, {"place": -1.0}):
        with pytest.raises(ConfigError, match="the cheapest"):
            replace(_COSTS, **wrong)


def test_costs_of_several_replicas_are_the_typical_ones() -> None:
    told = [RouteCosts(1.0, 0.1), RouteCosts(2.0, 0.3, load=0.5), RouteCosts(9.0, 0.2, load=0.7)]
    assert RouteCosts.median(told) == RouteCosts(2.0, 0.2, load=0.5)
    assert RouteCosts.median(told[:1]) == told[0]


def test_costs_come_from_what_an_engine_has_learnt() -> None:
    model = CostModel()
    for tokens in (100, 1000):
        model.observe_prefill(forwards=1, tokens=tokens, seconds=0.001 * tokens + 0.02)
    model.observe_reposition(tokens=100, seconds=0.005)
    costs = RouteCosts.of(model, recompute_ratio=0.2, load=0.0001)
    assert costs.compute == pytest.approx(0.001, rel=0.02)
    assert costs.move == pytest.approx(0.00005 + 0.2 * 1.25 * 0.001, rel=0.02)
    assert costs.load == 0.0001
