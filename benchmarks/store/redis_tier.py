"""Speed of the Redis tier: how fast blocks go to a Redis server and come back, and what a broken one costs a request.

Starts a redis-server of its own, or takes one with --url; the blocks lie under a prefix of their own
and are removed. Faults are made by a proxy in front of it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import torch

from benchmarks.common.faults import Fault, FaultyProxy
from benchmarks.common.measure import alternate, positive
from benchmarks.common.report import BenchError, Report
from benchmarks.common.servers import redis_server
from kvboost.bench.report import Spread, Table, describe_machine, ratios
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.redis.tier import RedisTier
from kvboost.types import KVBlock, Namespace, PutOutcome

QUICK = {"repeat": 2, "blocks": 2, "small": 100, "faults": ["refused", "garbage"]}

_LAYERS = 30
_ROW = 256  # bytes of one token's key of one head: 64 numbers of float32
_FAULTS = [fault.value for fault in Fault if fault is not Fault.NONE]
_REQUESTS_WHILE_OPEN = 200
_RECOVERY_S = 10.0
_FIRST_MS = 100.0
_OPEN_MS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--url", help="a server to use instead of one of its own")
    parser.add_argument("--repeat", type=positive, default=15, help="rounds per size (default 15)")
    parser.add_argument("--blocks", type=positive, default=8, help="blocks per round (default 8)")
    parser.add_argument("--small", type=positive, default=2000, help="small blocks (default 2000)")
    parser.add_argument("--faults", nargs="+", choices=_FAULTS, default=_FAULTS, help="default: all")


def run(args: argparse.Namespace) -> Report:
    """Speed, the cost of a small block, faults."""
    report = Report("redis_tier")
    with _server(args.url) as url:
        address = urlsplit(url)
        if address.hostname not in ("127.0.0.1", "localhost"):
            raise BenchError("faults are made on this machine only; give a --url with 127.0.0.1")
        report.tables.append(_speed(url, args, report.raw))
        report.tables.append(_small(url, args, report.raw))
        report.tables.append(_faults(address.port or 6379, [Fault(name) for name in args.faults], report))
    return report


@contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
    else:
        with redis_server() as server:
            yield server.url


def namespace() -> Namespace:
    """Whose blocks these are."""
    return Namespace(hashlib.sha256(b"benchmarks.store.redis_tier").digest(), hashlib.sha256(b"bench").digest())


def make_block(number: int, nbytes: int) -> KVBlock:
    """A block of about so many bytes in keys and values of some layers."""
    digest = hashlib.sha512(b"%d.%d" % (number, nbytes)).digest()
    each = max(_ROW, nbytes // (2 * _LAYERS) // _ROW * _ROW)
    whole = torch.frombuffer(bytearray(os.urandom(each * 2 * _LAYERS)), dtype=torch.uint8).view(2 * _LAYERS, each)
    return KVBlock(
        key=digest[:32],
        parent_key=None,
        content_key=digest[32:],
        tokens=bytes(512),
        tensors=tuple(whole.unbind(0)),
        nbytes=whole.numel(),
        bitwise=True,
    )


def open_tier(url: str, **options: Any) -> RedisTier:
    """A tier under a prefix of its own."""
    return RedisTier(
        url,
        records=RecordFormat(namespace()),
        prefix=f"kvboost-bench-{os.getpid()}",
        **options,
    )


# Speed


def _speed(url: str, args: argparse.Namespace, raw: dict[str, Any]) -> Table:
    clients = _clients(url)
    table = Table(
        "Redis tier: MB/s to a redis-server on this machine and back, median [lowest highest] of the rounds",
        describe_machine(),
        ["", *(f"{what}, {size} MB" for size in (1, 6) for what in ("store", "load"))],
    )
    columns: list[dict[str, list[float]]] = []
    for megabytes in (1, 6):
        nbytes = megabytes * 2**20 - 2**15
        blocks = [make_block(number, nbytes) for number in range(args.blocks)]
        with closing(open_tier(url, timeout_s=5.0)) as tier:
            stores, loads = _contestants(blocks, clients, tier)
            for what, contestants in (("store", stores), ("load", loads)):
                samples = alternate(contestants, repeat=args.repeat, warmups=2, label=f"{what} of {megabytes} MB")
                kilobytes = args.blocks * nbytes / 1e3  # bytes per ms are kB per s
                columns.append({name: [kilobytes / took for took in times] for name, times in samples.items()})
            tier.clear()
    for name in (*clients, "the tier"):
        table.add(name, *(Spread.of(column[name]).text(0) for column in columns))
    for client in clients:
        against = [Spread.of(ratios(column["the tier"], column[client])).text(2) for column in columns]
        table.add(f"the tier / {client}", *against)
    table.notes.append(
        f"{args.blocks} blocks per round, {args.repeat} rounds, in turn. redis-py sets and gets "
        "one ready value per block and does nothing else; the tier makes and checks the record with its checksum and "
        "notes a pointer to it. Server, client and other work share the cores."
    )
    raw["speed"] = columns
    return table


def _clients(url: str) -> dict[str, Any]:
    """redis-py as it comes, and as it copies least."""
    import redis
    from redis._parsers import _RESP2Parser
    from redis.connection import Connection
    from redis.utils import HIREDIS_AVAILABLE

    class Pure(Connection):
        def __init__(self, **options: Any) -> None:
            super().__init__(  # type: ignore[no-untyped-call]
                parser_class=_RESP2Parser, command_packer=python_packer(), **options
            )

    pool = redis.ConnectionPool.from_url(url, connection_class=Pure, protocol=2)
    default = "redis-py with hiredis" if HIREDIS_AVAILABLE else "redis-py"
    return {
        default: redis.Redis.from_url(url, protocol=2),
        "redis-py, pure Python, memoryviews": redis.Redis(connection_pool=pool),
    }


def python_packer() -> Any:
    """What packs commands in redis-py where hiredis is not installed: it copies no value."""
    from redis._parsers import Encoder
    from redis.connection import PythonRespSerializer

    encoder: Any = cast(Any, Encoder)("utf-8", "strict", False)
    return cast(Any, PythonRespSerializer)(6000, encoder.encode)


def _contestants(
    blocks: Sequence[KVBlock], clients: dict[str, Any], tier: RedisTier
) -> tuple[dict[str, Callable[[], float]], dict[str, Callable[[], float]]]:
    records = RecordFormat(namespace())
    values = [(b"kvboost-bench:" + block.key, records.encode(block).join()) for block in blocks]
    keys = [block.key for block in blocks]

    def plain(client: Any) -> tuple[Callable[[], float], Callable[[], float]]:
        def store() -> float:
            begin = time.perf_counter()
            for key, value in values:
                client.set(key, memoryview(value), px=600_000)
            return 1e3 * (time.perf_counter() - begin)

        def load() -> float:
            begin = time.perf_counter()
            found = [client.get(key) for key, _ in values]
            took = 1e3 * (time.perf_counter() - begin)
            _must(all(len(value) == len(wanted) for value, (_, wanted) in zip(found, values, strict=True)))
            return took

        return store, load

    def store() -> float:
        tier.remove(keys)
        begin = time.perf_counter()
        outcomes = [tier.store(block) for block in blocks]
        took = 1e3 * (time.perf_counter() - begin)
        _must(outcomes == [PutOutcome.STORED] * len(blocks))
        return took

    def load() -> float:
        begin = time.perf_counter()
        found = list(tier.load(keys))
        took = 1e3 * (time.perf_counter() - begin)
        _must(None not in found)
        return took

    both = {name: plain(client) for name, client in clients.items()} | {"the tier": (store, load)}
    return {name: pair[0] for name, pair in both.items()}, {name: pair[1] for name, pair in both.items()}


def _must(holds: bool) -> None:
    if not holds:
        raise BenchError("a block was not stored or not found: the machine is too busy, or a defect of the tier")


# Small blocks


def _small(url: str, args: argparse.Namespace, raw: dict[str, Any]) -> Table:
    """What storing costs beside moving the bytes: blocks of a page, as a plain value and as a block."""
    import redis

    client: Any = redis.Redis.from_url(url)
    blocks = [make_block(number, 1000) for number in range(args.small)]
    records = RecordFormat(namespace())
    values = [(b"kvboost-bench:" + block.key, records.encode(block).join()) for block in blocks]
    table = Table(
        "Redis tier: what a small block costs",
        describe_machine(),
        ["", "ms per block", "server's CPU, ms", "server's memory beside the value, bytes"],
    )
    figures: dict[str, list[float]] = {}

    def measured(name: str, work: Callable[[], None]) -> None:
        before, memory = server_cpu(client), _memory(client)
        begin = time.perf_counter()
        work()
        took = time.perf_counter() - begin
        beside = (_memory(client) - memory) / len(blocks) - len(values[0][1])
        figures[name] = [1e3 * took / len(blocks), 1e3 * (server_cpu(client) - before) / len(blocks), beside]

    def plain() -> None:
        for key, value in values:
            client.set(key, value)

    measured("a plain value", plain)
    client.delete(*(key for key, _ in values))
    with closing(open_tier(url, timeout_s=5.0)) as tier:
        measured("a block of the tier", lambda: _must({tier.store(b) for b in blocks} == {PutOutcome.STORED}))
        keys = [block.key for block in blocks]
        begin = time.perf_counter()
        _must(all(tier.contains(keys[:256])))
        figures["contains, 256 keys at once"] = [1e3 * (time.perf_counter() - begin) / 256]
        begin = time.perf_counter()
        tier.used(keys)
        tier.flush()
        figures["used, touched in one round trip"] = [1e3 * (time.perf_counter() - begin) / len(keys)]
        tier.clear()
    for name, (ms, *others) in figures.items():
        cells = [f"{others[0]:.3f}", f"{others[1]:.0f}"] if others else ["", ""]
        table.add(name, f"{ms:.4f}", *cells)
    table.notes.append(f"{len(blocks)} blocks with records of {len(values[0][1]):,} bytes, one after the other.")
    raw["small"] = figures
    return table


def server_cpu(client: Any) -> float:
    """Seconds that the server has computed."""
    info = client.info("cpu")
    return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])


def _memory(client: Any) -> int:
    return int(client.info("memory")["used_memory"])


# Faults


def _faults(port: int, faults: Sequence[Fault], report: Report) -> Table:
    table = Table(
        "Redis tier: ms that a broken server adds to a request, and how soon a mended one is used again",
        describe_machine(),
        ["fault", "first", "second", "third", "breaker open: median", "largest", "used again after, s"],
    )
    report.raw["faults"] = {}
    for fault in faults:
        cost = cost_of(fault, port)
        report.raw["faults"][fault.value] = cost
        table.add(
            fault.value,
            *(f"{ms:.1f}" for ms in cost["first"]),
            f"{statistics.median(cost['open']):.3f}",
            f"{max(cost['open']):.3f}",
            f"{cost['recovery_s']:.2f}",
        )
        report.failed |= not is_bearable(cost)
    table.notes.append(
        f"A request asks contains, variants and load for four blocks of 1 MB and says used. Bars: {_FIRST_MS:.0f} ms "
        f"for each of the first three, under {_OPEN_MS:.0f} ms while the breaker is open (median of "
        f"{_REQUESTS_WHILE_OPEN}), "
        f"used again within {_RECOVERY_S:.0f} s."
    )
    return table


def is_bearable(cost: dict[str, Any]) -> bool:
    """Whether a fault costs no more than it may."""
    quick = max(cost["first"]) <= _FIRST_MS and statistics.median(cost["open"]) < _OPEN_MS
    return bool(quick and cost["recovery_s"] <= _RECOVERY_S)


def cost_of(fault: Fault, port: int, *, broken_s: float = 3.0) -> dict[str, Any]:
    """What a fault costs the first three requests and the next ones, in ms, and how long after it the tier is back."""
    blocks = [make_block(number, 2**20) for number in range(4)]
    keys = [block.key for block in blocks]

    def request(tier: RedisTier) -> float:
        begin = time.perf_counter()
        tier.contains(keys)
        tier.variants([block.content_key for block in blocks])
        found = list(tier.load(keys))
        tier.used(keys)
        took = 1e3 * (time.perf_counter() - begin)
        if fault is not Fault.NONE and proxy.fault is fault and any(block is not None for block in found):
            raise BenchError(f"a block came through a proxy that is {fault.value}")
        return took

    with warnings.catch_warnings(), FaultyProxy(port) as proxy:
        warnings.simplefilter("ignore")
        with closing(open_tier(f"redis://127.0.0.1:{proxy.port}/0")) as tier:
            for block in blocks:
                tier.store(block)
            for _ in range(50):  # a busy machine may be too slow for one of them
                request(tier)
                if tier.is_available:
                    break
                time.sleep(0.1)
            proxy.fault = fault
            first = [request(tier) for _ in range(3)]
            opened = [request(tier) for _ in range(_REQUESTS_WHILE_OPEN)]
            time.sleep(broken_s)  # the longer, the rarer are the looks when it is mended
            proxy.fault = Fault.NONE
            mended = time.perf_counter()
            while not all(tier.contains(keys)) and time.perf_counter() - mended < 2 * _RECOVERY_S:
                time.sleep(0.01)
            recovery = time.perf_counter() - mended
            tier.clear()
    return {"first": first, "open": opened, "recovery_s": recovery}
