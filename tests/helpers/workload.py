"""Threads that use the stores of several tenants at random, while somebody watches every ledger.

Used by tests and the benchmark capacity_limits. The stores are real: one memory, one directory and, if there is
one, one server below. What a lease shows is held against what was put under that name.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.disk import directory_bytes
from kvboost.store import DiskTier, MemoryStore, RecordFormat, RedisTier, TieredStore
from kvboost.store.tiers.disk.directory import charge
from kvboost.types import Chunk, KVBlock, PutOutcome
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt

MEMORY, MEMORY_QUOTA = 60_000, 30_000
BELOW, BELOW_QUOTA = 400_000, 200_000  # of the directory
WAITING = 40_000
LIMITS = {
    "memory": MEMORY,
    "memory, one tenant": MEMORY_QUOTA,
    "waiting to be written": WAITING,
    "disk": BELOW,
    "disk, one tenant": BELOW_QUOTA,
}
_TENANTS = ("one", "two", "three")
_SIZES = (500, 3000, 9000)
_MAX_HELD = 6  # leases of one thread
_LOCK = threading.Lock()


@dataclass
class Seen:
    """What was observed."""

    operations: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    looks: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    """The most bytes seen in each ledger."""
    over: list[str] = field(default_factory=list)
    """Ledgers seen above their limit."""
    wrong: list[str] = field(default_factory=list)
    """Blocks that were not what was put, leases that leaked, books that do not add up."""
    evictions: int = 0
    blocks_seen: int = 0

    def look(self, ledger: str, held: int) -> None:
        """Somebody looked at a ledger."""
        limit = LIMITS[ledger]
        with _LOCK:
            self.looks[ledger] += 1
            self.most[ledger] = max(self.most[ledger], held)
            if held > limit:
                self.over.append(f"{ledger}: {held:,} of {limit:,}")


def run(operations: int, *, threads: int, directory: Path, redis_url: str | None = None, seed: int = 0) -> Seen:
    """So many calls of the stores by so many threads."""
    seen = Seen()
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tier that is out of time is a miss
        store = _open(stack, directory, redis_url)
        ended = threading.Event()
        watchers = [threading.Thread(target=_watch, args=(look, seen, ended)) for look in _looks(store, directory)]
        share = operations // threads
        errors: list[BaseException] = []
        workers = [
            threading.Thread(target=_guarded, args=(errors, _work, store, share, seed * 1000 + number, seen))
            for number in range(threads)
        ]
        for thread in (*watchers, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        store.flush()
        ended.set()
        for thread in watchers:
            thread.join()
        seen.wrong += [f"an operation raised {error!r}" for error in errors]
        _settle(store, directory, seen)
    return seen


def _open(stack: ExitStack, directory: Path, redis_url: str | None) -> TieredStore:
    formats = [RecordFormat(namespace(tenant=tenant)) for tenant in _TENANTS]
    limits: dict[str, Any] = {"capacity_bytes": BELOW, "tenant_quota_bytes": BELOW_QUOTA, "records": formats[0]}
    memory = MemoryStore(MEMORY, quota_bytes=MEMORY_QUOTA)
    tiers: list[Any] = [DiskTier(directory, **limits)]
    if redis_url is not None:
        tiers.append(RedisTier(redis_url, timeout_s=10.0, records=formats[0]))
    store = TieredStore(memory, tiers, waiting_bytes=WAITING)
    stack.enter_context(closing(store))
    for tenant, records in zip(_TENANTS[1:], formats[1:], strict=True):
        store.open(tenant, [tier.for_namespace(records) for tier in tiers])
    return store


def _chunks(tenant: str, chooser: random.Random) -> list[Chunk]:
    """One of a few hundred prompts of a tenant, some with the same beginning."""
    beginning = chooser.randrange(12)
    return prompt(f"{beginning}", *(f"{chooser.randrange(3)}" for _ in range(chooser.randrange(4))), tenant=tenant)


def _block(chunk: Chunk) -> KVBlock:
    return block_of(chunk, _SIZES[chunk.prefix_key[0] % 3])


def _work(store: TieredStore, operations: int, seed: int, seen: Seen) -> None:
    chooser = random.Random(seed)
    held: list[tuple[list[Chunk], Any]] = []
    kinds: Counter[str] = Counter()
    blocks = 0
    try:
        for _ in range(operations):
            tenant = chooser.choice(_TENANTS)
            chunks = _chunks(tenant, chooser)
            kind = chooser.choices(
                ("lease", "lease content", "put", "used", "release", "stats", "flush", "clear"),
                (30, 8, 35, 8, 15, 3, 0.2, 0.2),
            )[0]
            kinds[kind] += 1
            if kind == "lease" and len(held) < _MAX_HELD:
                held.append((chunks, store.lease(chunks)))
            elif kind == "lease content" and len(held) < _MAX_HELD:
                held.append((chunks, store.lease_content(chunks, after=0)))
            elif kind == "put":
                for chunk in chunks:
                    if store.put(_block(chunk)) is PutOutcome.REFUSED:
                        break
            elif kind == "used":
                store.used([chunk.prefix_key for chunk in chunks])
            elif kind == "release" and held:
                wanted, lease = held.pop(chooser.randrange(len(held)))
                for chunk, block in zip(wanted, lease.blocks, strict=False):
                    if block is not None:
                        blocks += 1
                        assert_same(_as_put(block), _as_put(_block(_named(chunk, block))))
                lease.release()
            elif kind == "stats":
                stats = store.stats(tenant)
                seen.look("disk, one tenant", stats.below[0].bytes)
                seen.look("memory, one tenant", stats.bytes)
            elif kind == "flush":
                store.flush(tenant)
            elif kind == "clear":
                store.clear(tenant)
    finally:
        for _, lease in held:
            lease.release()
    with _LOCK:
        seen.operations += operations
        seen.kinds += kinds
        seen.blocks_seen += blocks


def _named(chunk: Chunk, block: KVBlock) -> Chunk:
    """The chunk a block was made from: one found by content may be of another prompt."""
    return Chunk(block.start, chunk.end, chunk.tokens, block.key, block.parent_key, chunk.content_key, chunk.tenant)


def _as_put(block: KVBlock) -> KVBlock:
    """Without the parent, which a block found by content alone has lost."""
    return replace(block, parent_key=None)


def _guarded(errors: list[BaseException], work: Callable[..., None], *arguments: Any) -> None:
    try:
        work(*arguments)
    except BaseException as error:  # noqa: BLE001 - told by the caller
        errors.append(error)


def _watch(look: Callable[[Seen], None], seen: Seen, ended: threading.Event) -> None:
    while not ended.is_set():
        look(seen)
        time.sleep(0.0005)
    look(seen)


def _looks(store: TieredStore, directory: Path) -> list[Callable[[Seen], None]]:
    memory: MemoryStore = store._memory

    def at_memory(seen: Seen) -> None:
        seen.look("memory", memory.stats().bytes)
        seen.look("waiting to be written", store._writer.waiting_bytes())

    def at_disk(seen: Seen) -> None:
        with closing(sqlite3.connect(f"file:{directory / 'index-1.sqlite'}?mode=ro", uri=True, timeout=30)) as index:
            rows = index.execute("SELECT tenant, SUM(bytes) FROM spaces GROUP BY tenant").fetchall()
        seen.look("disk", sum(row[1] for row in rows))
        seen.look("disk, one tenant", max(row[1] for row in rows))

    return [at_memory, at_disk]


def _settle(store: TieredStore, directory: Path, seen: Seen) -> None:
    """Afterwards: no lease is out, and every ledger says what is there."""
    memory = store._memory
    held = sum(entry.block.nbytes for entry in memory._entries.values())
    if memory.stats().bytes != held:
        seen.wrong.append(f"the memory's ledger says {memory.stats().bytes:,} of {held:,} bytes")
    if any(entry.leases for entry in memory._entries.values()):
        seen.wrong.append("a lease leaked: its block cannot go")
    for tenant in _TENANTS:
        stats = store.stats(tenant)
        seen.evictions += stats.evictions + sum(below.evictions for below in stats.below)
        if stats.leased:
            seen.wrong.append(f"{stats.leased} leases leaked")
        if stats.waiting_bytes:
            seen.wrong.append(f"{stats.waiting_bytes:,} bytes still wait after a flush")
    disk: Any = store._own.tiers[0]
    files = sum(charge(path.stat().st_size) for path in directory.rglob("*.kv"))
    if directory_bytes(disk) != files:
        seen.wrong.append(f"the directory's ledger says {directory_bytes(disk):,} of {files:,} bytes")
