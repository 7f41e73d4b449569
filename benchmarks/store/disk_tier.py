"""Speed of the disk tier against plain files and LMDB, and how fast a full cache opens.

Values of one size, read in random order with their pages dropped from the
page cache before. Invariant: every way reads the same bytes from the same file system, alternating in one run.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.process import drop_from_page_cache
from benchmarks.common.report import Progress, Report
from kvboost.bench.report import Spread, Table, describe_machine
from kvboost.store.record.format import RecordFormat
from kvboost.store.record.header import PAGE
from kvboost.store.tiers.disk.directory import charge
from kvboost.store.tiers.disk.files import Files, Layout
from kvboost.store.tiers.disk.index import ChunkIndex, NewEntry
from kvboost.store.tiers.disk.tier import DiskTier
from kvboost.types import BlockInfo, KVBlock, Namespace

QUICK = {"values": 10, "repeat": 2, "chunks": 1000}

_NAMESPACE = Namespace(hashlib.sha256(b"bench").digest(), hashlib.sha256(b"tenant").digest())
_TENSORS = 60  # as a model of 30 layers has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--values", type=int, default=100, metavar="N", help="values of 1 MB (100)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="how often each way is timed (5)")
    parser.add_argument("--chunks", type=int, default=100_000, metavar="N", help="in the cache that is opened (100000)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (the system's folder for such files)")


def run(args: argparse.Namespace) -> Report:
    """Write, read and open; CPU time is that of the whole process."""
    report = Report("disk_tier")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        place = Path(folder)
        blocks = [_block(number) for number in range(args.values)]
        report.raw["read"], report.raw["write"] = _transfers(place, blocks, args.repeat)
        report.raw["reopen_s"] = _reopen(place / "many", args.chunks, args.repeat)
    for table in _tables(report.raw, args):
        report.tables.append(table)
    return report


def _block(number: int, nbytes: int = 2**20) -> KVBlock:
    # 256 bytes for the tokens, the rest for equal tensors: a record is one page more than a megabyte.
    generator = torch.Generator().manual_seed(number)
    raw = torch.randint(0, 256, (_TENSORS, nbytes // _TENSORS // 64 * 64), dtype=torch.uint8, generator=generator)
    return KVBlock(
        key=hashlib.sha256(b"%d" % number).digest(),
        parent_key=None,
        content_key=hashlib.sha256(b"content %d" % number).digest(),
        tokens=bytes(512),
        tensors=tuple(raw.unbind(0)),
        nbytes=raw.numel(),
        bitwise=True,
    )


class _Timed:
    """Seconds and CPU seconds of one run after the other, by name."""

    def __init__(self) -> None:
        self.samples: dict[str, list[tuple[float, float]]] = {}

    def __call__(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        begin, cpu = time.perf_counter(), time.process_time()
        work(*arguments)
        self.samples.setdefault(name, []).append((time.perf_counter() - begin, time.process_time() - cpu))


def _transfers(place: Path, blocks: Sequence[KVBlock], repeat: int) -> tuple[dict[str, Any], dict[str, Any]]:
    records = RecordFormat(_NAMESPACE)
    capacity = 2 * sum(charge(records.size_of(block)) for block in blocks)
    reading, writing = _Timed(), _Timed()
    lmdb = _Lmdb(place / "lmdb", records, capacity) if _Lmdb.available() else None
    progress = Progress("rounds", repeat)
    for number in range(repeat):
        order = random.Random(number).sample(blocks, len(blocks))
        for name, direct in (("tier, O_DIRECT", True), ("tier, buffered reads", False)):
            folder = place / f"{number} {direct}"
            tier = DiskTier(folder, capacity_bytes=capacity, records=records, files=Files(direct=direct))
            writing("tier", _store, tier, blocks)
            tier.flush()
            drop_from_page_cache(folder.rglob("*"))
            reading(name, _load, tier, order)
            paths = [Layout(folder).record(records.space, block.key) for block in order]
            drop_from_page_cache(folder.rglob("*"))
            reading(f"bytes only, {'O_DIRECT' if direct else 'buffered'}", _bytes, Files(direct=direct), paths)
            tier.clear()
            tier.close()
        if lmdb is not None:
            writing("LMDB", lmdb.store, blocks)
            lmdb.cool()
            reading("LMDB", lmdb.load, order)
            lmdb.cool()
            reading("bytes only, LMDB", lmdb.bytes_only, order)
            lmdb.clear()
        progress.step()
    return _by_name(reading, blocks), _by_name(writing, blocks)


def _by_name(timed: _Timed, blocks: Sequence[KVBlock]) -> dict[str, Any]:
    megabytes = sum(block.nbytes for block in blocks) / 1e6
    return {
        name: {
            "gb_per_s": [megabytes / 1e3 / seconds for seconds, _ in samples],
            "cpu_ms_per_mb": [1e3 * cpu / megabytes for _, cpu in samples],
        }
        for name, samples in timed.samples.items()
    }


def _store(tier: DiskTier, blocks: Sequence[KVBlock]) -> None:
    for block in blocks:
        tier.store(block)


def _load(tier: DiskTier, blocks: Sequence[KVBlock]) -> None:
    for block in tier.load([block.key for block in blocks]):
        assert block is not None


def _bytes(files: Files, paths: Sequence[Path]) -> None:
    for path in paths:
        assert files.read(path, max_bytes=2**30) is not None


class _Lmdb:
    """The same records in LMDB, if it is installed: written one by one, read as views and checked."""

    @staticmethod
    def available() -> bool:
        try:
            import lmdb  # noqa: F401
        except ImportError:
            return False
        return True

    def __init__(self, folder: Path, records: RecordFormat, capacity: int) -> None:
        import lmdb

        self._records = records
        self._open: Callable[[], Any] = lambda: lmdb.open(
            str(folder), map_size=2 * capacity, sync=False, readahead=False
        )
        self._folder = folder
        self._base: Any = self._open()

    def cool(self) -> None:
        """Pages that are mapped cannot be dropped: close, drop, open."""
        self._base.sync(True)
        self._base.close()
        drop_from_page_cache(self._folder.rglob("*"))
        self._base = self._open()

    def store(self, blocks: Sequence[KVBlock]) -> None:
        for block in blocks:
            with self._base.begin(write=True) as transaction:
                transaction.put(block.key, self._records.encode(block).join())

    def load(self, blocks: Sequence[KVBlock]) -> None:
        for block in blocks:
            with self._base.begin(buffers=True) as transaction:
                # Copied: the pages of a finished transaction may be written over.
                self._records.decode(bytearray(transaction.get(block.key)), block.key)

    def bytes_only(self, blocks: Sequence[KVBlock]) -> None:
        for block in blocks:
            with self._base.begin(buffers=True) as transaction:
                bytearray(transaction.get(block.key))

    def clear(self) -> None:
        with self._base.begin(write=True) as transaction:
            transaction.drop(self._base.open_db(), delete=False)


def _reopen(folder: Path, chunks: int, repeat: int) -> list[float]:
    """Seconds to open a directory with so many chunks and find one by key and one by content."""
    records = RecordFormat(_NAMESPACE)
    capacity = 2 * charge(PAGE) * max(chunks, 1)
    first = _block(0, 64 * _TENSORS)
    tier = DiskTier(folder, capacity_bytes=capacity, records=records)
    tier.store(first)
    tier.close()
    layout = Layout(folder)
    index = ChunkIndex.open(layout.index, space=records.space, namespace=_NAMESPACE)
    # The other chunks have index entries and empty files: opening looks at neither, and records would take an hour.
    index.adopt(
        (
            records.space,
            _NAMESPACE,
            NewEntry(
                BlockInfo(
                    hashlib.sha256(b"entry %d" % n).digest(),
                    hashlib.sha256(b"entry %d" % (n - 1)).digest() if n % 16 else None,
                    hashlib.sha256(b"text %d" % n).digest(),
                    2**20,
                    True,
                    n % 16 * 128,
                    bytes(8 * (n % 16)),
                    0,
                ),
                size=charge(PAGE),
                stamp=n,
            ),
        )
        for n in range(1, chunks)
    )
    for n in range(1, chunks):
        path = layout.record(records.space, hashlib.sha256(b"entry %d" % n).digest())
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    index.close()
    times = []
    for _ in range(repeat):
        drop_from_page_cache(folder.glob("index*"))
        begin = time.perf_counter()
        tier = DiskTier(folder, capacity_bytes=capacity, records=records)
        assert next(tier.load([first.key])) is not None
        assert tier.variants([first.content_key])[0]
        times.append(time.perf_counter() - begin)
        assert tier.stats().chunks == max(chunks, 1)
        tier.close()
    return times


def _tables(raw: dict[str, Any], args: argparse.Namespace) -> list[Table]:
    machine = describe_machine()
    tables = []
    for kind, title in (("read", "Disk: cold reads"), ("write", "Disk: writes")):
        table = Table(title, machine, ["values of 1 MB", "GB/s", "CPU ms per MB"])
        for name, samples in raw[kind].items():
            table.add(name, Spread.of(samples["gb_per_s"]).text(), Spread.of(samples["cpu_ms_per_mb"]).text())
        tables.append(table)
    tables[0].notes.append(
        f"{args.values} records of 60 tensors, in random order, pages dropped before; median [lowest highest] of "
        f"{args.repeat}. The tier reads with four threads and checks every record; bytes only is one thread without "
        "any check."
    )
    tables[1].notes.append("Until every store returned, checksum and index included; not synced to the disk.")
    table = Table("Disk: opening a cache", machine, ["chunks", "seconds to open and find one by key and by content"])
    table.add(f"{args.chunks:,}", Spread.of(raw["reopen_s"]).text(3))
    tables.append(table)
    return tables
