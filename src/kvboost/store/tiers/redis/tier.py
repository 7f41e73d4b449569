"""Blocks in a Redis or Valkey server, shared by every process and machine that uses it.

Made by the engine for a namespace; used as a :class:`kvboost.extend.Tier`. The value is the record as on disk
(:mod:`kvboost.store.record.format`), in pieces of at most a megabyte. Invariants: only whole records that passed
their checks are handed out; the ledger of all processes with one prefix never counts more than the capacity of the
one that writes; no lookup waits longer than ``patience_s`` beyond what its bytes take at ``slowest_bytes_per_s``, and
none at all while the breaker is open.

What survives is what the server keeps: its own eviction or a restart without persistence is a miss. One server (with
replicas, if you like); a Redis Cluster is not supported, as the ledger's scripts touch several keys.
"""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvboost.errors import ConfigError, RecordError
from kvboost.store.health import Troubles
from kvboost.store.record.format import RecordFormat
from kvboost.store.record.header import read_header
from kvboost.store.tiers.redis.ledger import Ledger, Page, Writing
from kvboost.store.tiers.redis.loading import Loading, OversizedValueError, seal_name, split
from kvboost.store.tiers.redis.resp import Link, Patience, ProtocolError, ServerError
from kvboost.store.tiers.redis.server import Server, UnavailableError
from kvboost.types import BlockInfo, KVBlock, PutOutcome, StoreStats

_MAX_VARIANTS = 8  # of one content in a lookup, as in memory
_MAX_UNWRITTEN = 512  # uses and missing blocks remembered before they go into the ledger
_AT_ONCE = 256  # chunks in one script: others must get their turn
_BEHIND_S = 1.0  # patience of what is done behind requests
_ENTRY_BYTES = 4096  # what a chunk takes in Redis beside its record: names, entries, the ends of pages (measured)
_REMEDY = "check that the server runs, that remote_url is right and that the network is fast enough"

T = TypeVar("T")


