"""The simulated fleet: what is found, what is lost, what is the same twice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.fleet_load import Hot, Load, Request
from benchmarks.common.fleet_routers import expected_seconds, power_of_two, prefix_affinity, round_robin, shortest_queue
from benchmarks.common.fleet_sim import Fleet, Outage, Outcome, Simulation, Strategy
from benchmarks.common.replay import Replay
from benchmarks.common.stand_ins import make_traces
from benchmarks.common.traces import Trace, read
from benchmarks.runner import main
from kvboost.fleet.route import RouteCosts
from kvboost.store.eviction import LeafFirstLRU

COSTS = RouteCosts(compute=40e-6, move=7e-6, place=3e-6)
ROUTERS = {
    "round robin": round_robin,
    "power of two": power_of_two,
    "prefix affinity": prefix_affinity,
    "expected seconds": expected_seconds,
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_traces(tmp_path_factory.mktemp("traces"))


def load(trace: Trace, replicas: int, **more: Any) -> Load:
    return Load(
        trace,
        **{"replicas": replicas, "copies": 1, "limit": 10**9, "work": 0.8, "compute": COSTS.compute, **more},
    )


def simulate(trace: Trace, fleet: Fleet, strategy: Strategy, *, requests: Load | None = None, **more: Any) -> Outcome:
    requests = requests or load(trace, fleet.replicas)
    return Simulation(fleet, strategy, count=requests.count, **more).run(requests)


@pytest.mark.parametrize("name", ["conversation", "ragpulse"])
def test_one_replica_finds_what_the_replay_of_the_trace_finds(traces: Path, name: str) -> None:
    """The replay is held against the store in a test of its own; here everything around the store is."""
    trace = read(traces, name)
    unit = 512 if trace.chained else 1
    capacity = trace.footprint // 10
    fleet = Fleet(1, capacity * unit, COSTS, trace.chained, policy=LeafFirstLRU)
    out = simulate(trace, fleet, round_robin())
    assert out.local == Replay(capacity, policy=LeafFirstLRU(), chained=trace.chained).run(trace.prompts)
    assert out.tokens == trace.tokens


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", ["conversation", "ragpulse"])
def test_every_request_is_served_and_the_pool_is_the_bound(traces: Path, name: str, router: str) -> None:
    trace = read(traces, name)
    fleet = Fleet(4, 10**9, COSTS, trace.chained)
    out = simulate(trace, fleet, ROUTERS[router]())
    pool = simulate(trace, replace(fleet, pooled=True), shortest_queue())
    assert min(out.ttft) > 0.0
    assert out.tokens == pool.tokens == trace.tokens
    assert out.local <= pool.local
    assert len(out.router_seconds) == len(trace.prompts)
    again = simulate(trace, fleet, ROUTERS[router]())
    assert (again.local, again.ttft) == (out.local, out.ttft)


def test_content_finds_more_than_prefix_and_than_turns(traces: Path) -> None:
    trace = read(traces, "ragpulse")
    fleet = Fleet(4, trace.footprint // 4, COSTS, chained=False)
    turns, prefix, content = (
        simulate(trace, fleet, make()).local for make in (round_robin, prefix_affinity, expected_seconds)
    )
    assert content > 1.1 * max(turns, prefix)


def test_a_shared_tier_has_what_the_memory_lost(traces: Path) -> None:
    trace = read(traces, "conversation")
    costs = replace(COSTS, load=13e-6)
    fleet = Fleet(4, 512 * 20, costs, trace.chained)
    without = simulate(trace, fleet, expected_seconds())
    shared = simulate(trace, fleet, expected_seconds(shared=True), shared=True)
    assert without.shared == 0.0
    assert shared.shared > 0.0
    assert np.mean(shared.ttft) < np.mean(without.ttft)
    slow = replace(fleet, slow=(0.0, math.inf, 10.0))  # slower than computing: left alone
    assert simulate(trace, slow, expected_seconds(shared=True), shared=True).shared == 0.0


@pytest.mark.parametrize("router", ROUTERS)
def test_replicas_fail_and_nothing_is_lost(traces: Path, router: str) -> None:
    trace = read(traces, "conversation")
    requests = load(trace, 3, work=2.0)  # so that there is a queue whenever one fails
    fleet = Fleet(3, 10**9, COSTS, trace.chained)
    span = requests.seconds
    outages = [Outage(span * (0.2 + 0.2 * n), n, span / 10, drained=False) for n in range(3)]
    fine = simulate(trace, fleet, ROUTERS[router](), requests=requests)
    out = simulate(trace, fleet, ROUTERS[router](), requests=requests, outages=outages)
    assert out.retried > 0
    assert min(out.ttft) > 0.0
    # Not that it is slower or finds less: other draws follow, and fewer replicas share their memories better.
    assert len(out.ttft) == len(fine.ttft)
    assert out.tokens > fine.tokens, "what was retried is read again"
    assert out.local != fine.local, "memories were emptied"


def test_all_replicas_away_at_once_are_waited_for(traces: Path) -> None:
    trace = read(traces, "ragpulse")
    requests = load(trace, 2)
    outages = [Outage(requests.seconds / 2, n, 30.0, drained=True) for n in range(2)]
    fleet = Fleet(2, 10**9, COSTS, chained=False)
    out = simulate(trace, fleet, expected_seconds(), requests=requests, outages=outages)
    assert max(out.ttft) > 25.0
    assert min(out.ttft) > 0.0


def test_a_drained_replica_finishes_its_queue(traces: Path) -> None:
    trace = read(traces, "ragpulse")
    requests = load(trace, 3, work=3.0)
    outages = [Outage(requests.seconds * (0.2 + 0.2 * n), n, 0.1, drained=True) for n in range(3)]
    fleet = Fleet(3, 10**9, COSTS, chained=False)
    assert simulate(trace, fleet, power_of_two(), requests=requests, outages=outages).retried == 0


def test_a_hot_document_does_not_swallow_a_replica(traces: Path) -> None:
    trace = read(traces, "ragpulse")
    requests = load(trace, 4, copies=5, hot=Hot(1.0, 0.0, 1.0), work=12.0)
    out = simulate(trace, Fleet(4, 10**9, COSTS, chained=False), expected_seconds(), requests=requests)
    assert max(out.loads) < 1.3 * sum(out.loads) / 4


def test_nobody_waits_longer_for_a_hot_document_than_computing_takes(traces: Path) -> None:
    trace = read(traces, "ragpulse")
    requests = load(trace, 4, copies=5, hot=Hot(1.0, 0.0, 1.0), work=8.0)
    out = simulate(trace, Fleet(4, 10**9, COSTS, chained=False), expected_seconds(), requests=requests)
    longest = max(sum(prompt.tokens) for prompt in trace.prompts)
    assert max(out.ttft) < 1.05 * COSTS.compute * longest


@pytest.mark.parametrize("shared", [False, True])
def test_the_fewer_copies_the_more_different_text_is_held(traces: Path, shared: bool) -> None:
    """Turns, so that every router but the admission would keep a copy everywhere."""
    trace = read(traces, "ragpulse")
    costs = replace(COSTS, load=13e-6) if shared else COSTS
    keys = []
    for requests_per_copy in (None, 3.0, math.inf):
        fleet = Fleet(4, 10**9, costs, chained=False, requests_per_copy=requests_per_copy)
        simulation = Simulation(fleet, round_robin(), count=len(trace.prompts), shared=shared)
        simulation.run(load(trace, 4))
        keys.append(sum(replica.store.stats().chunks for replica in simulation.replicas.values()))
    assert keys[0] > keys[1] > keys[2] > 0


def test_queues_are_those_of_replicas_that_are_up(traces: Path) -> None:
    trace = read(traces, "ragpulse")
    seen: list[tuple[list[str], float]] = []

    def watching(simulation: Simulation, request: Request, queues: Mapping[str, float]) -> str:
        assert dict(queues.items()) == {name: queues[name] for name in queues}
        assert len(queues) == len(list(queues))
        seen.append((list(queues), max(queues.values())))
        return min(queues, key=lambda name: queues[name])

    requests = load(trace, 3)
    outage = Outage(requests.seconds / 3, 1, requests.seconds / 3, drained=False)
    simulate(trace, Fleet(3, 10**9, COSTS, chained=False), watching, requests=requests, outages=[outage])
    assert {tuple(names) for names, _ in seen} == {
        ("replica-0", "replica-1", "replica-2"),
        ("replica-0", "replica-2"),
    }
    assert max(seconds for _, seconds in seen) > 0.0


def test_copies_of_a_trace_share_nothing(traces: Path) -> None:
    trace = read(traces, "ragpulse")
    one, two = load(trace, 1), load(trace, 1, copies=2)
    keys = [{int(k) for request in own for k in request.prompt.content_keys} for own in (one, two)]
    assert two.count == 2 * one.count
    assert len(keys[1]) == 2 * len(keys[0])


@pytest.mark.parametrize("options", [[], ["--check"], ["--variants", "4"], ["--scenarios", "4"]])
def test_every_table_can_be_made(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "fleet_simulation", *options]) in (0, 1)  # made-up data need not reach the bar
    assert "expected seconds" in capsys.readouterr().out


def test_break_even_takes_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["break_even", "--kv-bytes", "46080", "--tokens-per-second", "1000"]) == 0
    assert "0.0461" in capsys.readouterr().out
