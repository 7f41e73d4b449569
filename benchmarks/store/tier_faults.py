"""Failing tiers under an engine: every system call fails once, a server in every way, and no answer changes.

An engine with a tiny model prefills texts into a directory (or a Redis through a proxy that breaks it), another one
prefills them again. First the system calls are counted; then each one fails in a run of its own, with ENOSPC and with
EIO. Every answer, logits and KV, is compared with a cold engine's. ``--every 5`` lets only every fifth call fail.
"""

from __future__ import annotations

import argparse
import errno
import tempfile
from pathlib import Path

from benchmarks.common.faults import Fault
from benchmarks.common.measure import positive
from benchmarks.common.report import Progress, Report
from benchmarks.common.servers import redis_server
from tests.helpers.failing import MOMENTS, Failing, Judge, over_failing_disk, over_failing_redis
from tests.helpers.models import tiny_model

QUICK = {"every": 40, "rounds": 1, "faults": ["refused", "garbage"]}
_CALLS = ("write", "fsync", "rename", "read")
_FAULTS = [fault.value for fault in Fault]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--every", type=positive, default=1, help="let only every so many-th call fail (default 1)")
    parser.add_argument("--rounds", type=positive, default=3, help="of each fault of the server at each moment")
    parser.add_argument("--faults", nargs="+", choices=_FAULTS, default=_FAULTS, help="of the server (default all)")


def run(args: argparse.Namespace) -> Report:
    """The disk's calls, then the server's faults."""
    report = Report("tier_faults")
    columns = ["failure", "runs", "requests", "reused something", "failed", "other than cold"]
    table = report.table("Failing tiers", columns, dtype="float32", model="tiny llama")

    def add(name: str, runs: int, judge: Judge) -> None:
        numbers = (runs, judge.requests, judge.reused, judge.failed, judge.differing)
        table.add(name, *(f"{number:,}" for number in numbers))
        report.failed |= not judge.well
        progress.step()

    model = tiny_model("llama")
    progress = Progress("failures", 2 * len(_CALLS) + len(args.faults))
    counted = Failing()
    with tempfile.TemporaryDirectory() as folder:
        over_failing_disk(Judge(model), Path(folder), counted)
    unreached = 0
    for call in _CALLS:
        for error in (errno.ENOSPC, errno.EIO):
            judge = Judge(model)
            numbers = range(1, counted.counts[call] + 1, args.every)
            for number in numbers:
                files = Failing(call, number, error)
                with tempfile.TemporaryDirectory() as folder:
                    over_failing_disk(judge, Path(folder), files)
                unreached += not files.failed
            add(f"disk: {call}, {errno.errorcode[error]}", len(numbers), judge)
    with redis_server() as server:
        for fault in map(Fault, args.faults):
            judge = Judge(model)
            for moment in MOMENTS:
                for seed in range(args.rounds):
                    over_failing_redis(judge, server.port, fault, moment, seed=seed)
            add(f"redis: {fault.value}", len(MOMENTS) * args.rounds, judge)
    table.notes.append(f"{unreached} runs ended before their call came.")
    return report
