"""Speed of the checks that a chunk record could use: checksums, digests, MACs, encryption."""

from __future__ import annotations

import argparse
import hashlib
import hmac
import importlib.util
import os
import threading
import time
import zlib
from collections.abc import Callable

from benchmarks.common.measure import positive
from benchmarks.common.report import Report

QUICK = {"repeat": 2}

_VALUE = 2**20
_VALUES = 32  # 32 MB, more than the CPU's caches hold


def ways() -> dict[str, Callable[[memoryview], object]]:
    key = os.urandom(32)
    found: dict[str, Callable[[memoryview], object]] = {
        "zlib.crc32": zlib.crc32,
        "hashlib.sha256": lambda data: hashlib.sha256(data).digest(),
        "hashlib.blake2b": lambda data: hashlib.blake2b(data).digest(),
        "HMAC-SHA256": lambda data: hmac.new(key, data, "sha256").digest(),
        "keyed BLAKE2b": lambda data: hashlib.blake2b(data, key=key).digest(),
    }
    if importlib.util.find_spec("xxhash"):
        import xxhash

        found["xxhash.xxh3_128"] = lambda data: xxhash.xxh3_128(data).digest()
    if importlib.util.find_spec("google_crc32c"):
        import google_crc32c

        found["google_crc32c (takes bytes only)"] = lambda data: google_crc32c.value(bytes(data))
    if importlib.util.find_spec("cryptography"):
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        cipher = AESGCM(key)
        found["AES-256-GCM, encrypting"] = lambda data: cipher.encrypt(os.urandom(12), data, None)
    return found


def gigabytes_per_second(
    check: Callable[[memoryview], object], data: memoryview, threads: int, *, repeat: int
) -> float:
    values = [data[at : at + _VALUE] for at in range(0, len(data), _VALUE)]

    def work(share: list[memoryview]) -> None:
        for value in share:
            check(value)

    samples = []
    for _ in range(repeat):
        workers = [threading.Thread(target=work, args=(values[n::threads],)) for n in range(threads)]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        samples.append(len(data) / 1e9 / (time.perf_counter() - begin))
    return max(samples)  # what others take of the machine is not the check's fault


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--repeat", type=positive, default=15, help="the best of so many counts (default 15)")


def run(args: argparse.Namespace) -> Report:
    """Every check on one thread and on two."""
    report = Report("checksums")
    columns = ["check", "GB/s, one thread", "two threads"]
    table = report.table(f"Checks of a record: 1 MB at a time, best of {args.repeat}", columns)
    data = memoryview(bytearray(os.urandom(_VALUE * _VALUES)))
    for name, check in ways().items():
        speeds = [gigabytes_per_second(check, data, threads, repeat=args.repeat) for threads in (1, 2)]
        table.add(name, *(f"{speed:.2f}" for speed in speeds))
    return report
