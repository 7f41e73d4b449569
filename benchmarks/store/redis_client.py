"""Whether redis-py could carry the Redis tier: the tier's MB/s over our own link and over redis-py's connections.

Starts a redis-server of its own. The tiers differ only in what speaks the protocol. The stand-ins for redis-py do less
than they would have to: they set a time limit for each read, not one for all waiting of a call, and believe any length
that the server names. Rounds are strictly in turn. hiredis must be installed to be compared.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any, cast

from benchmarks.common.measure import alternate, positive
from benchmarks.common.servers import redis_server
from benchmarks.internals import redis_links
from benchmarks.store.redis_tier import make_block, open_tier, python_packer
from kvboost.bench.report import BenchError, Report, Spread, ratios
from kvboost.store.tiers.redis.resp import Command, Deadline, Reply, ServerError
from kvboost.store.tiers.redis.tier import RedisTier
from kvboost.types import KVBlock, PutOutcome

QUICK = {"repeat": 2, "blocks": 2}

_OURS = "our link"
_RECORD = 2**20 - 2**15  # bytes of KV whose record fits one value


class RedisPyLink:
    """The tier's link, spoken by a connection of redis-py."""

    def __init__(self, connection: Any, deadline: Deadline) -> None:
        self._connection = connection
        self.deadline = deadline
        self._values: deque[bytes] = deque()
        self.awaited = 0

    @property
    def is_fresh(self) -> bool:
        return not self.awaited and not self._connection.can_read(0)

    def call(self, commands: Sequence[Command]) -> list[Reply]:
        self.send(commands)
        return [self.reply() for _ in commands]

    def send(self, commands: Iterable[Command]) -> None:
        whole = [[b"".join(v) if isinstance(v, tuple) else v for v in command] for command in commands]
        self.awaited += len(whole)
        self._connection._sock.settimeout(self.deadline.left)
        for command in whole:
            self._connection.send_packed_command(self._connection.pack_command(*command), check_health=False)
        self.deadline.transferred(sum(len(value) for command in whole for value in command))

    def reply(self) -> Reply:
        import redis

        self.awaited -= 1
        self._connection._sock.settimeout(self.deadline.left)
        begin = time.monotonic()
        try:
            reply: Any = self._connection.read_response(disable_decoding=True)
        except redis.ResponseError as error:
            return ServerError(str(error))
        self.deadline.waited(time.monotonic() - begin)
        self.deadline.transferred(len(reply) if isinstance(reply, bytes) else 0)
        return reply  # type: ignore[no-any-return]

    def length(self) -> int | None:
        value = self.reply()
        if not isinstance(value, bytes):
            return None
        self._values.append(value)
        return len(value)

    def take(self, into: memoryview) -> None:
        into[:] = self._values.popleft()

    def close(self) -> None:
        self._connection.disconnect()


def _connectors() -> dict[str, Callable[[str], Any]]:
    """redis-py with its Python parser and packer, and with hiredis where that is installed."""
    from redis._parsers import _HiredisParser, _RESP2Parser
    from redis.connection import Connection, parse_url
    from redis.utils import HIREDIS_AVAILABLE

    def connector(parser: Any, packer: Any, **more: Any) -> Callable[[str], Any]:
        def for_url(url: str) -> Any:
            options = cast(Any, parse_url)(url) | {"protocol": 2, "socket_timeout": 5.0, **more}

            def make(deadline: Deadline) -> Any:
                connection = cast(Any, Connection)(**options, parser_class=parser, command_packer=packer)
                connection.connect()
                return RedisPyLink(connection, deadline), []

            return make

        return for_url

    made = {"redis-py, pure Python": connector(_RESP2Parser, python_packer())}
    if HIREDIS_AVAILABLE:
        made["redis-py with hiredis"] = connector(_HiredisParser, None)
        made["redis-py, hiredis reads, Python packs"] = connector(_HiredisParser, python_packer())
        made["the same, a megabyte at a time"] = connector(_HiredisParser, python_packer(), socket_read_size=2**20)
    return made


class Contestant:
    """One tier's turns: wall time of each, and this process's CPU time (the server has its own)."""

    def __init__(self, tier: RedisTier, blocks: Sequence[KVBlock], what: str) -> None:
        self._tier, self._blocks, self._what = tier, blocks, what
        self.cpu_ms: list[float] = []

    def __call__(self) -> float:
        keys = [block.key for block in self._blocks]
        if self._what == "store":
            self._tier.remove(keys)
        cpu, begin = time.process_time(), time.perf_counter()
        if self._what == "store":
            done = {self._tier.store(block) for block in self._blocks} == {PutOutcome.STORED}
        else:
            done = None not in list(self._tier.load(keys))
        took = 1e3 * (time.perf_counter() - begin)
        self.cpu_ms.append(1e3 * (time.process_time() - cpu))
        if not done:
            raise BenchError(f"a {self._what} failed: the machine is too busy")
        return took


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--repeat", type=positive, default=20, help="rounds (default 20)")
    parser.add_argument("--blocks", type=positive, default=16, help="blocks per round (default 16)")


def run(args: argparse.Namespace) -> Report:
    """Store and load over every link."""
    report = Report("redis_client")
    blocks = [make_block(number, _RECORD) for number in range(args.blocks)]
    with redis_server() as server, ExitStack() as stack:
        tiers = {_OURS: stack.enter_context(closing(open_tier(server.url, timeout_s=5.0)))}
        for name, connector in _connectors().items():
            with redis_links(connector):
                tiers[name] = stack.enter_context(closing(open_tier(server.url, timeout_s=5.0)))
        for what in ("store", "load"):
            _compare(report, {name: Contestant(tier, blocks, what) for name, tier in tiers.items()}, what, args)
    return report


def _compare(report: Report, contestants: dict[str, Contestant], what: str, args: argparse.Namespace) -> None:
    samples = alternate(contestants, repeat=args.repeat, warmups=2, label=what)
    cpu = {name: contestant.cpu_ms[-args.repeat :] for name, contestant in contestants.items()}
    table = report.table(
        f"The Redis tier, {what} of records of 1 MB, median [lowest highest]",
        ["", "MB/s", "time / ours", "client's CPU, ms per MB", "CPU / ours"],
    )
    kilobytes = args.blocks * _RECORD / 1e3  # bytes per ms are kB per s
    for name, times in samples.items():
        table.add(
            name,
            Spread.of([kilobytes / took for took in times]).text(0),
            Spread.of(ratios(times, samples[_OURS])).text(2),
            Spread.of([1e3 * used / kilobytes for used in cpu[name]]).text(2),
            Spread.of(ratios(cpu[name], cpu[_OURS])).text(2),
        )
    table.notes.append(f"{args.blocks} blocks per round, {args.repeat} rounds, strictly in turn.")
    report.raw[what] = {"ms": samples, "cpu_ms": cpu}
