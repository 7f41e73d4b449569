"""Blocks in a Redis or Valkey server, a cluster, or a Mooncake Store, shared by every process and machine that uses it.

Made by the engine for a namespace; used as a :class:`kvboost.extend.Tier`. Each record (as on disk,
:mod:`kvboost.store.record.format`) is one value under ``PREFIX:2:TENANT:SPACE:KEY``; under
``PREFIX:2:TENANT:SPACE:content:CONTENT`` a few pointers say where a content is. The server keeps itself: it has the
limit, and evicts what was used least recently. Invariants: only whole records that passed their checks are handed out;
no lookup waits longer than ``timeout_s`` beyond what its bytes take at ``min_bytes_per_s``, and none at all while the
server's breaker is open.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence

from kvboost.config import DEFAULT_TTL_S
from kvboost.errors import ConfigError
from kvboost.store.record.format import RecordFormat
from kvboost.store.record.header import info_of
from kvboost.store.tiers.base import Backend, RecordTier
from kvboost.store.tiers.mooncake import MooncakeValues
from kvboost.store.tiers.redis.values import FORMAT, RedisValues
from kvboost.store.tiers.remote import Patience, RefusedError, Report, UnavailableError
from kvboost.types import BlockInfo, KVBlock, PutOutcome

PREFIX = "kvboost"
"""Of all names, as the tiers of engines have it."""
_UNLIMITED = 2**63 - 1
_REMEDY = "check that the server runs, that remote_url is right and that the network is fast enough"
_POINTER = struct.Struct("<32s?QQIB32s")  # key, bitwise, nbytes, start, approx_depth, whether there is a parent, parent


def open_values(
    url: str, *, prefix: str, patience: Patience, ttl_ms: int | None, report: Report, warns: bool = True
) -> RedisValues | MooncakeValues:
    """What an URL names, to be opened. Raises ConfigError for one that cannot work, or if a package is missing."""
    if url.startswith("mooncake://"):
        return MooncakeValues(url, prefix=prefix, patience=patience, report=report)
    return RedisValues(url, prefix=prefix, patience=patience, ttl_ms=ttl_ms, report=report, warns=warns)


class _RedisBackend(Backend):
    """The values of all namespaces, and their health."""

    def __init__(self, url: str, *, prefix: str, patience: Patience, ttl_ms: int | None) -> None:
        self.prefix = prefix
        self.values = open_values(url, prefix=prefix, patience=patience, ttl_ms=ttl_ms, report=self.report)
        super().__init__(self.values.kind, capacity_bytes=_UNLIMITED)
        try:
            self.values.open()
        except Warning:  # who turns warnings into errors gets no tier
            self.values.close()
            raise

    @property
    def is_available(self) -> bool:
        return self.values.is_available

    def report(self, error: UnavailableError) -> None:
        """Count a failure, and log the first of its kind. What was known before is not counted again."""
        if isinstance(error.cause, RefusedError):
            remedy = "look at the server's memory limit, its maxmemory-policy and its rights"
            self.health.failed("the server refused a command", error.cause, remedy=remedy)
        elif error.cause is not None:
            self.health.failed("the server cannot be used", error.cause, remedy=_REMEDY)

    def close(self) -> None:
        self.values.close()


class RedisTier(RecordTier[_RedisBackend]):
    """Records in a server under one ``prefix``. What is evicted for new ones is the server's choice."""

    damage_remedy = "look for others who write under this prefix, and at the server if it goes on"

    def __init__(
        self,
        url: str,
        *,
        records: RecordFormat,
        ttl_seconds: float | None = DEFAULT_TTL_S,
        prefix: str = PREFIX,
        timeout_s: float = 0.03,
        min_bytes_per_s: float = 64e6,
    ) -> None:
        """``url`` is ``redis://`` or ``rediss://`` (TLS), with password and database if there are any; or
        ``redis+cluster://HOST:PORT``, ``redis+sentinel://HOST:PORT,HOST:PORT/SERVICE``, or ``mooncake://MASTER:PORT``.

        ``records`` says whose blocks these are and how they are written. A block is gone ``ttl_seconds`` after it was
        stored, or before, if the server evicts it. A server that cannot be reached now is a warning, and is used as
        soon as it can.
        """
        if ttl_seconds is not None and ttl_seconds < 0.001:
            raise ConfigError(f"ttl_seconds={ttl_seconds} keeps nothing; give a positive time, or None to keep blocks")
        if url.startswith("mooncake://") and ttl_seconds not in (None, DEFAULT_TTL_S):
            raise ConfigError("values of a Mooncake Store do not expire; leave the time out, or use redis://")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", prefix):
            raise ConfigError(f"prefix={prefix!r} must be letters, digits, '_', '.' or '-'")
        ttl_ms = None if ttl_seconds is None else int(ttl_seconds * 1000)
        backend = _RedisBackend(url, prefix=prefix, patience=Patience(timeout_s, min_bytes_per_s), ttl_ms=ttl_ms)
        self._open(backend, records, owns_backend=True)

    def _open(self, backend: _RedisBackend, records: RecordFormat, *, owns_backend: bool) -> None:
        super()._open(backend, records, owns_backend=owns_backend)
        self._values = backend.values
        self.name = backend.values.kind
        self._names = f"{backend.prefix}:{FORMAT}:{records.namespace.tenant.hex()}:{records.space.hex()}:"

    def _name(self, key: bytes) -> str:
        return self._names + key.hex()

    # Finding

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these have a value, in one round trip."""
        return self._values.exist([self._name(key) for key in keys]) if keys else []

    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        """For each content, the newest blocks that hold it, newest last, without those that are gone."""
        if not content_keys:
            return []
        noted = self._values.pointers([self._content(content) for content in content_keys])
        found = [_read_pointers(some, content) for some, content in zip(noted, content_keys, strict=True)]
        keys = list({info.key for infos in found for info in infos})
        there = {key for key, is_there in zip(keys, self.contains(keys), strict=True) if is_there}
        return [[info for info in infos if info.key in there] for infos in found]

    def _content(self, content: bytes) -> str:
        return f"{self._names}content:{content.hex()}"

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        """The blocks under these keys, in this order; receiving begins at once and runs a little ahead."""
        values = self._values.load([self._name(key) for key in keys], max_bytes=self._records.max_bytes)
        return self._counted(self._decoded(key, value) for key, value in zip(keys, values, strict=True))

    # Keeping

    def _store(self, block: KVBlock) -> PutOutcome:
        pointer = self._content(block.content_key), _pointer(info_of(block))
        return self._values.put(self._name(block.key), lambda: self._records.encode(block), pointer=pointer)

    def used(self, chain: Sequence[bytes]) -> list[bytes]:
        """The keys of one prompt were used: each is touched after its successors, so that these go first.

        Returns those that are gone: the server has evicted them, or they had lain there for ``ttl_seconds``.
        """
        there = self._values.touch([self._name(key) for key in reversed(chain)])
        return [key for key, is_there in zip(chain, reversed(there), strict=True) if not is_there]

    # Forgetting

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove these blocks."""
        self._values.remove([self._name(key) for key in keys])

    def _discard(self, key: bytes) -> None:
        self._values.remove([self._name(key)], is_waited_for=True)

    def _forget(self, tenant: bytes | None, space: bytes | None) -> None:
        """By a scan of the server."""
        try:
            self._values.purge(":".join(part.hex() for part in (tenant, space) if part is not None))
        except UnavailableError as error:
            self._backend.report(error)

    def _totals(self) -> tuple[int, int]:
        """Nothing: only a scan of the whole server would tell, and every process that shares it would make one."""
        self._backend.capacity_bytes = self._values.capacity_bytes or _UNLIMITED
        return 0, 0


def _pointer(info: BlockInfo) -> bytes:
    parent = info.parent_key
    fixed = (info.key, info.bitwise, info.nbytes, info.start, info.approx_depth, parent is not None, parent or b"")
    return _POINTER.pack(*fixed) + info.context


def _read_pointers(noted: Sequence[bytes], content: bytes) -> list[BlockInfo]:
    """What can be read of it: it is only a hint."""
    infos = []
    for packed in noted:
        if len(packed) >= _POINTER.size:
            key, bitwise, nbytes, start, approx_depth, has_parent, parent = _POINTER.unpack_from(packed)
            context = packed[_POINTER.size :]
            parent_key = parent if has_parent else None
            infos.append(BlockInfo(key, parent_key, content, nbytes, bitwise, start, context, approx_depth))
    return infos
