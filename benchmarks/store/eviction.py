"""Eviction: what each policy finds of four traces, by capacity, beside Belady's MIN, and what a policy call takes.

The policies are driven by :mod:`benchmarks.common.replay` as the live store drives its own, which are among them.
Invariant: one setting for all traces and capacities.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.measure import positive
from benchmarks.common.replay import Replay, oracle_hit_tokens
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.common.traces import NAMES, Trace, read
from benchmarks.store.policies import AdaptiveReplacement, GreedyDualSizeFrequency, SmallMainGhostFIFO
from kvboost.bench.report import Machine, Table, describe_machine
from kvboost.extend import EvictionPolicy
from kvboost.store.eviction import LeafFirstLRU, LeastExpected

QUICK = {"blocks": [30, 100], "percent": [10], "keys": 2000}

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "LRU": LeafFirstLRU,
    "ARC": AdaptiveReplacement,
    "S3-FIFO": SmallMainGhostFIFO,
    "GDSF": GreedyDualSizeFrequency,
    "LeastExpected": LeastExpected,
}
_RIVALS = ("LRU", "ARC", "S3-FIFO")
_OURS = "LeastExpected"
_NO_DISTANCE = 0.05  # points: where the best rival finds what MIN finds, there is nothing to close
_CHAIN = 10
_ROUNDS = 20_000
_WEIGHED = 5_000  # prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="Mooncake's traces, agentic_sessions.jsonl.gz, and RAGPulse in ragpulse",
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--requests", type=positive, help="how many requests of each, from the first on (default all)")
    parser.add_argument(
        "--blocks", type=positive, nargs="+", default=[1000, 3000, 10000, 30000], help="capacities in 512-token blocks"
    )
    parser.add_argument(
        "--percent", type=positive, nargs="+", default=[1, 3, 10], help="capacities for ragpulse, of its footprint"
    )
    parser.add_argument(
        "--keys", type=int, default=100_000, help="stored keys while calls are timed; 0 leaves it out (default 1e5)"
    )


def run(args: argparse.Namespace) -> Report:
    """Replay every trace at every capacity under every policy."""
    if args.traces is None:
        raise BenchError("this benchmark needs traces; give their folder with --traces FOLDER")
    report = Report("eviction")
    machine = describe_machine()
    points: list[dict[str, Any]] = []
    for name in args.only:
        trace = read(args.traces.expanduser(), name, limit=args.requests)
        capacities = args.blocks if trace.chained else [trace.footprint * percent // 100 for percent in args.percent]
        labels = [f"{c:,} blocks" for c in args.blocks] if trace.chained else [f"{p} %" for p in args.percent]
        here = [_point(trace, label, capacity=capacity) for label, capacity in zip(labels, capacities, strict=True)]
        report.tables.append(_table(trace, here, machine))
        points += here
    report.tables.append(_summary(points, machine))
    report.raw["points"] = points
    if args.keys > 0:
        report.raw["calls"] = {name: time_calls(make, keys=args.keys) for name, make in POLICIES.items()}
        report.tables.append(_call_table(report.raw["calls"], keys=args.keys, machine=machine))
    return report


def _point(trace: Trace, label: str, *, capacity: int) -> dict[str, Any]:
    """The hit rates at one capacity, in per cent of the trace's tokens."""
    rates: dict[str, float] = {}
    progress = Progress(f"{trace.name} at {label}: policies", len(POLICIES) + 1)
    for name, make in POLICIES.items():
        tokens = Replay(capacity, policy=make(), chained=trace.chained).run(trace.prompts)
        rates[name] = 100 * tokens / trace.tokens
        progress.step()
    rates["MIN"] = 100 * oracle_hit_tokens(trace, capacity) / trace.tokens
    best = max(rates[name] for name in _RIVALS)
    distance = rates["MIN"] - best
    return {
        "trace": trace.name,
        "capacity": label,
        "rates": rates,
        "ahead": rates[_OURS] - best,
        "closed": 100 * (rates[_OURS] - best) / distance if distance > _NO_DISTANCE else None,
    }


