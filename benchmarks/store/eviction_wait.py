"""How long a writer of a cache directory waits while another process evicts 10,000 records, 64 at a time.

One process opens a full directory with a limit for two records and stores one, as an engine with a smaller
`disk_cache_bytes` does. Another, over connections of its own, writes to the index every few milliseconds, before and
meanwhile; each write waits for a transaction of the first at most. Passes if the longest of these waits is under 50 ms.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common.measure import positive
from benchmarks.common.report import Progress, Report
from kvboost.bench.report import Spread
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.disk.directory import charge
from kvboost.store.tiers.disk.files import Layout
from kvboost.store.tiers.disk.index import EVICTED_AT_ONCE, ChunkIndex, NewEntry
from kvboost.store.tiers.disk.tier import DiskTier
from kvboost.types import BlockInfo, KVBlock, Namespace, PutOutcome

QUICK = {"records": 1000}
_MAX_WAIT_MS = 50.0
_EVERY_S = 0.002
_CALM_S = 2.0
_SIZE = 4096
_NAMESPACE = Namespace(hashlib.sha256(b"root").digest(), hashlib.sha256(b"tenant").digest())
_RECORDS = RecordFormat(_NAMESPACE)
_SPACE = _RECORDS.space
_NEW = hashlib.sha256(b"new").digest()


def fill(layout: Layout, records: int) -> bytes:
    """So many records of one namespace, each a file and an entry; the key of the one that was used last."""
    progress = Progress("records", records)
    index = _open(layout)
    keys = [hashlib.sha256(b"%d" % number).digest() for number in range(records)]
    for begin in range(0, records, 1000):
        some = keys[begin : begin + 1000]
        entries = [NewEntry(BlockInfo(key, None, key, _SIZE, True, 0, b"", 0), _SIZE, begin) for key in some]
        for key in some:
            path = layout.record(_SPACE, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(_SIZE))
        index.adopt((_SPACE, _NAMESPACE, entry) for entry in entries)
        progress.step(len(some))
    index.touch([(keys[-1], 2**62)])
    index.close()
    return keys[-1]


def _open(layout: Layout) -> ChunkIndex:
    return ChunkIndex.open(layout.index, space=_SPACE, namespace=_NAMESPACE)


def evict(directory: Path) -> None:
    """In a process of its own: all but the record that was used last, for a new one. Never returns."""
    code = 1
    try:
        block = KVBlock(
            key=_NEW,
            parent_key=None,
            content_key=_NEW,
            tokens=b"new!",
            tensors=(torch.zeros(_SIZE, dtype=torch.uint8),),
            nbytes=_SIZE,
            bitwise=True,
        )
        limit = _SIZE + charge(_RECORDS.size_of(block))
        tier = DiskTier(directory, capacity_bytes=limit, records=_RECORDS)
        while tier.store(block) is PutOutcome.REFUSED:
            pass  # one call evicts so many at most
        tier.close()
        code = 0
    finally:
        os._exit(code)


def waits(index: ChunkIndex, key: bytes, until: float | int) -> list[float]:
    """Milliseconds of each write until a time (a float), or until a process (its number) has ended."""
    found: list[float] = []
    stamp = 2**62
    while time.monotonic() < until if isinstance(until, float) else os.waitpid(until, os.WNOHANG)[0] == 0:
        stamp += 1
        begin = time.perf_counter()
        index.touch([(key, stamp)])
        found.append(1000 * (time.perf_counter() - begin))
        time.sleep(_EVERY_S)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--records", type=positive, default=10_000, help="default: 10000")


def run(args: argparse.Namespace) -> Report:
    """Fill, then write while another process evicts."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "cache"
        layout = Layout(directory)
        DiskTier(directory, capacity_bytes=2 * args.records * _SIZE, records=_RECORDS).close()
        key = fill(layout, args.records)
        index = _open(layout)
        calm = waits(index, key, time.monotonic() + _CALM_S)
        began = time.monotonic()
        process = os.fork()
        if process == 0:
            evict(directory)
        evicting = waits(index, key, process)
        seconds = time.monotonic() - began
        left = index.totals(whole=True).chunks
        there = layout.has((_SPACE, key))
        index.close()
    report = Report("eviction_wait", raw={"calm_ms": calm, "evicting_ms": evicting})
    table = report.table(
        f"{args.records:,} records evicted, {EVICTED_AT_ONCE} at a time",
        ["a writer", "writes", "ms: median [low high]"],
    )
    table.add("beside nobody", len(calm), Spread.of(calm).text())
    table.add("beside the eviction", len(evicting), Spread.of(evicting).text())
    table.notes.append(f"The eviction took {seconds:.1f} s and left {left} records.")
    report.failed = not (max(evicting) < _MAX_WAIT_MS and left == 2 and there)
    return report
