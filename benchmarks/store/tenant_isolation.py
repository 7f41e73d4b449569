"""Tenant isolation: nothing of another tenant's text is found, and the time a request takes tells nothing either.

One engine with a tiny model, and below its memory a directory and a redis-server of its own. A tenant prefills texts.
Then five others ask, in random order, for texts that the first one has and for texts that nobody has, by the same call;
nothing may be found. The two samples of latencies are compared by their AUC, the chance that one of the first took less
time than one of the second: 0.5 if they cannot be told apart, here between 0.45 and 0.55. As a control the first tenant
asks for its own texts and for new ones, with everything still in memory and after a restart, when it is in the tiers:
that must show (AUC above 0.9). A tenant that asked for a text has it afterwards, so none asks for one twice.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measure import positive
from benchmarks.common.report import Report
from benchmarks.common.servers import redis_server
from kvboost.engine import KVBoost
from tests.helpers.models import VOCAB, tiny_model

QUICK = {"probes": 100, "controls": 40, "no_redis": True}
_TOKENS = 320
_CHUNK = 64
_OTHERS = 5
_BAND = (0.45, 0.55)
_CONTROL = 0.9
_MIN_PROBES = 1000


def text(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (_TOKENS,), generator=generator).tolist()


def auc(higher: list[float], lower: list[float]) -> float:
    """The chance that one of ``higher`` is above one of ``lower``; a tie counts half."""
    ranked = sorted([(value, 1) for value in higher] + [(value, 0) for value in lower])
    ranks, at = 0.0, 0
    while at < len(ranked):
        end = at
        while end < len(ranked) and ranked[end][0] == ranked[at][0]:
            end += 1
        ranks += (at + 1 + end) / 2 * sum(kind for _, kind in ranked[at:end])
        at = end
    count = len(higher)
    return (ranks - count * (count + 1) / 2) / (count * len(lower))


Asked = tuple[KVBoost, int, list[int]]
"""The tenant, the kind of the text (0: somebody has it, 1: nobody), and the text."""


def probe(order: list[Asked], seed: int) -> tuple[list[list[float]], int]:
    """Ask all of this in random order: the seconds each took, by kind, and how many tokens were found."""
    random.Random(seed).shuffle(order)
    took: list[list[float]] = [[], []]
    found = 0
    for engine, kind, tokens in order:
        begin = time.perf_counter()
        result = engine.prefill(tokens)
        took[kind].append(time.perf_counter() - begin)
        found += result.reuse.cached_tokens
    return took, found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--probes", type=positive, default=10_000, help="default: 10000")
    parser.add_argument("--controls", type=positive, default=2_000, help="default: 2000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-redis", action="store_true")


def run(args: argparse.Namespace) -> Report:
    """Probes and controls, with everything in memory and after a restart."""
    torch.set_num_threads(1)
    model = tiny_model("llama")
    half, control = args.probes // 2, args.controls // 2
    seeds = iter(range(args.seed * 10**6, (args.seed + 1) * 10**6))

    def texts(count: int) -> list[list[int]]:
        return [text(next(seeds)) for _ in range(count)]

    def asked(by: KVBoost, known: list[list[int]], new: list[list[int]]) -> list[Asked]:
        return [(by, 0, tokens) for tokens in known] + [(by, 1, tokens) for tokens in new]

    victims = texts(max(half // _OTHERS, control))
    found: list[tuple[str, list[list[float]], int, bool]] = []
    with tempfile.TemporaryDirectory() as folder, nullcontext() if args.no_redis else redis_server() as server:
        settings: dict[str, Any] = {
            "chunk_size": _CHUNK,
            "quality": "high",
            "cache_bytes": "4GiB",
            "disk_cache_dir": Path(folder) / "cache",
            "remote_url": server.url if server else None,
        }
        with KVBoost(model, None, **settings) as engine:
            one = engine.for_tenant("one")
            for tokens in victims:
                one.prefill(tokens)
            engine.flush()
            others = [engine.for_tenant(f"other {number}") for number in range(_OTHERS)]
            each = half // _OTHERS
            order = [item for by in others for item in asked(by, victims[:each], texts(each))]
            found.append(("another tenant's text", *probe(order, args.seed), False))
            engine.flush()  # or what still waits to be written would be noise
            order = asked(one, victims[:control], texts(control))
            found.append(("its own text, in memory (control)", *probe(order, args.seed), True))
        with KVBoost(model, None, **settings) as engine:
            order = asked(engine.for_tenant("another"), victims[:control], texts(control))
            found.append(("another tenant's text, after a restart", *probe(order, args.seed), False))
            order = asked(engine.for_tenant("one"), victims[:control], texts(control))
            found.append(("its own text, after a restart (control)", *probe(order, args.seed), True))
    report = Report("tenant_isolation")
    columns = ["asked for", "probes", "tokens found", "median, ms", "text nobody has, ms", "AUC"]
    table = report.table("One tenant asks for another's text", columns, dtype="float32", model="tiny llama")
    for name, took, tokens_found, is_control in found:
        value = auc(took[1], took[0])
        known, new = (statistics.median(each) * 1000 for each in took)
        times = (f"{known:.2f}", f"{new:.2f}", f"{value:.3f}")
        table.add(name, f"{sum(map(len, took)):,}", f"{tokens_found:,}", *times)
        report.failed |= tokens_found == 0 if is_control else tokens_found > 0
        if args.probes >= _MIN_PROBES:  # of fewer, the AUC is chance
            report.failed |= value <= _CONTROL if is_control else not _BAND[0] <= value <= _BAND[1]
    return report
