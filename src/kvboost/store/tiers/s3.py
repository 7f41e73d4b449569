"""Blocks in an object store (S3 and what speaks its protocol): the cold tier, shared by all who may read the bucket.

Made by the engine for a namespace; used as a :class:`kvboost.extend.Tier`. One object per record, another without
bytes that names it by its content::

    TENANT/SPACE/records/KEY.kv
    TENANT/SPACE/contents/CONTENT/STAMP-KEY

Invariants: only whole records that passed their checks are handed out; no object is read beyond the records' limit.

It evicts nothing: let the bucket's lifecycle rules expire old objects, which are then misses. With a limit, which lies
in the bucket as an object of its own, it refuses what would not fit in the namespace, by what this process saw and
wrote: others who write at the same time are not counted. Others delete, too (lifecycle rules, purges): while it
refuses, the namespace is listed again every few minutes, with no request waiting. Sizes in :meth:`ObjectTier.stats`
are taken by listing the namespace, which takes a while for many objects.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, suppress
from typing import Any, TypeVar

from kvboost.direct_io import page_aligned
from kvboost.errors import RecordError
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.base import MAX_VARIANTS, Backend, RecordTier, in_order
from kvboost.store.tiers.buckets import CAPACITY, PROBE, open_objects, read_limit, tenants_in
from kvboost.store.tiers.remote import Breaker
from kvboost.types import BlockInfo, KVBlock, PutOutcome

_UNLIMITED = 2**63 - 1
_HEADER_BYTES = 16 * 1024  # read of a record to know what it is; most headers are a page
_PAGE_OF_NAMES = 1000
_RELIST_S = 300.0  # between two lists of a namespace that is full: with many objects one takes a while, and is paid for
_REMEDY = "check the bucket, the credentials and the network"

T = TypeVar("T")
S = TypeVar("S")


class _ObjectBackend(Backend):
    """The object store, the threads that use it, and its breaker."""

    def __init__(
        self,
        url: str,
        *,
        wanted_bytes: int | None,
        tenant_quota: int | None,
        timeout_s: float,
        readers: int,
        config: Mapping[str, Any] | None,
    ) -> None:
        super().__init__("objects", place=url, wanted_bytes=wanted_bytes, default_bytes=_UNLIMITED)
        self.objects, self.failures = open_objects(url, timeout_s=timeout_s, config=config)
        self._tenant_quota = tenant_quota
        self._limit_is_known = False
        self._timeout_s = timeout_s
        self.ahead = readers + 2
        self.pool = ThreadPoolExecutor(readers, thread_name_prefix="kvboost-objects")
        self._breaker = Breaker(self._probe, name="kvboost-objects-probe")

    @property
    def is_available(self) -> bool:
        return not self._breaker.is_open

    def each(self, work: Callable[[S], T], items: Sequence[S], otherwise: T, *, waited_for: bool = True) -> list[T]:
        """The answers for all items, asked for at once, or ``otherwise``: the cache may only help.

        What no request waits for may be several requests of the store's, each with its time limit.
        """
        if self._breaker.is_open:
            return [otherwise for _ in items]
        waiting = [self.pool.submit(self.guarded, work, item) for item in items]
        return [self.result(answer, otherwise, waited_for=waited_for) for answer in waiting]

    def guarded(self, work: Callable[[S], T], item: S) -> T | Exception | None:
        """In the pool: what the store fails with is returned, for the caller's thread to report. None if not tried."""
        if self._breaker.is_open:
            return None
        try:
            return work(item)
        except self.failures.all as error:
            self._breaker.failed()
            return error

    def result(self, answer: Future[T | Exception | None], otherwise: T, *, waited_for: bool = True) -> T:
        """What ``guarded`` came to, or ``otherwise``."""
        try:
            result = answer.result(self._timeout_s if waited_for else None)
        except FutureTimeoutError as error:
            answer.cancel()
            self._breaker.failed()
            result = error
        if isinstance(result, Exception):
            self._report(result)
            return otherwise
        return otherwise if result is None else result

    def in_background(self, work: Callable[[], None]) -> None:
        """Do this in the pool; nobody waits for it."""

        def reported() -> None:
            if isinstance(error := self.guarded(lambda _: work(), None), Exception):
                self._report(error)

        self.pool.submit(reported)

    def _report(self, error: Exception) -> None:
        cause = str(error).partition("\n\nDebug source")[0] or repr(error)  # obstore adds how Rust prints it
        self.health.failed("the object store cannot be used", cause, remedy=_REMEDY)

    def size(self, path: str) -> int | None:
        """The size of an object; None if it is not there."""
        try:
            size: int = self.objects.head(path)["size"]
        except self.failures.absent:
            return None
        return size

    def limit(self) -> int:
        """What one namespace may take. The bucket is asked once; it gets the limit asked for if it has none."""
        if not self._limit_is_known:
            found = read_limit(self.objects, self.failures)
            if found is None and self.wanted_bytes is not None:
                with suppress(*self.failures.present):  # another writer came first
                    self.objects.put(CAPACITY, b"%d" % self.wanted_bytes, mode="create")
                found = read_limit(self.objects, self.failures)
            self.limited_to(_UNLIMITED if found is None else found)
            self._limit_is_known = True
        return min(self.capacity_bytes, _UNLIMITED if self._tenant_quota is None else self._tenant_quota)

    def close(self) -> None:
        self._breaker.close()
        self.pool.shutdown(cancel_futures=True)

    def _probe(self) -> bool:
        try:
            self.size(PROBE)
        except self.failures.all:
            return False
        return True


