"""Kills writers of a cache directory at random moments and looks at what they left.

usage: python proofs/disk_kills.py [--kills 1000] [--seed 0]

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
import sys
import tempfile
import time
from pathlib import Path

import torch

from kvboost.bench.report import describe_machine
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.disk.recovery import charge
from kvboost.store.tiers.disk.tier import DiskTier
from kvboost.types import KVBlock, Namespace, PutOutcome

_NAMESPACE = Namespace(hashlib.sha256(b"kills").digest(), hashlib.sha256(b"tenant").digest())
_ROUNDS_PER_DIRECTORY = 25
_LARGE, _SMALL = 2**30, 2 * 2**20
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    kills = acknowledged_blocks = checked = lost = wrong = over = leftovers = 0
    slowest = 0.0
    while kills < args.kills:
        capacity = rng.choice((_LARGE, _SMALL))
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / "cache"
            said: set[int] = set()
            for _ in range(_ROUNDS_PER_DIRECTORY):
                if kills >= args.kills:
                    break
                new = kill_round(directory, capacity, rng)
                kills += 2
                said |= new
                acknowledged_blocks += len(new)
                begin = time.perf_counter()
                tier = open_tier(directory, capacity)
                slowest = max(slowest, time.perf_counter() - begin)
                names = {path.stem for path in directory.glob("*/*/*.kv")}
                numbers = [n for n in range(_KEYS) if key(n).hex() in names]
                for number, found in zip(numbers, tier.load([key(n) for n in numbers]), strict=True):
                    expected = block(number)
                    checked += 1
                    same = found is not None and torch.equal(found.tensors[0], expected.tensors[0])
                    wrong += not (same and found.tokens == expected.tokens and found.parent_key == expected.parent_key)
                if capacity == _LARGE:
                    lost += len(said - set(numbers))
                # A chunk in the books may have lost its file, as it was about to go. No file may be missing there.
                sizes = sum(charge(path.stat().st_size) for path in directory.glob("*/*/*.kv"))
                over += not sizes <= tier.directory_bytes() <= capacity
                leftovers += sum(not path.name.endswith(".lock") for path in (directory / "tmp").iterdir())
                leftovers += tier.stats().rejected
                tier.close()
        print(f"{kills} kills", file=sys.stderr)
    print(describe_machine().line)
    print(
        "\n| kill -9 | acknowledged | lost | files read back | wrong or damaged | books wrong | leftovers | reopen, s |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    print(
        f"| {kills:,} | {acknowledged_blocks:,} | {lost} | {checked:,} | {wrong} | {over} | {leftovers} "
        f"| {slowest:.3f} at most |"
    )
    return 1 if lost or wrong or over or leftovers else 0


if __name__ == "__main__":
    sys.exit(main())
