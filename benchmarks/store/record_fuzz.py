"""Feeds the decoder of chunk records with millions of wrong inputs and counts what it lets through."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.common.measure import positive
from benchmarks.common.parts import add_part_arguments, run_parts, total
from benchmarks.common.report import BenchError, Report
from kvboost.errors import RecordError
from kvboost.store.record.format import RecordFormat, inspect
from kvboost.store.record.header import PAGE, seal_of
from kvboost.types import KVBlock, Namespace

QUICK = {"inputs": 5000, "corruptions": 2000}
_PART = 100_000
_FIELDS_END = 360  # where the header's fields end in the records made here; zeros follow
_CAP = 2**20  # max_bytes of the formats: no input may make the decoder allocate more


@dataclass(frozen=True)
class Written:
    """A record, the format that reads it, and the key it is read under."""

    form: RecordFormat
    mac_key: bytes | None
    key: bytes
    data: bytes


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def block(name: str, number: int) -> KVBlock:
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
    tensors = tuple(
        torch.full((1, 2, number % 3 + 1), number, dtype=dtype)
        for dtype in dtypes[: number % 4 + 1]
        for _ in range(1 + number % 2)
    )
    return KVBlock(
        key=digest(name),
        parent_key=digest("parent") if number % 2 else None,
        content_key=digest("content " + name),
        tokens=bytes(range(4 * (number % 5))),
        tensors=tensors,
        nbytes=sum(t.numel() * t.element_size() for t in tensors),
        bitwise=number % 3 == 0,
        start=number,
        context=digest(name)[: 8 * (number % 4)],
        approx_depth=number % 2,
    )


def records(model: str, tenant: str, codec: str = "raw") -> list[Written]:
    """Sixteen small records: four blocks, each plain, with a MAC, encrypted, and both."""
    namespace = Namespace(digest(model), digest(tenant))
    made = []
    for mac in (None, b"m" * 32):
        for secret in (None, b"e" * 32):
            form = RecordFormat(namespace, codec=codec, mac_key=mac, encryption_key=secret, max_bytes=_CAP)
            for number in range(4):
                name = f"chunk {number}"  # the same keys in every namespace: nothing but the header tells them apart
                made.append(Written(form, mac, digest(name), form.encode(block(name, number)).join()))
    return made


Kind = Callable[[random.Random, Written], bytes]
"""Makes a wrong input of a record."""

OWN = records("model", "tenant")
FOREIGN = {
    "swap between tenants": records("model", "another tenant"),
    "swap between models": records("another model", "tenant"),
    "swap between codecs": records("model", "tenant", "int8"),
}


def random_bytes(rng: random.Random, record: Written) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 30, 277, 278, 400, 4096, 4200)))


def random_tail(rng: random.Random, record: Written) -> bytes:
    kept = rng.randrange(8, 400)
    return record.data[:kept] + rng.randbytes(rng.choice((0, 50, 4096 - kept, 4500)))


def mutated(rng: random.Random, record: Written) -> bytes:
    changed = bytearray(record.data)
    for _ in range(rng.randrange(1, 9)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def forged(rng: random.Random, record: Written) -> bytes:
    """Changed fields under a right seal and checksum, as only somebody with the MAC key could write them."""
    changed = bytearray(record.data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(_FIELDS_END)
        value = rng.choice((rng.randbytes(1), rng.randbytes(4), b"\xff" * 4, bytes(8), b"\x00\x10"))
        changed[at : at + len(value)] = value
    if rng.random() < 0.2:
        changed = changed[: rng.randrange(len(changed))] + rng.randbytes(rng.randrange(100))
    if len(changed) >= PAGE:
        if rng.random() < 0.5:
            changed[224:228] = zlib.crc32(changed[PAGE:]).to_bytes(4, "little")
        changed[24:56] = seal_of(changed[:PAGE], record.mac_key)
    return bytes(changed)


def flipped(rng: random.Random, record: Written) -> bytes:
    changed = bytearray(record.data)
    # Half of the flips in the fields and the body: the rest of a small record is mostly padding.
    body = range(PAGE, len(changed))
    at = rng.choice((rng.randrange(len(changed)), rng.choice((rng.randrange(_FIELDS_END), rng.choice(body)))))
    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncated(rng: random.Random, record: Written) -> bytes:
    return record.data[: rng.randrange(len(record.data))]


def torn(rng: random.Random, record: Written) -> bytes:
    """The rest of the file never reached the disk: zeros from some place on."""
    kept = rng.choice((rng.randrange(len(record.data)), rng.randrange(PAGE, len(record.data))))
    return record.data[:kept] + bytes(len(record.data) - kept)


def other_key(rng: random.Random, record: Written) -> bytes:
    same_format = [other for other in OWN if other.form is record.form and other.key != record.key]
    return rng.choice(same_format).data


def swapped(kind: str) -> Kind:
    def swap(rng: random.Random, record: Written) -> bytes:
        return FOREIGN[kind][OWN.index(record)].data

    return swap


_FORGED = "changed fields under a right seal"
INPUTS: dict[str, Kind] = {
    "random bytes": random_bytes,
    "a right beginning, then random bytes": random_tail,
    "records with 1 to 8 changed bytes": mutated,
    _FORGED: forged,
}
CORRUPTIONS: dict[str, Kind] = {
    "one flipped bit": flipped,
    "truncated": truncated,
    "zeros from some place on": torn,
    "swap between keys": other_key,
    **{kind: swapped(kind) for kind in FOREIGN},
}
_KINDS = INPUTS | CORRUPTIONS
_GUIDED = "found by coverage, some under a right seal"
_WATCHED = "largest allocation"


def feed(record: Written, data: bytes) -> str:
    """What the decoder makes of ``data``: refused, accepted or crashed. Every way in is tried."""
    for read in (inspect, record.form.info):
        try:
            read(data)
        except RecordError:
            pass
        except Exception as error:  # noqa: BLE001 - what is looked for
            print(f"crash: {error!r} for {data[:400].hex()}", file=sys.stderr)
            return "crashed"
    try:
        found = record.form.decode(data, record.key)
        inside = sum(t.numel() * t.element_size() for t in found.tensors) <= len(data)
        [t.reshape(-1).view(torch.uint8).sum().item() for t in found.tensors]  # touches every byte
    except RecordError:
        return "refused"
    except Exception as error:  # noqa: BLE001 - what is looked for
        print(f"crash: {error!r} for {data[:400].hex()}", file=sys.stderr)
        return "crashed"
    return "accepted" if inside else "crashed"


def feed_many(kind: str, count: int, rng: random.Random) -> dict[str, int]:
    """Feed ``count`` inputs of a kind, or watch what reading them takes."""
    if kind == _GUIDED:
        return guided(count, rng)
    if kind == _WATCHED:
        return {"inputs": count, "bytes": largest_allocation(count, rng)}
    counts = Counter(inputs=0, refused=0, accepted=0, crashed=0)
    while counts["inputs"] < count:
        record = rng.choice(OWN)
        data = _KINDS[kind](rng, record)
        if data != record.data:  # a change may hit what it writes
            counts.update(("inputs", feed(record, data)))
    return dict(counts)


def guided(count: int, rng: random.Random) -> dict[str, int]:
    """Inputs that atheris finds by coverage, in a process that it ends."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(count), str(rng.randrange(1, 2**31)), folder]
        command = [sys.executable, "-m", "benchmarks.common.record_child", *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise AssertionError(ran.stdout[-2000:] or ran.stderr[-2000:])
    return {"crashed": 0, **json.loads(ran.stdout)}


def largest_allocation(count: int, rng: random.Random) -> int:
    """The most that reading one input took, in bytes."""
    largest = 0
    tracemalloc.start()
    for _ in range(count):
        record = rng.choice(OWN)
        data = rng.choice(list(_KINDS.values()))(rng, record)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        feed(record, data)
        largest = max(largest, tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return largest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--inputs", type=positive, default=2_000_000, help="default: 2000000")
    parser.add_argument("--corruptions", type=positive, default=100_000, help="default: 100000")
    parser.add_argument("--guided", type=int, default=0, help="inputs that atheris finds by coverage (default: none)")
    add_part_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Wrong inputs, corruptions, and the largest allocation."""
    torch.set_num_threads(1)
    if args.guided and importlib.util.find_spec("atheris") is None:
        raise BenchError("--guided needs atheris, which is not here; pip install atheris")
    for record in OWN:
        assert feed(record, record.data) == "accepted", "an honest record must be read"
    wanted = {
        **dict.fromkeys(INPUTS, -(-args.inputs // len(INPUTS))),
        **dict.fromkeys(CORRUPTIONS, -(-args.corruptions // len(CORRUPTIONS))),
        _GUIDED: args.guided,
        _WATCHED: min(20_000, args.inputs),
    }
    parts = run_parts(args, "record_fuzz", "inputs", wanted, _PART, feed_many)
    report = Report("record_fuzz", failed=any("error" in part for part in parts), raw={"parts": parts})
    table = report.table("Wrong records", ["input", "inputs", "refused", "undetected", "crashes"])
    for kind in dict.fromkeys(part["kind"] for part in parts if part["kind"] != _WATCHED):
        names = ("inputs", "refused", "accepted", "crashed")
        inputs, refused, accepted, crashed = (total(parts, kind, name) for name in names)
        # Under a right seal another start or shape over the same bytes is a record like any other.
        allowed = kind in (_FORGED, _GUIDED)
        undetected = 0 if allowed else accepted
        note = f" ({accepted:,} of them records, within their bytes)" if allowed else ""
        table.add(f"{kind}{note}", *(f"{number:,}" for number in (inputs, refused, undetected, crashed)))
        report.failed |= undetected + crashed > 0
    watched, largest = total(parts, _WATCHED, "inputs"), max(part.get("bytes", 0) for part in parts)
    table.notes.append(f"Largest allocation for one input, of {watched:,}: {largest:,} bytes; the limit was {_CAP:,}.")
    report.failed |= largest > _CAP
    return report