class ObjectTier(RecordTier[_ObjectBackend]):
    """Records as objects under an URL such as ``s3://BUCKET/PREFIX``. What does not fit is refused."""

    name = "objects"
    damage_remedy = "look for others who write there"

    def __init__(
        self,
        url: str,
        *,
        records: RecordFormat,
        capacity_bytes: int | None = None,
        tenant_quota_bytes: int | None = None,
        timeout_s: float = 2.0,
        readers: int = 8,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """``config`` goes to obstore (region, endpoint, keys); without it, the environment's ``AWS_*`` are used, such
        as ``AWS_ENDPOINT_URL`` and, for a server without TLS, ``AWS_ALLOW_HTTP=true``.

        ``capacity_bytes`` is the limit of a bucket that has none yet. No request of the store's takes longer than
        ``timeout_s``.
        """
        backend = _ObjectBackend(
            url,
            wanted_bytes=capacity_bytes,
            tenant_quota=tenant_quota_bytes,
            timeout_s=timeout_s,
            readers=readers,
            config=config,
        )
        self._open(backend, records, owns_backend=True)

    def _open(self, backend: _ObjectBackend, records: RecordFormat, *, owns_backend: bool) -> None:
        super()._open(backend, records, owns_backend=owns_backend)
        self._objects, self._failures = backend.objects, backend.failures
        self._space = f"{records.namespace.tenant.hex()}/{records.space.hex()}"
        self._held: int | None = None  # bytes, once they were counted; never less than what lies there of ours
        self._added = self._under_way = 0  # bytes, ever and of the objects being written: a list may lack those
        self._listed_at = 0.0
        self._counting = threading.Lock()  # held by those who count or remove, one at a time

    # Finding

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these have an object; all are asked for at once."""
        return self._backend.each(lambda key: self._size(key) is not None, keys, False)

    def leading_run(self, keys: Sequence[bytes]) -> int:
        """How many of the first of these have an object; hardly more is asked for than that."""
        backend = self._backend
        if not backend.is_available:
            return 0
        asked = in_order(backend.pool, lambda key: backend.guarded(self._size, key), keys, ahead=backend.ahead)
        with closing(asked):
            for count, (_, answer) in enumerate(asked):
                if backend.result(answer, None) is None:
                    return count
        return len(keys)

    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        """For each content, the newest blocks that hold it, newest last."""
        return self._backend.each(self._variants, content_keys, [])

    def _variants(self, content: bytes) -> list[BlockInfo]:
        infos: list[BlockInfo] = []
        for name in self._names(f"{self._space}/contents/{content.hex()}"):  # newest first
            info = self._info(bytes.fromhex(name.rpartition("-")[2]))
            if info is None:
                self._objects.delete(name)  # the record is gone
            elif info.content_key == content:
                infos.insert(0, info)
            if len(infos) == MAX_VARIANTS:
                break
        return infos

    def _info(self, key: bytes) -> BlockInfo | None:
        try:
            head = self._objects.get_range(self._path(key), start=0, length=_HEADER_BYTES)
            return self._records.info(memoryview(head))
        except self._failures.absent:
            return None
        except RecordError:
            return None  # loading it would say so

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        """The blocks under these keys, in this order; reading begins at once and several run ahead."""
        backend = self._backend
        reads = in_order(backend.pool, lambda key: backend.guarded(self._read, key), keys, ahead=backend.ahead)
        return self._counted(self._decoded(key, backend.result(read, None)) for key, read in reads)

    def _read(self, key: bytes) -> memoryview | None:
        try:
            found = self._objects.get(self._path(key))
        except self._failures.absent:
            return None
        if found.meta["size"] > self._records.max_bytes:
            return memoryview(b"")  # none of ours: it will be found damaged
        received = memoryview(found.bytes())
        data = page_aligned(len(received))
        data[:] = received
        return data

    # Keeping

    def _store(self, block: KVBlock) -> PutOutcome:
        return self._backend.each(self._stored, [block], PutOutcome.REFUSED, waited_for=False)[0]

    def _stored(self, block: KVBlock) -> PutOutcome:
        size = self._records.size_of(block)
        if self._size(block.key) is not None:
            return PutOutcome.PRESENT
        if not self._fits(size):
            return PutOutcome.REFUSED
        try:
            # If this fails the bytes stay counted: they may have arrived all the same.
            self._objects.put(self._path(block.key), self._records.encode(block).join())
        finally:
            with self._lock:
                self._under_way -= size
        stamp = _UNLIMITED - time.time_ns()  # names come in order: the newest shall come first
        self._objects.put(f"{self._space}/contents/{block.content_key.hex()}/{stamp:016x}-{block.key.hex()}", b"")
        return PutOutcome.STORED

    def _fits(self, size: int) -> bool:
        """Whether so many bytes more fit; if they do, they are counted, and under way."""
        limit = self._backend.limit()
        if limit != _UNLIMITED and self._held is None:
            with self._counting:  # nobody writes before it is counted, so nothing is on its way that this list lacks
                if self._held is None:
                    self._count()
        with self._lock:
            fits = self._held is None or self._held + size <= limit
            if fits:
                self._added += size
                self._under_way += size
                self._held = None if self._held is None else self._held + size
            is_due = not fits and time.monotonic() - self._listed_at > _RELIST_S
            self._listed_at = time.monotonic() if is_due else self._listed_at
        if is_due:
            self._backend.in_background(self._count)
        return fits

    def _count(self) -> None:
        """Take ``_held`` from a list. What comes or goes meanwhile may be counted twice, until the next list."""
        with self._lock:
            added, under_way, self._listed_at = self._added, self._under_way, time.monotonic()
        listed = self._listed_totals()[1]
        with self._lock:
            self._held = listed + under_way + self._added - added

    def _uncount(self, size: int) -> None:
        with self._lock:
            if self._held is not None:
                self._held -= size

    def used(self, chain: Sequence[bytes]) -> None:
        """Nothing: objects go by their age, not by their use."""

    # Forgetting

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove these blocks' objects."""
        self._backend.each(self._remove, keys, None)

    def _remove(self, key: bytes) -> None:
        with self._counting:  # so that nobody takes it off twice
            size = self._size(key)
            if size is not None:
                self._objects.delete(self._path(key))
                self._uncount(size)

    def _forget(self, tenant: bytes | None, space: bytes | None) -> None:
        folders = ["/".join(part.hex() for part in (tenant, space) if part is not None)]
        if tenant is None:
            nobody: list[str] = []
            (folders,) = self._backend.each(lambda _: tenants_in(self._objects), [None], nobody, waited_for=False)
        self._backend.each(self._delete_all, folders, None, waited_for=False)

    def _delete_all(self, prefix: str) -> None:
        with self._counting:
            for page in self._pages(prefix):
                self._objects.delete([entry["path"] for entry in page])
                own = [entry["size"] for entry in page if entry["path"].startswith(self._space + "/records/")]
                self._uncount(sum(own))

    # The rest

    def _totals(self) -> tuple[int, int]:
        return self._backend.each(lambda _: self._listed_totals(), [None], (0, 0), waited_for=False)[0]

    def _path(self, key: bytes) -> str:
        return f"{self._space}/records/{key.hex()}.kv"

    def _size(self, key: bytes) -> int | None:
        return self._backend.size(self._path(key))

    def _listed_totals(self) -> tuple[int, int]:
        sizes = [entry["size"] for page in self._pages(f"{self._space}/records") for entry in page]
        return len(sizes), sum(sizes)

    def _pages(self, prefix: str) -> Iterator[Sequence[Mapping[str, Any]]]:
        yield from self._objects.list(prefix, chunk_size=_PAGE_OF_NAMES)

    def _names(self, prefix: str) -> Iterator[str]:
        for page in self._objects.list(prefix, chunk_size=MAX_VARIANTS):
            yield from (entry["path"] for entry in page)
