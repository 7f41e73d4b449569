"""Fleet simulation: what routers find in memory and how soon the first token comes, from one to a thousand replicas.

Runs the real router, store and eviction in simulated time (benchmarks/common/fleet_sim.py) with stated costs per token:
by default an 8B model with grouped heads on one large GPU, its KV in host memory, and a shared tier at 10 GB/s to each
replica. ``--check`` repeats an earlier count instead: no time, no shared tier, least recently used evicted, load
kept within 10 %. ``--variants`` and ``--scenarios`` run RAGPulse, or the traces of ``--only``, at one size.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.fleet_load import Hot, Load
from benchmarks.common.fleet_routers import (
    expected_seconds,
    power_of_two,
    prefix_affinity,
    round_robin,
    shortest_queue,
)
from benchmarks.common.fleet_sim import Fleet, Outage, Outcome, Simulation, Strategy
from benchmarks.common.measure import positive
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.common.traces import BLOCK, NAMES, Trace, read
from kvboost.fleet.route import RouteCosts
from kvboost.store.eviction import LeafFirstLRU

QUICK = {"only": ["ragpulse", "conversation"], "replicas": [1, 4], "least": 60, "per_replica": 10, "percent": 10.0}
_ROUTERS: dict[str, Callable[[bool], Strategy]] = {
    "round robin": lambda shared: round_robin(),
    "power of two": lambda shared: power_of_two(),
    "prefix affinity": lambda shared: prefix_affinity(),
    "expected seconds": lambda shared: expected_seconds(shared=shared),
    "pooled": lambda shared: shortest_queue(),
}
_OURS, _PEER = "expected seconds", "prefix affinity"
_BAR = 1.25
_COLUMNS = ["local %", "shared %", "TTFT p50 s", "p99 s", "loaded GB", "index MB", "router ms", "busiest / mean"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="the traces of `eviction`")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--replicas", type=positive, nargs="+", default=[1, 3, 8, 32, 100, 1000])
    parser.add_argument("--percent", type=float, default=1.0, help="a replica's memory, of a trace's footprint")
    parser.add_argument("--least", type=positive, default=3000, help="requests of a run (default 3000)")
    parser.add_argument("--per-replica", type=positive, default=30, help="requests, where that is more (default 30)")
    parser.add_argument("--work", type=float, default=0.8, help="busy share of the fleet, were all computed (0.8)")
    parser.add_argument("--compute-us", type=float, default=40.0, help="prefill of a token (default 40)")
    parser.add_argument("--move-us", type=float, default=7.0, help="use of a token behind other text (default 7)")
    parser.add_argument("--place-us", type=float, default=3.0, help="use of a token in place (default 3)")
    parser.add_argument("--kv-bytes", type=positive, default=131_072, help="of a token (default 131072)")
    parser.add_argument("--shared-gbps", type=float, default=10.0, help="GB/s from the shared tier; 0 for none")
    parser.add_argument("--check", action="store_true", help="an earlier count, at 3, 8 and 32 replicas")
    parser.add_argument("--variants", type=positive, metavar="REPLICAS", help="what closes the distance to the pool")
    parser.add_argument("--scenarios", type=positive, metavar="REPLICAS", help="failures, updates, hot documents")


def run(args: argparse.Namespace) -> Report:
    """Every router at every size, or one of the other tables."""
    if args.traces is None:
        raise BenchError("this benchmark needs traces; give their folder with --traces FOLDER")
    report = Report("fleet_simulation")
    if args.check:
        _check(report, _read(args, "ragpulse"), args)
    elif args.variants or args.scenarios:
        for name in args.only or ["ragpulse"]:
            (_variants if args.variants else _scenarios)(report, _read(args, name), args)
    else:
        for name in args.only or NAMES:
            _sizes(report, _read(args, name), args)
    return report


def _read(args: argparse.Namespace, name: str) -> Trace:
    return read(args.traces.expanduser(), name)


def _costs(args: argparse.Namespace) -> RouteCosts:
    load = args.kv_bytes / (args.shared_gbps * 1e9) if args.shared_gbps else math.inf
    return RouteCosts(args.compute_us * 1e-6, args.move_us * 1e-6, load, args.place_us * 1e-6)


def _fleet(trace: Trace, replicas: int, args: argparse.Namespace, **more: Any) -> Fleet:
    footprint = trace.footprint * (BLOCK if trace.chained else 1)
    capacity = max(int(footprint * args.percent / 100), BLOCK)
    return Fleet(replicas, capacity, _costs(args), trace.chained, **more)


def _load(trace: Trace, fleet: Fleet, args: argparse.Namespace, *, count: int | None = None, **more: Any) -> Load:
    count = count or max(args.least, args.per_replica * fleet.replicas)
    return Load(
        trace,
        replicas=fleet.replicas,
        copies=math.ceil(count / len(trace.prompts)),
        limit=count,
        compute=fleet.costs.compute,
        **{"work": args.work, **more},
    )


def _simulate(fleet: Fleet, load: Load, strategy: Strategy, **more: Any) -> Outcome:
    shared = more.pop("shared", math.isfinite(fleet.costs.load))
    return Simulation(fleet, strategy, count=load.count, shared=shared, **more).run(load)


def _cells(out: Outcome, args: argparse.Namespace) -> list[str]:
    p50, p99 = np.percentile(out.ttft, (50, 99))
    return [
        f"{100 * out.local / out.tokens:.1f}",
        f"{100 * out.shared / out.tokens:.1f}",
        f"{p50:.3f}",
        f"{p99:.3f}",
        f"{out.shared * args.kv_bytes / 1e9:,.0f}",
        f"{out.index_bytes / 1e6:.1f}",
        f"{1000 * float(np.median(out.router_seconds)):.2f}",
        f"{max(out.loads) * len(out.loads) / sum(out.loads):.2f}",
    ]


def _note(out: Outcome) -> dict[str, Any]:
    p50, p99 = (float(p) for p in np.percentile(out.ttft, (50, 99)))
    return {
        "local": out.local / out.tokens,
        "shared": out.shared / out.tokens,
        "p50": p50,
        "p99": p99,
        "index_bytes": out.index_bytes,
        "index_keys": out.index_keys,
        "retried": out.retried,
    }


def _sizes(report: Report, trace: Trace, args: argparse.Namespace) -> None:
    table = report.table(f"Fleet, {trace.name}", ["replicas", "router", *_COLUMNS])
    where = "the leading run of chunks" if trace.chained else "chunks wherever they stand"
    counts = []
    for replicas in args.replicas:
        progress = Progress(f"{trace.name}, {replicas} replicas: routers", len(_ROUTERS))
        for name, make in _ROUTERS.items():
            fleet = _fleet(trace, replicas, args, pooled=name == "pooled")
            load = _load(trace, fleet, args)
            out = _simulate(fleet, load, make(args.shared_gbps > 0))
            table.add(replicas, name, *_cells(out, args))
            report.raw[f"{trace.name} {replicas} {name}"] = _note(out)
            progress.step()
        counts.append(f"{replicas}: {load.count:,}")
    table.notes += [_settings(trace, args), f"Found: {where}. Requests by replicas: {'; '.join(counts)}."]


def _settings(trace: Trace, args: argparse.Namespace) -> str:
    return (
        f"Each replica's memory: {args.percent:g} % of the trace's footprint. Per token: {args.compute_us:g} us "
        f"computed, {args.move_us:g} moved, {args.place_us:g} in place, {args.kv_bytes:,} bytes; shared tier "
        f"{args.shared_gbps:g} GB/s to each replica, no limit. Poisson arrivals in the trace's order, copies of it "
        "(with texts of their own) side by side where it is too short; computing everything would keep the fleet "
        f"{100 * args.work:.0f} % busy."
    )


def _check(report: Report, trace: Trace, args: argparse.Namespace) -> None:
    """As in an earlier count, whose numbers stand beside ours."""
    theirs = {
        3: {"round robin": 42.6, _PEER: 46.7, _OURS: 52.8, "pooled": 55.6},
        8: {"round robin": 40.8, _PEER: 46.0, _OURS: 57.8, "pooled": 63.3},
        32: {"round robin": 38.7, _PEER: 43.4, _OURS: 56.4, "pooled": 70.5},
    }
    table = report.table(
        "Fleet, RAGPulse, tokens found in the chosen replica's memory, %", ["replicas", *theirs[3], "ours / prefix"]
    )
    for replicas, expected in theirs.items():
        found: dict[str, float] = {}
        for name in expected:
            fleet = _fleet(trace, replicas, args, pooled=name == "pooled", balance=0.1, policy=LeafFirstLRU)
            fleet = replace(fleet, costs=replace(fleet.costs, load=math.inf))
            load = _load(trace, fleet, args, count=len(trace.prompts), work=0.001)
            out = _simulate(fleet, load, _ROUTERS[name](False), shared=False)
            found[name] = 100 * out.local / out.tokens
        ratio = found[_OURS] / found[_PEER]
        table.add(replicas, *(f"{found[n]:.1f} ({expected[n]})" for n in expected), f"{ratio:.2f}")
        report.raw[str(replicas)] = found
        report.failed |= replicas == 32 and ratio < _BAR
    table.notes.append(
        f"In brackets: an earlier count. All {len(trace.prompts):,} requests; least recently used evicted, "
        f"memory {args.percent:g} % of the footprint each, tokens sent to a replica at most 10 % above the mean."
    )


def _variants(report: Report, trace: Trace, args: argparse.Namespace) -> None:
    """Between our router and the pool."""
    replicas = args.variants
    table = report.table(f"Fleet, {trace.name}, {replicas} replicas: towards the pool", ["what", *_COLUMNS])
    plain = _fleet(trace, replicas, args)
    alone = replace(plain, costs=replace(plain.costs, load=math.inf))
    # Copies are counted in the index, where what was just sent would count as one: so it counts once it is told.
    ways: dict[str, tuple[Fleet, Strategy]] = {
        "prefix affinity, no shared tier": (alone, prefix_affinity()),
        "expected seconds, no shared tier": (alone, expected_seconds()),
        "and least recently used evicted": (replace(alone, policy=LeafFirstLRU), expected_seconds()),
        "what was sent counts once it is told": (alone, expected_seconds(at_once=False)),
        "and no second copy is kept": (replace(alone, requests_per_copy=math.inf), expected_seconds(at_once=False)),
        "and a copy for every 4 requests": (replace(alone, requests_per_copy=4.0), expected_seconds(at_once=False)),
        "and a copy for every 16 requests": (replace(alone, requests_per_copy=16.0), expected_seconds(at_once=False)),
        "expected seconds, shared tier": (plain, expected_seconds(shared=True)),
        "pooled, no shared tier": (replace(alone, pooled=True), shortest_queue()),
    }
    for name, (fleet, strategy) in ways.items():
        out = _simulate(fleet, _load(trace, fleet, args), strategy)
        table.add(name, *_cells(out, args))
        report.raw[f"{trace.name} {name}"] = _note(out)
    table.notes.append(_settings(trace, args))


def _scenarios(report: Report, trace: Trace, args: argparse.Namespace) -> None:
    """What goes wrong, under prefix affinity and under ours."""
    replicas = args.scenarios
    columns = ["scenario", "router", *_COLUMNS[:5], "sent again", "busiest / mean"]
    table = report.table(f"Fleet, {trace.name}, {replicas} replicas: scenarios", columns)
    fleet = _fleet(trace, replicas, args)
    seconds = _load(trace, fleet, args).seconds
    down = seconds / 20
    some = range(0, replicas, 8)
    fails = [Outage(seconds * (0.3 + 0.4 * n / replicas), n, down, drained=False) for n in some]
    rolls = [Outage(seconds * (0.2 + 0.6 * n / replicas), n, down / 4, drained=True) for n in range(replicas)]
    slow = replace(fleet, slow=(seconds / 3, 2 * seconds / 3, 10.0))
    scenarios: dict[str, tuple[Fleet, dict[str, Any], list[Outage], bool]] = {
        "nothing": (fleet, {}, [], True),
        f"{len(fails)} replicas fail, one after the other": (fleet, {}, fails, True),
        "rolling update, same weights": (fleet, {}, rolls, True),
        "rolling update, the shared tier is of no use": (fleet, {}, rolls, False),
        "30 % ask about one document, a third of the time": (fleet, {"hot": Hot(0.3)}, [], True),
        "shared tier 10x slower, a third of the time": (slow, {}, [], True),
        "no shared tier": (fleet, {}, [], False),
    }
    for name, (own, more, outages, shared) in scenarios.items():
        own = own if shared else replace(own, costs=replace(own.costs, load=math.inf))
        for router in (_PEER, _OURS):
            out = _simulate(own, _load(trace, own, args, **more), _ROUTERS[router](shared), outages=outages)
            cells = _cells(out, args)
            table.add(name, router, *cells[:5], out.retried, cells[-1])
            report.raw[f"{trace.name} {name} {router}"] = _note(out)
    table.notes += [
        _settings(trace, args),
        f"The requests arrive within {seconds:.0f} s. A failed replica is away for {down:.0f} s, an updated one for "
        f"{down / 4:.0f} s after its queue is empty; both come back with empty memory.",
    ]
