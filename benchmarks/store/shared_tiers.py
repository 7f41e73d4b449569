"""Shared tiers: how fast blocks go to Redis, a Redis Cluster and a Mooncake Store and back, as ratios to bare clients.

Starts servers of its own on this machine: a Redis, a cluster of three nodes, a Mooncake Store over TCP (if its package
is installed). The bare client puts and gets one ready value per block and does nothing else; the tier makes and checks
the record and notes a pointer to it. Redis' client is there twice: as it comes, and as it copies least (hiredis reads,
Python packs). Rounds are strictly in turn. Servers and clients share the cores, so only the ratios say anything, and
those of a network of one's own say more. A second table fills a Redis: what a full one costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.common.measure import alternate, positive
from benchmarks.common.report import BenchError, Report
from benchmarks.common.servers import mooncake_store, redis_cluster, redis_server
from benchmarks.store.redis_tier import make_block, namespace, open_tier, python_packer, server_cpu
from kvboost.bench.report import Spread, ratios
from kvboost.store import RedisTier
from kvboost.store.record.format import RecordFormat
from kvboost.types import KVBlock, PutOutcome

KINDS = ("redis", "cluster", "mooncake")
QUICK = {"repeat": 2, "blocks": 3, "full": 24, "only": ["redis", "cluster"]}
_PATIENT_S = 10.0
_OURS = "the tier"
_STORED = PutOutcome.STORED
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
    parser.add_argument("--full", type=positive, default=600, help="blocks to fill a Redis with (default 600)")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of a block (default 1)")


def run(args: argparse.Namespace) -> Report:
    """Put and get of every kind, and of a Redis that is full."""
    report = Report("shared_tiers")
    table = report.table(
        f"Shared tiers, blocks of {args.megabytes:g} MB on this machine, median [lowest highest]",
        ["", "put, MB/s", "bare put, MB/s", "put, tier / bare", "get, MB/s", "bare get, MB/s", "get, tier / bare"],
    )
    nbytes = int(args.megabytes * 2**20) - 2**15
    blocks = [make_block(number, nbytes) for number in range(args.blocks)]
    for kind in args.only:
        with _opened(kind) as (tier, clients):
            rows: dict[str, list[str]] = {name: [] for name in clients}
            for what, contestants in _contestants(tier, clients, blocks).items():
                samples = alternate(contestants, repeat=args.repeat, warmups=2, label=f"{kind}: {what}")
                kilobytes = sum(block.nbytes for block in blocks) / 1e3  # bytes per ms are kB per s
                rates = {name: [kilobytes / took for took in times] for name, times in samples.items()}
                for name, cells in rows.items():
                    cells += [Spread.of(rates[each]).text(0) for each in (_OURS, name)]
                    cells.append(Spread.of(ratios(rates[_OURS], rates[name])).text(2))
                report.raw[f"{kind} {what}"] = rates
            for name, cells in rows.items():
                table.add(f"{kind}, {name}", *cells)
    table.notes.append(f"{args.blocks} blocks per round, {args.repeat} rounds, in turn. Above 1 the tier is faster.")
    if "redis" in args.only:
        _full(report, nbytes, args.full)
    return report


def _full(report: Report, nbytes: int, count: int) -> None:
    """Put ``count`` blocks into a Redis with room for a third of them, and get the last ones, before and after."""
    import redis

    table = report.table(
        f"A Redis with room for {count // 3} blocks, before it is full and after",
        ["", "put, MB/s", "get, MB/s", "server's CPU, ms per block put", "evicted by the server"],
    )
    room = ["--maxmemory", str(count // 3 * (nbytes + 2**16))]
    with (
        redis_server(room) as server,
        closing(redis.Redis.from_url(server.url)) as client,
        closing(_patient_tier(server.url)) as tier,
    ):
        for name, first in (("before", 0), ("full", count // 2)):
            if first:
                for number in range(count // 4, first):
                    tier.store(make_block(number, nbytes))
            blocks = [make_block(number, nbytes) for number in range(first, first + count // 4)]
            before, cpu = _evicted(client), server_cpu(client)
            took = _timed(partial(_put_all, tier, blocks), [_STORED] * len(blocks))
            put = len(blocks) * nbytes / 1e3 / took
            cpu = 1e3 * (server_cpu(client) - cpu) / len(blocks)
            recent = [block.key for block in blocks[-count // 8 :]]
            begin = time.perf_counter()
            hits = sum(block is not None for block in tier.load(recent))
            got = hits * nbytes / 1e6 / (time.perf_counter() - begin)
            evicted = _evicted(client) - before
            table.add(name, f"{put:.0f}", f"{got:.0f} ({hits} of {len(recent)})", f"{cpu:.2f}", str(evicted))
            report.raw[name] = [put, got, cpu, evicted]
    table.notes.append("allkeys-lru draws a few keys and evicts the oldest: some that were put last may be among them.")


def _put_all(tier: RedisTier, blocks: Sequence[KVBlock]) -> list[PutOutcome]:
    return [tier.store(block) for block in blocks]


def _evicted(client: Any) -> int:
    return int(client.info("stats")["evicted_keys"])


@contextmanager
def _opened(kind: str) -> Iterator[tuple[RedisTier, dict[str, _Bare]]]:
    """A tier of this kind and bare clients of the same servers."""
    import redis

    with ExitStack() as stack:
        if kind == "mooncake":
            store = stack.enter_context(mooncake_store(2**30))
            url, bare = store.url, {"its client": _mooncake(stack, store.address)}
        elif kind == "cluster":
            cluster = stack.enter_context(redis_cluster())
            nodes = [redis.cluster.ClusterNode("127.0.0.1", node.port) for node in cluster.nodes]  # type: ignore[no-untyped-call]
            client: Any = stack.enter_context(closing(redis.RedisCluster(startup_nodes=nodes)))
            url, bare = cluster.url, {"redis-py": _redis(client)}
        else:
            url = stack.enter_context(redis_server()).url
            client = stack.enter_context(closing(redis.Redis.from_url(url)))
            pool = redis.ConnectionPool.from_url(url, command_packer=python_packer(), protocol=2)
            least = stack.enter_context(closing(redis.Redis(connection_pool=pool)))
            bare = {"redis-py": _redis(client), "redis-py that copies least": _redis(least)}
        yield stack.enter_context(closing(_patient_tier(url))), bare


def _redis(client: Any) -> _Bare:
    return _Bare(
        lambda name, value: client.set(name, memoryview(value)),
        client.get,
        lambda names: [client.delete(name) for name in names],
    )


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


def _contestants(
    tier: RedisTier, clients: dict[str, _Bare], blocks: Sequence[KVBlock]
) -> dict[str, dict[str, Callable[[], float]]]:
    records = RecordFormat(namespace())
    values = [(f"bare:{block.key.hex()}", records.encode(block).join()) for block in blocks]
    keys = [block.key for block in blocks]

    def store() -> float:
        tier.remove(keys)
        return _timed(partial(_put_all, tier, blocks), [_STORED] * len(blocks))

    def load() -> float:
        return _timed(lambda: list(tier.load(keys)), [True] * len(keys), of=lambda block: block is not None)

    def put(bare: _Bare) -> float:
        bare.clear([name for name, _ in values])
        return _timed(lambda: [bare.put(name, value) for name, value in values], [True] * len(keys))

    def get(bare: _Bare) -> float:
        return _timed(lambda: [bare.get(name) for name, _ in values], [len(value) for _, value in values], of=len)

    return {
        "put": {_OURS: store, **{name: partial(put, bare) for name, bare in clients.items()}},
        "get": {_OURS: load, **{name: partial(get, bare) for name, bare in clients.items()}},
    }


def _timed(
    work: Callable[[], list[Any]], expected: list[Any], *, of: Callable[[Any], Any] = lambda done: done
) -> float:
    """What is got is kept until all of it is there, as a cache keeps it: its memory is not used twice."""
    begin = time.perf_counter()
    done = work()
    took = 1e3 * (time.perf_counter() - begin)
    if list(map(of, done)) != expected:
        raise BenchError("a block was not stored or not found: the machine is too busy, or a defect of the tier")
    return took
