"""Blocks in a Redis or Valkey server, shared by every process and machine that uses it.

Made by the engine for a namespace; used as a :class:`kvboost.extend.Tier`. The value is the record as on disk
(:mod:`kvboost.store.record.format`), in pieces of at most a megabyte. Invariants: only whole records that passed
their checks are handed out; the ledger of all processes with one prefix never counts more than the limit that lies
there; no lookup waits longer than ``timeout_s`` beyond what its bytes take at ``min_bytes_per_s``, and
none at all while the breaker is open.

What survives is what the server keeps: its own eviction or a restart without persistence is a miss. One server, the
master that Sentinels name, or a Redis Cluster: there the ledger lies on one node, and the values on all of them
(:mod:`kvboost.store.tiers.redis.cluster`). Without the ledger's node nothing is stored, but what others have is found.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from kvboost.config import DEFAULT_PLACE_BYTES
from kvboost.errors import ConfigError
from kvboost.store.record.format import RecordFormat
from kvboost.store.record.header import read_header
from kvboost.store.tiers.base import MAX_VARIANTS, Backend, RecordTier, Unwritten, info_of
from kvboost.store.tiers.redis.elsewhere import Records
from kvboost.store.tiers.redis.ledger import Ledger, Reservation, Writing
from kvboost.store.tiers.redis.loading import PIECE_BYTES, Loading, OversizedValueError, seal_name, split
from kvboost.store.tiers.redis.places import open_place
from kvboost.store.tiers.redis.purging import remove_ids, remove_owned, sweep
from kvboost.store.tiers.redis.resp import Deadline, Link, ProtocolError, ServerError
from kvboost.store.tiers.redis.server import PREFIX, Patience, UnavailableError
from kvboost.types import BlockInfo, KVBlock, PutOutcome

_MAX_STEPS = 8  # of eviction for one block; what does not fit then is tried again later
_BEHIND_S = 1.0  # deadline of what no request waits for
_ENTRY_BYTES = 4096  # what a chunk takes in Redis beside its record: names, entries, the ends of pages (measured)
_REMEDY = "check that the server runs, that remote_url is right and that the network is fast enough"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Limits:
    tenant_quota_bytes: int | None
    ttl_ms: int
    """0: what is stored does not expire."""


class _RedisBackend(Backend):
    """The ledger's server, where values lie if not there, and what may be stored."""

    def __init__(self, url: str, *, prefix: str, patience: Patience, wanted_bytes: int | None, limits: _Limits) -> None:
        self._early_lock = threading.Lock()
        self._early: list[UnavailableError] | None = []  # reported before there is anything to count them with
        self.place = open_place(url, prefix=prefix, patience=patience, report=self.report)
        self.limits = limits
        super().__init__(
            self.place.kind, place=self.place.url, wanted_bytes=wanted_bytes, default_bytes=DEFAULT_PLACE_BYTES
        )
        with self._early_lock:
            early, self._early = self._early, None
        for error in early or ():
            self.report(error)

    @property
    def is_available(self) -> bool:
        return self.place.is_available

    def report(self, error: UnavailableError) -> None:
        """Count a failure, and log the first of its kind. What was known before is not counted again."""
        with self._early_lock:
            if self._early is not None:
                self._early.append(error)
                return
        cause = error.cause
        if isinstance(cause, ServerError):
            self.health.failed("the server refused a command", cause, remedy="look at the server's limits and rights")
        elif isinstance(cause, ProtocolError):
            self.health.failed("what answers is no Redis server", cause, remedy=_REMEDY)
        elif cause is not None:
            self.health.failed("the server cannot be used", cause, remedy=_REMEDY)

    def close(self) -> None:
        self.place.close()


