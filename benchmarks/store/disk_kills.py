"""Writers of a cache directory killed at random moments: nothing acknowledged is lost, nothing wrong is served.

Every round two processes write to one directory, with overlapping keys, until both are killed with SIGKILL. A writer
says through a pipe what was stored, after ``store`` returned. Then the directory is opened: everything acknowledged
must be there, to the bit, unless the budget made it go; every file must be a whole record and be in the books.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.disk import directory_bytes
from benchmarks.common.measure import positive
from benchmarks.common.parts import add_part_arguments, run_parts, total
from benchmarks.common.report import Report
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.disk.directory import charge
from kvboost.store.tiers.disk.tier import DiskTier
from kvboost.types import KVBlock, Namespace, PutOutcome

QUICK = {"kills": 50}
_NAMESPACE = Namespace(hashlib.sha256(b"kills").digest(), hashlib.sha256(b"tenant").digest())
_KILLS_PER_DIRECTORY = 50
_LARGE, _SMALL = 2**30, 2 * 2**20
_CAPACITIES = {"hold everything": _LARGE, "evict": _SMALL}
_BAD = ("lost", "wrong or damaged", "books wrong", "leftovers")
_KEYS = 400


def block(number: int) -> KVBlock:
    """Made from its number alone; chains of four, so that evictions have an order to keep."""
    size = (3_000, 70_000, 300_000)[number % 3]
    raw = hashlib.shake_128(number.to_bytes(4, "little")).digest(size)
    return KVBlock(
        key=key(number),
        parent_key=key(number - 1) if number % 4 else None,
        content_key=hashlib.sha256(b"content %d" % number).digest(),
        tokens=raw[:64],
        tensors=(torch.frombuffer(bytearray(raw), dtype=torch.uint8),),
        nbytes=size,
        bitwise=True,
    )


def key(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def open_tier(directory: Path, capacity: int) -> DiskTier:
    return DiskTier(directory, capacity_bytes=capacity, records=RecordFormat(_NAMESPACE), readers=2)


def write_until_killed(directory: Path, capacity: int, seed: int, pipe: int) -> None:
    """In a process of its own: never returns."""
    try:
        rng = random.Random(seed)
        tier = open_tier(directory, capacity)
        os.write(pipe, (0).to_bytes(4, "little"))  # open: the clock of the kill starts
        while True:
            number = rng.randrange(1, _KEYS)
            outcome = tier.store(block(number))
            if outcome is PutOutcome.STORED:
                os.write(pipe, number.to_bytes(4, "little"))
            if rng.random() < 0.1:
                tier.used([key(n) for n in range(number - number % 4, number + 1)])
            if rng.random() < 0.05:
                tier.remove([key(_KEYS + 1)])
            if rng.random() < 0.02:
                tier.flush()
    finally:
        os._exit(3)  # whatever happened, this is not the parent


def acknowledged(pipe: int) -> list[int]:
    """All numbers that a dead writer has written."""
    data = b""
    while part := os.read(pipe, 2**16):
        data += part
    os.close(pipe)
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data) - len(data) % 4, 4)]


def kill_round(directory: Path, capacity: int, rng: random.Random) -> set[int]:
    """Two writers from start to kill; what they acknowledged."""
    writers = []
    for _ in range(2):
        reading, writing = os.pipe()
        seed = rng.randrange(2**32)
        process = os.fork()
        if process == 0:
            os.close(reading)
            write_until_killed(directory, capacity, seed, writing)
        os.close(writing)
        writers.append((process, reading))
    said: set[int] = set()
    for _, reading in writers:
        os.read(reading, 4)  # it has opened the directory
    time.sleep(rng.random() * 0.12)
    for process, _ in rng.sample(writers, 2):
        os.kill(process, signal.SIGKILL)
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.01)
    for process, reading in writers:
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status), "a writer ended by itself"
        said |= set(acknowledged(reading)) - {0}
    return said


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--kills", type=positive, default=1000, help="default: 1000")
    add_part_arguments(parser)


def kill_writers(kind: str, count: int, rng: random.Random) -> dict[str, Any]:
    """Kill, reopen, look, over and over in one directory."""
    capacity = _CAPACITIES[kind]
    counts = Counter(dict.fromkeys(("kills", "acknowledged", "files read back", *_BAD), 0))
    slowest = 0.0
    said: set[int] = set()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "cache"
        # Not beyond what is wrong: the same kills may not show it again if the part is stopped before its end.
        while counts["kills"] < count and not any(counts[name] for name in _BAD):
            new = kill_round(directory, capacity, rng)
            said |= new
            counts.update(kills=2, acknowledged=len(new))
            begin = time.perf_counter()
            tier = open_tier(directory, capacity)
            slowest = max(slowest, time.perf_counter() - begin)
            counts.update(look(tier, directory, capacity, said))
            tier.close()
    return {**counts, "reopen_s": round(slowest, 4)}


def run(args: argparse.Namespace) -> Report:
    """One directory after another, half of them of each kind."""
    torch.set_num_threads(1)
    wanted = dict.fromkeys(_CAPACITIES, -(-args.kills // len(_CAPACITIES)))
    parts = run_parts(args, "disk_kills", "kills", wanted, _KILLS_PER_DIRECTORY, kill_writers)
    failed = any("error" in part or any(part[name] for name in _BAD) for part in parts)
    report = Report("disk_kills", failed=failed, raw={"parts": parts})
    names = ("kills", "acknowledged", "lost", "files read back", *_BAD[1:])
    columns = ["directories that", "kill -9", *names[1:], "reopen, s, at most"]
    table = report.table("Writers killed with SIGKILL", columns)
    for kind in _CAPACITIES:
        slowest = max(part.get("reopen_s", 0.0) for part in parts if part["kind"] == kind)
        table.add(kind, *(f"{total(parts, kind, name):,}" for name in names), f"{slowest:.3f}")
    return report


def look(tier: DiskTier, directory: Path, capacity: int, said: set[int]) -> dict[str, int]:
    """What is in the directory after a kill, and what of it is wrong."""
    names = {path.stem for path in directory.glob("*/*/*.kv")}
    numbers = [n for n in range(_KEYS) if key(n).hex() in names]
    wrong = 0
    for number, found in zip(numbers, tier.load([key(n) for n in numbers]), strict=True):
        expected = block(number)
        same = found is not None and torch.equal(found.tensors[0], expected.tensors[0])
        wrong += not (same and found.tokens == expected.tokens and found.parent_key == expected.parent_key)
    # A chunk in the books may have lost its file, as it was about to go. No file may be missing there.
    sizes = sum(charge(path.stat().st_size) for path in directory.glob("*/*/*.kv"))
    leftovers = sum(not path.name.endswith(".lock") for path in (directory / "tmp").iterdir())
    return {
        "files read back": len(numbers),
        "wrong or damaged": wrong,
        "lost": len(said - set(numbers)) if capacity == _LARGE else 0,
        "books wrong": int(not sizes <= directory_bytes(tier) <= capacity),
        "leftovers": leftovers + tier.stats().rejected,
    }
