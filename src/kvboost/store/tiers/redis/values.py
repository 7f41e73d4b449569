"""Values in a Redis or Valkey server, behind Sentinels or in a cluster: what a tier asks of it, by redis-py.

Used by the Redis tier and by ``kvboost cache``. A record is one plain value, a pointer to it a member of a small sorted
set; the server evicts. Invariants: a request waits no longer than its patience, and not at all while the breaker is
open; what redis-py raises is a miss.

Redis' LRU clock ticks once a second, and it evicts the oldest of a few it draws: what is touched last goes last as far
as that tells them apart. ``EXISTS`` does not count as a use; ``STRLEN``, ``GET`` and ``TOUCH`` do.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from kvboost.store.record.format import EncodedRecord
from kvboost.store.tiers.base import MAX_VARIANTS
from kvboost.store.tiers.redis.client import client_maker, place_of
from kvboost.store.tiers.remote import (
    BEHIND_S,
    Breaker,
    Deadline,
    Guard,
    Patience,
    RefusedError,
    Report,
    UnavailableError,
)
from kvboost.types import PutOutcome

FORMAT = "2"
"""In every name: the names of other formats are ignored."""
Command = tuple[Any, ...]

_READERS = 8  # lookups at once
_AHEAD = 2  # batches asked for before the first is read
_BATCH_BYTES = 4 * 2**20  # asked for in one round trip; of more, the server would keep copies
_BATCH_VALUES = 64
_PAGE = 1000  # names in one round trip
_WRITE_S = 5.0  # beside its bytes, for what no request waits for: longer than any single read may take
_SCAN_S = 30.0  # for a page of them, among the names of others
_ECHO = b"\x55" * 16 * 1024
_NO_RECORD = memoryview(b"")


class RedisValues:
    """Plain values that the server evicts by itself. Thread-safe."""

    kind = "redis"

    def __init__(
        self, url: str, *, prefix: str, patience: Patience, ttl_ms: int | None, report: Report, warns: bool = True
    ) -> None:
        """``report`` is told of every failure; ``warns``: also the user, of a server that does not evict.

        Raises ConfigError for an URL that cannot work.
        """
        self.place = place_of(url)
        self._in_cluster = "+cluster:" in url
        self._connect_s = max(BEHIND_S, patience.timeout_s)
        self._make = client_maker(url, timeout_s=self._connect_s)
        self._prefix, self._patience, self._ttl_ms, self._report = prefix, patience, ttl_ms, report
        self._client: Any = None
        self._lock = threading.Lock()
        breaker = Breaker(self._probe, name="kvboost-redis-probe")
        self._guard = Guard(_READERS, name="kvboost-redis", patience=patience, breaker=breaker, failed=self._disconnect)
        self._warns = warns
        self.capacity_bytes: int | None = None
        """The servers' ``maxmemory``, as they told when they were first reached."""

    def open(self) -> None:
        """Reach the server, so that whoever opens a tier is told what is wrong; later ones find it by themselves."""
        try:
            self._look_at(self._guard.done(self._memory, seconds=self._connect_s))
        except UnavailableError as error:
            self._report(error)

    @property
    def is_available(self) -> bool:
        """Whether the server, or every node of the cluster, answered when it was last used."""
        return not self._guard.breaker.is_open

    # Finding

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which of these are there, in one round trip."""
        return [reply == 1 for reply in self._asked([("EXISTS", name) for name in names])]

    def pointers(self, names: Sequence[str]) -> list[list[bytes]]:
        """What was noted under each of these names, newest last."""
        replies = self._asked([("ZRANGE", name, 0, -1) for name in names])
        return [reply if isinstance(reply, list) else [] for reply in replies]

    def load(self, names: Sequence[str], *, max_bytes: int) -> Iterator[memoryview | None]:
        """These values in order; asked for in batches of a few megabytes, some ahead."""
        deadline = Deadline(self._patience)
        lengths = self._asked([("STRLEN", name) for name in names], deadline)
        batches: list[tuple[list[str], int]] = []
        wanted = []
        for name, length in zip(names, lengths, strict=True):
            wanted.append(isinstance(length, int) and 0 < length <= max_bytes)
            if not wanted[-1]:
                continue
            if not batches or batches[-1][1] + length > _BATCH_BYTES or len(batches[-1][0]) == _BATCH_VALUES:
                batches.append(([], 0))
            batches[-1] = ([*batches[-1][0], name], batches[-1][1] + length)
        works = ((partial(self._execute, [("GET", name) for name in some]), nbytes) for some, nbytes in batches)
        replies = self._guard.each(works, ahead=_AHEAD, deadline=deadline, report=self._report)
        values = chain.from_iterable(
            [None] * len(some) if found is None else found for (some, _), found in zip(batches, replies, strict=False)
        )
        # What is too long or no value at all is another program's; it will be found damaged.
        return (
            _value(next(values, None)) if is_wanted else None if not length else _NO_RECORD
            for is_wanted, length in zip(wanted, lengths, strict=True)
        )

    # Keeping

    def put(self, name: str, record: Callable[[], EncodedRecord], *, pointer: tuple[str, bytes]) -> PutOutcome:
        """Write a record unless it is there, and note a pointer to it."""
        noted, entry = pointer
        limit = () if self._ttl_ms is None else ("PX", self._ttl_ms)
        try:
            if must(self.run([("EXISTS", name)])[0]):
                return PutOutcome.PRESENT
            value = record().join()
            commands: list[Command] = [
                ("SET", name, value, *limit),
                ("ZADD", noted, time.time_ns() // 1000, entry),
                ("ZREMRANGEBYRANK", noted, 0, -1 - MAX_VARIANTS),
            ]
            if self._ttl_ms is not None:
                commands.append(("PEXPIRE", noted, self._ttl_ms))
            must(self.run(commands, nbytes=len(value))[0])
        except UnavailableError as error:
            self._report(error)
            return PutOutcome.REFUSED
        return PutOutcome.STORED

    def touch(self, names: Sequence[str]) -> list[bool]:
        """These were used, the most recent last. Returns which are there; all, if the server does not tell."""
        replies = self.change([("TOUCH", name) for name in names])
        return [reply == 1 for reply in replies] if replies else [True] * len(names)

    def change(self, commands: Sequence[Command]) -> list[Any]:
        """Do this, for which no request waits. Returns the replies; none if the server did not do all of it."""
        try:
            return [must(reply) for reply in self.run(commands)]
        except UnavailableError as error:
            self._report(error)
            return []

    # Forgetting

    def remove(self, names: Sequence[str], *, is_waited_for: bool = False) -> None:
        """Remove these, with the patience of a request if one waits for it."""
        commands = [("UNLINK", name) for name in names]
        if is_waited_for:
            self._asked(commands)
        else:
            self.change(commands)

    def purge(self, owner: str) -> int:
        """Remove all names that begin with an owner, or all; how many records. Raises UnavailableError."""
        removed = 0
        for names in self._pages(f"{self._prefix}:{FORMAT}:{owner}*"):
            for reply in self.run([("UNLINK", name) for name in names]):
                must(reply)
            removed += sum(b":content:" not in name for name in names)
        return removed

    # Listing

    def records(self) -> Iterator[list[bytes]]:
        """The names of all records, some at a time; a scan may name one twice. Raises UnavailableError."""
        for names in self._pages(f"{self._prefix}:{FORMAT}:*"):
            yield [name for name in names if b":content:" not in name]

    def _pages(self, pattern: str) -> Iterator[list[bytes]]:
        found = iter(self._connected().scan_iter(pattern, count=_PAGE))
        while names := self._guard.done(lambda: list(islice(found, _PAGE)), seconds=_SCAN_S):
            yield names

    # The server

    def run(self, commands: Sequence[Command], *, nbytes: int = 0) -> list[Any]:
        """The replies to what no request waits for, errors among them. Raises UnavailableError."""
        if self._guard.breaker.is_open:
            raise UnavailableError(None)
        return self._guard.done(lambda: self._execute(commands), seconds=_WRITE_S, nbytes=nbytes)

    def close(self) -> None:
        """Close every connection."""
        self._guard.close()
        self._disconnect()

    def _asked(self, commands: Sequence[Command], deadline: Deadline | None = None) -> list[Any]:
        """The replies, which a request waits for; None for each if there are none or the server is left alone."""
        try:
            if not self._guard.breaker.is_open:
                call = self._guard.submit(partial(self._execute, commands))
                return self._guard.result(call, deadline or Deadline(self._patience))
        except UnavailableError as error:
            self._report(error)
        return [None] * len(commands)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._make()
            return self._client

    def _execute(self, commands: Sequence[Command], _: object = None) -> list[Any]:
        """The replies, errors of single commands among them. Raises what redis-py raises."""
        pipeline = self._connected().pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies

    def _disconnect(self) -> None:
        """End all connections, also reads that a server which dribbles would never end."""
        client = self._client
        if client is None:
            return
        for node in [node.redis_connection for node in client.get_nodes()] if self._in_cluster else [client]:
            if node is not None:
                node.connection_pool.disconnect(inuse_connections=True)

    def _probe(self) -> bool:
        """Whether every server is there; one alone must carry some bytes as fast as a request must have it.

        Raises UnavailableError.
        """
        self._look_at(self._guard.done(self._memory, seconds=BEHIND_S))
        if not self._in_cluster:
            self._guard.done(lambda: self._execute([("ECHO", _ECHO)]), seconds=self._patience.timeout_s)
        return True

    def _memory(self) -> list[dict[str, Any]]:
        """What every server says of its memory; it must answer for that. Raises what redis-py raises."""
        from redis.exceptions import NoPermissionError

        client = self._connected()
        try:
            told = client.info("memory", **({"target_nodes": client.PRIMARIES} if self._in_cluster else {}))
        except NoPermissionError:
            return []
        return [told] if "maxmemory" in told else list(told.values())  # of one node, or by node

    def _look_at(self, memory: list[dict[str, Any]]) -> None:
        """Learn how much there is room for, and warn of a server that does not evict."""
        self.capacity_bytes = sum(int(of.get("maxmemory", 0)) for of in memory) or None
        wrong = [] if memory else ["no right to tell its memory limit (INFO), so whether it evicts is not known"]
        for of in memory:
            policy = str(of.get("maxmemory_policy", ""))
            if not int(of.get("maxmemory", 0)):
                wrong.append("no maxmemory, so it grows until its machine is full")
            elif not policy.startswith("allkeys") and (self._ttl_ms is None or not policy.startswith("volatile")):
                wrong.append(f"maxmemory-policy {policy}, so it refuses what is new once it is full")
        if wrong and self._warns:
            self._warns = False
            warnings.warn(
                f"{self.place} has {wrong[0]}; set both, such as: "
                "redis-cli config set maxmemory 20gb; redis-cli config set maxmemory-policy allkeys-lru",
                RuntimeWarning,
                stacklevel=4,
            )


def _value(reply: Any) -> memoryview | None:
    return memoryview(reply) if isinstance(reply, bytes) else None


def must(reply: Any) -> Any:
    """A reply that is no error. Raises UnavailableError for one that is: the server refused the command."""
    if isinstance(reply, Exception):
        raise UnavailableError(RefusedError(str(reply))) from reply
    return reply
