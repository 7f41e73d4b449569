"""Shared tiers: how fast blocks go to Redis, a Redis Cluster and a Mooncake Store and back, as ratios to bare clients.

Starts servers of its own on this machine: a Redis, a cluster of three nodes, a Mooncake Store over TCP (if its package
is installed) with its ledger in the Redis. The bare client puts and gets one ready value per block and does nothing
else; the tier makes and checks the record and keeps the ledger. Rounds are strictly in turn. Servers and clients share
the cores, so only the ratios say anything, and those of a network of one's own say more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.common.measure import alternate, positive
from benchmarks.common.servers import mooncake_store, redis_cluster, redis_server
from benchmarks.store.redis_tier import make_block, namespace, open_tier
from kvboost.bench.report import BenchError, Report, Spread, ratios
from kvboost.store import RedisTier
from kvboost.store.record.format import RecordFormat
from kvboost.types import KVBlock, PutOutcome

KINDS = ("redis", "cluster", "mooncake")
QUICK = {"repeat": 2, "blocks": 3, "only": ["redis", "cluster"]}
_PATIENT_S = 10.0
_OURS, _BARE = "the tier", "the bare client"
_MOONCAKE_BUFFER = 2**27


@dataclass(frozen=True)
class _Bare:
    """A client as it comes."""

    put: Callable[[str, bytes], object]
    """True if it was written."""
    get: Callable[[str], Any]
    clear: Callable[[Sequence[str]], object]
    """Remove values, before the clock runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--repeat", type=positive, default=15, help="rounds (default 15)")
    parser.add_argument("--blocks", type=positive, default=12, help="blocks per round (default 12)")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of a block (default 1)")


def run(args: argparse.Namespace) -> Report:
    """Put and get of every kind."""
    report = Report("shared_tiers")
    table = report.table(
        f"Shared tiers, blocks of {args.megabytes:g} MB on this machine, median [lowest highest]",
        ["", "put, MB/s", "bare put, MB/s", "put, tier / bare", "get, MB/s", "bare get, MB/s", "get, tier / bare"],
    )
    blocks = [make_block(number, int(args.megabytes * 2**20) - 2**15) for number in range(args.blocks)]
    for kind in args.only:
        with _opened(kind) as (tier, bare):
            cells: list[str] = []
            for what, contestants in _contestants(tier, bare, blocks).items():
                samples = alternate(contestants, repeat=args.repeat, warmups=2, label=f"{kind}: {what}")
                kilobytes = sum(block.nbytes for block in blocks) / 1e3  # bytes per ms are kB per s
                rates = {name: [kilobytes / took for took in times] for name, times in samples.items()}
                cells += [Spread.of(rates[name]).text(0) for name in (_OURS, _BARE)]
                cells.append(Spread.of(ratios(rates[_OURS], rates[_BARE])).text(2))
                report.raw[f"{kind} {what}"] = rates
            table.add(kind, *cells)
    table.notes.append(f"{args.blocks} blocks per round, {args.repeat} rounds, in turn. Above 1 the tier is faster.")
    return report


@contextmanager
def _opened(kind: str) -> Iterator[tuple[RedisTier, _Bare]]:
    """A tier of this kind and a bare client of the same servers."""
    import redis

    with ExitStack() as stack:
        if kind == "cluster":
            cluster = stack.enter_context(redis_cluster())
            nodes = [redis.cluster.ClusterNode("127.0.0.1", node.port) for node in cluster.nodes]  # type: ignore[no-untyped-call]
            client: Any = stack.enter_context(closing(redis.RedisCluster(startup_nodes=nodes)))
            url = cluster.url
        else:
            server = stack.enter_context(redis_server())
            url = server.url
            client = stack.enter_context(closing(redis.Redis.from_url(url)))
        bare = _Bare(client.set, client.get, lambda names: client.delete(*names))
        if kind == "mooncake":
            store = stack.enter_context(mooncake_store(2**30))
            url = store.url(url)
            bare = _mooncake(stack, store.address)
        yield stack.enter_context(closing(_patient_tier(url))), bare


def _patient_tier(url: str) -> RedisTier:
    tier = open_tier(url, timeout_s=_PATIENT_S)
    end = time.monotonic() + _PATIENT_S
    while not tier.is_available:
        if time.monotonic() > end:
            raise BenchError(f"{url} cannot be used; the machine may be too busy")
        time.sleep(0.05)
    return tier


def _mooncake(stack: ExitStack, address: str) -> _Bare:
    from mooncake.store import MooncakeDistributedStore

    client: Any = stack.enter_context(closing(MooncakeDistributedStore()))
    if client.setup("127.0.0.1", "P2PHANDSHAKE", 0, _MOONCAKE_BUFFER, "tcp", "", address) != 0:
        raise BenchError("the bare client of Mooncake cannot be set up; the machine may be too busy")

    # It does not write what is there, and says 0 all the same: that is why values are cleared.
    return _Bare(
        lambda name, value: client.put(name, value) == 0,
        client.get,
        lambda names: client.batch_remove(list(names), True),
    )


def _contestants(tier: RedisTier, bare: _Bare, blocks: Sequence[KVBlock]) -> dict[str, dict[str, Callable[[], float]]]:
    records = RecordFormat(namespace())
    values = [(f"bare:{block.key.hex()}", records.encode(block).join()) for block in blocks]
    keys = [block.key for block in blocks]

    def store() -> float:
        tier.remove(keys)
        return _timed(lambda: [tier.store(block) for block in blocks], [PutOutcome.STORED] * len(blocks))

    def load() -> float:
        return _timed(lambda: [block is not None for block in tier.load(keys)], [True] * len(keys))

    def put() -> float:
        bare.clear([name for name, _ in values])
        return _timed(lambda: [bare.put(name, value) for name, value in values], [True] * len(keys))

    def get() -> float:
        return _timed(lambda: [len(bare.get(name)) for name, _ in values], [len(value) for _, value in values])

    return {"put": {_OURS: store, _BARE: put}, "get": {_OURS: load, _BARE: get}}


def _timed(work: Callable[[], list[Any]], expected: list[Any]) -> float:
    begin = time.perf_counter()
    done = work()
    took = 1e3 * (time.perf_counter() - begin)
    if done != expected:
        raise BenchError("a block was not stored or not found: the machine is too busy, or a defect of the tier")
    return took