class RedisTier(RecordTier[_RedisBackend]):
    """Records in a server under one ``prefix``, as many as its limit allows.

    Leaves are evicted first, and of them the least recently used.
    """

    damage_remedy = "look for others who write under this prefix, and at the server if it goes on"

    def __init__(
        self,
        url: str,
        *,
        capacity_bytes: int | None = None,
        records: RecordFormat,
        ttl_seconds: float | None = None,
        tenant_quota_bytes: int | None = None,
        prefix: str = PREFIX,
        timeout_s: float = 0.03,
        min_bytes_per_s: float = 64e6,
    ) -> None:
        """``url`` is ``redis://`` or ``rediss://`` (TLS), with password and database if there are any; or
        ``redis+cluster://HOST:PORT``, ``redis+sentinel://HOST:PORT,HOST:PORT/SERVICE``, or
        ``mooncake://MASTER:PORT?ledger=redis://HOST:PORT``: the values in a Mooncake Store.

        ``records`` says whose blocks these are and how they are written. ``capacity_bytes`` is the limit of a server
        that has none yet; None takes the default, or what lies there. A block is gone ``ttl_seconds`` after it was
        stored. A server that cannot be reached now is a warning, and is used as soon as it can.
        """
        if ttl_seconds is not None and ttl_seconds < 0.001:
            raise ConfigError(f"ttl_seconds={ttl_seconds} keeps nothing; give a positive time, or None to keep blocks")
        if ttl_seconds is not None and url.startswith("mooncake://"):
            raise ConfigError("values of a Mooncake Store do not expire; leave ttl_seconds out, or use redis://")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", prefix):
            raise ConfigError(f"prefix={prefix!r} must be letters, digits, '_', '.' or '-'")
        ttl_ms = 0 if ttl_seconds is None else int(ttl_seconds * 1000)
        backend = _RedisBackend(
            url,
            prefix=prefix,
            patience=Patience(timeout_s, min_bytes_per_s),
            wanted_bytes=capacity_bytes,
            limits=_Limits(tenant_quota_bytes, ttl_ms),
        )
        self._open(backend, records, owns_backend=True)
        limit = self._behind(self._ledger.capacity, None)  # connects
        if limit is not None:
            backend.limited_to(limit)

    def _open(self, backend: _RedisBackend, records: RecordFormat, *, owns_backend: bool) -> None:
        super()._open(backend, records, owns_backend=owns_backend)
        self._server, self._elsewhere, self._limits = backend.place.server, backend.place.elsewhere, backend.limits
        self.name = backend.place.kind
        self._ledger = Ledger(
            self._server.prefix, tenant=records.namespace.tenant, space=records.space, elsewhere=self._elsewhere
        )
        self._unwritten = Unwritten()

    # Finding

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these have a value, in one round trip."""
        if self._elsewhere is not None:
            return [there is True for there in self._elsewhere.exist([self._ledger.value(key) for key in keys])]

        def exist(link: Link) -> list[bool]:
            replies = link.call([(b"EXISTS", self._ledger.value(key)) for key in keys])
            for reply in replies:
                if isinstance(reply, ServerError):
                    raise reply
            return [reply == 1 for reply in replies]

        return self._before(exist, [False] * len(keys)) if keys else []

    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        """For each content, the most recently used blocks that hold it, newest last."""
        nothing: list[list[BlockInfo]] = [[] for _ in content_keys]
        if not content_keys:
            return nothing
        return self._before(lambda link: self._ledger.variants(link, content_keys, MAX_VARIANTS), nothing)

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        """The blocks under these keys, in this order; receiving begins at once and runs a little ahead."""
        ledger, max_bytes = self._ledger, self._records.max_bytes
        records: Records
        if self._elsewhere is not None:
            records = self._elsewhere.load(keys, ledger=ledger, max_bytes=max_bytes)
        else:
            records = Loading(keys, server=self._server, ledger=ledger, max_bytes=max_bytes)
        return self._counted(self._checked(records, keys))

    def _checked(self, records: Records, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        reported: set[UnavailableError] = set()  # of several nodes each may have its own
        try:
            for key, record in zip(keys, records, strict=True):
                why = records.unavailable
                if why is not None and why not in reported:
                    reported.add(why)
                    self._report(why)
                if record is None and why is None:
                    with self._lock:
                        self._unwritten.missed(key)
                yield self._decoded(key, record)
        finally:
            records.close()

    def _discard(self, key: bytes) -> None:
        self._before(lambda link: self._ledger.remove(link, [self._ledger.id(key)]), None)

    # Keeping

    def _store(self, block: KVBlock) -> PutOutcome:
        return self._behind(lambda link: self._stored(link, block), PutOutcome.REFUSED)

    def _stored(self, link: Link, block: KVBlock) -> PutOutcome:
        elsewhere = self._elsewhere
        if elsewhere is not None and not elsewhere.takes(self._ledger.value(block.key)):
            return PutOutcome.REFUSED  # nothing is evicted in vain
        limit = None if elsewhere is None else elsewhere.max_record_bytes
        if limit is not None and self._records.size_of(block) > limit:
            self._report(UnavailableError(ServerError(f"a record of more than {limit:,} bytes; use smaller chunks")))
            return PutOutcome.REFUSED
        self._write_uses(link)  # so that the right ones are evicted
        if self._ledger.has(link, block.key):
            return PutOutcome.PRESENT
        record = self._records.encode(block)
        pieces = split(record.parts, record.nbytes, PIECE_BYTES if elsewhere is None else elsewhere.piece_bytes)
        writing = Writing(
            key=block.key,
            seal=seal_name(read_header(record.parts[0], record.nbytes).seal),
            writer=os.urandom(8).hex().encode(),
            pieces=len(pieces),
        )
        reserved = self._reserved(link, writing, block)
        if reserved.was_broken:
            remedy = "set maxmemory-policy to noeviction or volatile-lru, and maxmemory well above capacity_bytes"
            self._backend.health.failed(
                "the server dropped a part of the ledger", "all blocks are dropped", remedy=remedy
            )
        if reserved.must_sweep:
            threading.Thread(target=self._sweep, name="kvboost-redis-sweep", daemon=True).start()
        if reserved.outcome is not None or reserved.is_partial:
            return reserved.outcome or PutOutcome.REFUSED
        written = self._ledger.write(link, writing, pieces, ttl_ms=self._limits.ttl_ms)
        return PutOutcome.STORED if written else PutOutcome.REFUSED

    def _reserved(self, link: Link, writing: Writing, block: KVBlock) -> Reservation:
        """Enter the block in the ledger, evicting others for it, some at a time."""
        must_sweep = was_broken = False
        for _ in range(_MAX_STEPS):
            reserved = self._ledger.reserve(
                link,
                writing,
                info_of(block),
                size=self._records.size_of(block) + _ENTRY_BYTES,
                wanted=self._backend.wanted_bytes,
                quota=self._limits.tenant_quota_bytes,
            )
            self._backend.limited_to(reserved.capacity)
            with self._lock:
                self._counters.evictions += reserved.evicted
            must_sweep, was_broken = must_sweep or reserved.must_sweep, was_broken or reserved.was_broken
            if not reserved.is_partial:
                break
        return replace(reserved, must_sweep=must_sweep, was_broken=was_broken)

    def used(self, chain: Sequence[bytes]) -> None:
        """The keys of one prompt were used: each becomes more recent than its successors."""
        with self._lock:
            is_due = self._unwritten.used(chain)
        if is_due:
            self._behind(self._write_uses, None)

    def _write_uses(self, link: Link) -> None:
        with self._lock:
            uses, missing = self._unwritten.take()
        if uses:
            self._ledger.touch(link, list(uses))
        if missing:
            self._ledger.delete_missing(link, missing)

    def flush(self) -> None:
        """Write down recency. What was stored lies in the server already."""
        self._behind(self._write_uses, None)

    # Forgetting

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove these blocks and their entries."""
        remove_ids(self._ask, self._ledger, [self._ledger.id(key) for key in keys])

    def clear(self) -> None:
        """Remove every block of this namespace."""
        remove_owned(self._ask, self._ledger, self._ledger.space)

    def purge(self, tenant: bytes) -> None:
        """Remove every block of a tenant, of whatever model or codec. ``tenant`` is the digest in its namespace."""
        remove_owned(self._ask, self._ledger, tenant.hex().encode())

    def purge_all(self) -> None:
        """Remove every block under the prefix, of whatever tenant."""
        remove_owned(self._ask, self._ledger, b"*")

    def _sweep(self) -> None:
        # In a thread of its own, which may outlive the server: who turns warnings into errors has them counted instead.
        with suppress(Warning):
            sweep(self._ask, self._ledger)

    def _ask(self, work: Callable[[Link], T]) -> T | None:
        return self._behind(work, None)

    # The rest

    def _totals(self) -> tuple[int, int]:
        chunks, nbytes, _ = self._behind(self._ledger.totals, (0, 0, 0))
        return chunks, nbytes

    def prefix_bytes(self) -> int:
        """What all namespaces under the prefix take of the budget, by the ledger."""
        return self._behind(self._ledger.totals, (0, 0, 0))[2]

    def close(self) -> None:
        """Write down recency, and close the connections if they were made for this tier. What was stored stays."""
        self._behind(self._write_uses, None)
        super().close()

    def _before(self, work: Callable[[Link], T], otherwise: T) -> T:
        """For what a request waits for."""
        return self._with_link(work, otherwise, self._server.deadline())

    def _behind(self, work: Callable[[Link], T], otherwise: T) -> T:
        """For what no request waits for."""
        return self._with_link(work, otherwise, self._server.deadline(_BEHIND_S))

    def _with_link(self, work: Callable[[Link], T], otherwise: T, deadline: Deadline) -> T:
        """The server's answer, or ``otherwise`` if it has none: the cache may only help."""
        try:
            with self._server.link(deadline) as link:
                return work(link)
        except UnavailableError as error:
            self._report(error)
            return otherwise

    def _report(self, error: UnavailableError) -> None:
        if isinstance(error.cause, OversizedValueError):
            self._reject(error.cause.key, error.cause)
        else:
            self._backend.report(error)