class RedisTier:
    """Records in a server, at most ``capacity_bytes`` of them under one ``prefix``."""

    def __init__(
        self,
        url: str,
        *,
        capacity_bytes: int,
        records: RecordFormat,
        ttl_seconds: float | None = None,
        tenant_quota_bytes: int | None = None,
        prefix: str = "kvboost",
        patience_s: float = 0.03,
        slowest_bytes_per_s: float = 64e6,
    ) -> None:
        """``url`` is ``redis://`` or ``rediss://`` (TLS), with password and database if there are any.

        ``records`` says whose blocks these are and how they are written. A block is gone ``ttl_seconds`` after it was
        stored. A server that cannot be reached now is a warning, and is used as soon as it can.
        """
        if ttl_seconds is not None and ttl_seconds < 0.001:
            raise ConfigError(f"ttl_seconds={ttl_seconds} keeps nothing; give a positive time, or None to keep blocks")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", prefix):
            raise ConfigError(f"prefix={prefix!r} must be letters, digits, '_', '.' or '-'")
        self._records = records
        self._capacity = capacity_bytes
        self._quota = tenant_quota_bytes
        self._ttl_ms = 0 if ttl_seconds is None else int(ttl_seconds * 1000)
        self._prefix = prefix
        self._troubles = Troubles("redis")
        self._is_first = True
        self._begin()
        self._server = Server(url, patience_s=patience_s, slowest_bytes_per_s=slowest_bytes_per_s)
        self._behind(lambda link, patience: link.call([(b"PING",)], patience), None)  # connects

    def _begin(self) -> None:
        """What is of one namespace alone."""
        self._ledger = Ledger(self._prefix, tenant=self._records.namespace.tenant, space=self._records.space)
        self._lock = threading.Lock()  # of everything below; never held while the server is used
        self._uses: dict[bytes, None] = {}
        self._missing: set[bytes] = set()
        self._hits = self._misses = self._rejected = self._evictions = self._refused = 0

    def beside(self, records: RecordFormat) -> RedisTier:
        """The same server for another namespace, over the same connections, with the same limits.

        Closing it leaves this one open; closing this one ends both.
        """
        other = copy.copy(self)
        other._records, other._is_first = records, False
        other._begin()
        return other

    @property
    def name(self) -> str:
        """``"redis"``."""
        return "redis"

    @property
    def outlives_process(self) -> bool:
        """Yes."""
        return True

    @property
    def is_available(self) -> bool:
        """Whether the server answered when it was last used. False: every call is a miss, at once."""
        return not self._server.breaker.is_open

    # Finding

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these have a value, in one round trip."""

        def exist(link: Link, patience: Patience) -> list[bool]:
            replies = link.call([(b"EXISTS", self._ledger.value(key)) for key in keys], patience)
            return [reply == 1 for reply in replies]

        return self._before(exist, [False] * len(keys)) if keys else []

    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        """For each content, the most recently used blocks that hold it, newest last."""
        nothing: list[list[BlockInfo]] = [[] for _ in content_keys]
        if not content_keys:
            return nothing
        return self._before(
            lambda link, patience: self._ledger.variants(link, patience, content_keys, _MAX_VARIANTS), nothing
        )

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        """The blocks under these keys, in this order; receiving begins at once and runs a little ahead."""
        records = Loading(keys, server=self._server, ledger=self._ledger, max_bytes=self._records.max_bytes)
        return self._checked(records, keys)

    def _checked(self, records: Loading, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        reported = False
        try:
            for key, record in zip(keys, records, strict=True):
                if records.unavailable is not None and not reported:
                    reported = True
                    self._report(records.unavailable)
                block = self._block(key, record)
                with self._lock:
                    self._hits += block is not None
                    self._misses += block is None
                    if record is None and records.unavailable is None and len(self._missing) < _MAX_UNWRITTEN:
                        self._missing.add(key)  # there may be an entry that says otherwise
                yield block
        finally:
            records.close()

    def _block(self, key: bytes, record: memoryview | None) -> KVBlock | None:
        if record is None:
            return None
        try:
            return self._records.decode(record, key)
        except RecordError as error:
            self._reject(key, error)
            return None

    def _reject(self, key: bytes, error: Exception) -> None:
        with self._lock:
            self._rejected += 1
        remedy = "look for others who write under this prefix, and at the server if it goes on"
        self._troubles.met("a record was damaged and is removed", error, remedy=remedy)
        self._before(lambda link, patience: self._ledger.remove(link, patience, [self._ledger.id(key)]), None)

    # Keeping

    def store(self, block: KVBlock) -> PutOutcome:
        """Write ``block``; others go, leaves first and least recently used first, to stay within the budget."""
        outcome = PutOutcome.REFUSED
        try:
            size = self._records.size_of(block) + _ENTRY_BYTES
            if size <= self._capacity:
                outcome = self._behind(
                    lambda link, patience: self._stored(link, patience, block, size), PutOutcome.REFUSED
                )
        except RecordError as error:
            self._troubles.met("a block cannot be written", error, remedy="use smaller chunks or another codec")
        with self._lock:
            self._refused += outcome is PutOutcome.REFUSED
        return outcome

    def _stored(self, link: Link, patience: Patience, block: KVBlock, size: int) -> PutOutcome:
        self._write_uses(link, patience)  # so that those who go are the right ones
        if self._ledger.has(link, patience, block.key):
            return PutOutcome.PRESENT
        record = self._records.encode(block)
        pieces = split(record.parts, record.nbytes)
        writing = Writing(
            key=block.key,
            seal=seal_name(read_header(record.parts[0], record.nbytes).seal),
            writer=os.urandom(8).hex().encode(),
            pieces=len(pieces),
        )
        room = self._ledger.reserve(
            link, patience, writing, _info(block), size=size, capacity=self._capacity, quota=self._quota
        )
        with self._lock:
            self._evictions += room.evicted
        if room.was_broken:
            remedy = "set maxmemory-policy to noeviction or volatile-lru, and maxmemory well above capacity_bytes"
            self._troubles.met("the server dropped a part of the ledger", "all blocks are given up", remedy=remedy)
        if room.is_new:
            threading.Thread(target=self._sweep, name="kvboost-redis-sweep", daemon=True).start()
        if room.outcome is not None:
            return room.outcome
        written = self._ledger.write(link, patience, writing, pieces, ttl_ms=self._ttl_ms)
        return PutOutcome.STORED if written else PutOutcome.REFUSED

    def used(self, chain: Sequence[bytes]) -> None:
        """The keys of one prompt were used: each becomes more recent than its successors."""
        with self._lock:
            for key in reversed(chain):
                self._uses.pop(key, None)
                self._uses[key] = None
            many = len(self._uses) >= _MAX_UNWRITTEN
            while len(self._uses) > 2 * _MAX_UNWRITTEN:  # the server is away
                self._uses.pop(next(iter(self._uses)))
        if many:
            self._behind(self._write_uses, None)

    def _write_uses(self, link: Link, patience: Patience) -> None:
        with self._lock:
            uses, self._uses = list(self._uses), {}
            missing, self._missing = list(self._missing), set()
        if uses:
            self._ledger.touch(link, patience, uses)
        if missing:
            self._ledger.forget(link, patience, missing)

    def flush(self) -> None:
        """Write down recency. What was stored lies in the server already."""
        self._behind(self._write_uses, None)

    # Forgetting

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove these blocks and their entries."""
        self._remove([self._ledger.id(key) for key in keys])

    def _remove(self, ids: Sequence[bytes]) -> None:
        for begin in range(0, len(ids), _AT_ONCE):
            self._behind(partial(self._ledger.remove, ids=ids[begin : begin + _AT_ONCE]), None)

    def clear(self) -> None:
        """Remove every block of this namespace."""
        self._remove_all(None)

    def purge(self, tenant: bytes) -> None:
        """Remove every block of a tenant, of whatever model or codec. ``tenant`` is the digest in its namespace."""
        self._remove_all(tenant)

    def _remove_all(self, tenant: bytes | None) -> None:
        cursor = b"0"
        while True:
            nothing: Page = (b"0", [])
            cursor, ids = self._behind(partial(self._ledger.ids, tenant=tenant, cursor=cursor), nothing)
            self._remove(ids)
            if cursor == b"0":
                break
        self._sweep()  # also what the ledger has lost sight of

    def _sweep(self) -> None:
        cursor = self._behind(partial(self._ledger.sweep, cursor=b"0"), b"0")
        while cursor != b"0":
            cursor = self._behind(partial(self._ledger.sweep, cursor=cursor), b"0")

    # The rest

    def stats(self) -> StoreStats:
        """Chunks and bytes of this namespace, those being written included; counters of this process."""
        chunks, held, _ = self._behind(self._ledger.totals, (0, 0, 0))
        with self._lock:
            return StoreStats(
                tier=self.name,
                chunks=chunks,
                bytes=held,
                capacity_bytes=self._capacity,
                hits=self._hits,
                misses=self._misses,
                rejected=self._rejected,
                evictions=self._evictions,
                refused=self._refused,
                leased=0,
            )

    def prefix_bytes(self) -> int:
        """What all namespaces under the prefix take of the budget, by the ledger."""
        return self._behind(self._ledger.totals, (0, 0, 0))[2]

    def troubles(self) -> dict[str, int]:
        """How often each kind of trouble was met."""
        return self._troubles.counts()

    def close(self) -> None:
        """Write down recency and close the connections. What was stored stays."""
        self._behind(self._write_uses, None)
        if self._is_first:
            self._server.close()

    def _before(self, work: Callable[[Link, Patience], T], otherwise: T) -> T:
        """For what a request waits for."""
        return self._with_link(work, otherwise, self._server.patience())

    def _behind(self, work: Callable[[Link, Patience], T], otherwise: T) -> T:
        """For what no request waits for."""
        return self._with_link(work, otherwise, self._server.patience(_BEHIND_S))

    def _with_link(self, work: Callable[[Link, Patience], T], otherwise: T, patience: Patience) -> T:
        """The server's answer, or ``otherwise`` if it has none: the cache may only help."""
        try:
            with self._server.link(patience) as link:
                return work(link, patience)
        except UnavailableError as error:
            self._report(error)
            return otherwise

    def _report(self, error: UnavailableError) -> None:
        cause = error.cause
        if isinstance(cause, OversizedValueError):
            self._reject(cause.key, cause)
        elif isinstance(cause, ServerError):
            self._troubles.met("the server refused a command", cause, remedy="look at the server's limits and rights")
        elif isinstance(cause, ProtocolError):
            self._troubles.met("what answers is no Redis server", cause, remedy=_REMEDY)
        elif cause is not None:
            self._troubles.met("the server cannot be used", cause, remedy=_REMEDY)


def _info(block: KVBlock) -> BlockInfo:
    return BlockInfo(
        key=block.key,
        parent_key=block.parent_key,
        content_key=block.content_key,
        nbytes=block.nbytes,
        bitwise=block.bitwise,
        start=block.start,
        context=block.context,
        approx_depth=block.approx_depth,
    )