def _table(trace: Trace, points: Sequence[dict[str, Any]], machine: Machine) -> Table:
    where = "the leading run of stored blocks" if trace.chained else "every stored chunk, wherever it stands"
    table = Table(
        f"Eviction, {trace.name}: tokens found, % of all",
        machine,
        ["capacity", *POLICIES, "MIN", "against the best of three", "closed of its distance to MIN"],
    )
    for point in points:
        closed = "-" if point["closed"] is None else f"{point['closed']:.0f} %"
        rates = [f"{rate:.1f}" for rate in point["rates"].values()]
        table.add(point["capacity"], *rates, f"{point['ahead']:+.1f}", closed)
    table.notes.append(
        f"{len(trace.prompts):,} requests, {trace.tokens:,} tokens, footprint {trace.footprint:,} "
        f"{'blocks' if trace.chained else 'tokens'}. Found: {where}. The three: {', '.join(_RIVALS)}."
    )
    return table


def _summary(points: Sequence[dict[str, Any]], machine: Machine) -> Table:
    closed = [point["closed"] for point in points if point["closed"] is not None]
    worst = min(points, key=lambda point: float(point["ahead"]))
    table = Table(f"Eviction, {_OURS} over all points", machine, ["what", "bar", "measured"])
    table.add(
        "worst point against the best of three",
        "-0.5",
        f"{worst['ahead']:+.2f} ({worst['trace']}, {worst['capacity']})",
    )
    mean = f"{sum(closed) / len(closed):.1f} %" if closed else "-"
    table.add("distance from the best of three to MIN that is closed, mean", "25 %", f"{mean} of {len(closed)} points")
    return table


def time_calls(make: Callable[[], EvictionPolicy], *, keys: int) -> dict[str, float]:
    """Nanoseconds per key of the calls a store makes, with ``keys`` stored in prompts of ten; bytes per key."""
    stored = max(1, keys // _CHAIN)
    chains = [
        [(number * _CHAIN + place).to_bytes(32, "big") for place in range(_CHAIN)] for number in range(stored + _ROUNDS)
    ]
    nbytes = _bytes_per_key(make, chains[: min(stored, _WEIGHED)])
    policy = make()
    leaves = {chain[-1] for chain in chains[:stored]}  # of what is stored, what the store would let go
    before = {key: parent for chain in chains for parent, key in itertools.pairwise(chain)}
    for chain in chains[:stored]:
        _insert(policy, chain)
    draw = random.Random(0)
    lookups = [chains[draw.randrange(stored)] for _ in range(_ROUNDS)]
    start = time.process_time_ns()
    for chain in lookups:
        policy.found(chain)
        policy.used(chain)
    looked_up = time.process_time_ns()
    for chain in chains[stored:]:
        policy.found(())
        for _ in range(_CHAIN):
            victim = policy.victim(leaves.__contains__)
            if victim is None:
                raise BenchError("the policy offers nothing although leaves are stored: a defect of the policy")
            policy.removed(victim)
            leaves.discard(victim)
            if victim in before:
                leaves.add(before[victim])
        _insert(policy, chain)
        leaves.add(chain[-1])
    replaced = time.process_time_ns()
    per = _ROUNDS * _CHAIN
    return {"hit_ns": (looked_up - start) / per, "replace_ns": (replaced - looked_up) / per, "bytes": nbytes}


def _bytes_per_key(make: Callable[[], EvictionPolicy], chains: Sequence[Sequence[bytes]]) -> float:
    gc.collect()
    tracemalloc.start()
    policy = make()
    for chain in chains:
        _insert(policy, chain)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return nbytes / sum(len(chain) for chain in chains)


def _insert(policy: EvictionPolicy, chain: Sequence[bytes]) -> None:
    policy.found(())
    for parent, key in zip([None, *chain], chain, strict=False):
        policy.inserted(key, parent=parent, nbytes=1 << 20)
    policy.used(chain)


def _call_table(calls: dict[str, dict[str, float]], *, keys: int, machine: Machine) -> Table:
    table = Table(
        f"Eviction, what a policy takes with {keys:,} keys stored",
        machine,
        ["policy", "a hit, ns per key", "an eviction and an insertion, ns per key", "bytes per key"],
    )
    for name, measured in calls.items():
        table.add(name, f"{measured['hit_ns']:.0f}", f"{measured['replace_ns']:.0f}", f"{measured['bytes']:.0f}")
    table.notes.append(
        f"Prompts of {_CHAIN} chunks; {_ROUNDS:,} prompts found again, then {_ROUNDS:,} new ones, each of which takes "
        f"the place of as many chunks. CPU time of one thread. Bytes: with {_WEIGHED * _CHAIN:,} keys, which are "
        "not counted, and no ghosts."
    )
    return table
