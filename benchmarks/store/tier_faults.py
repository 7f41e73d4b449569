"""Every write, fsync, rename and read of the disk tier fails once, and a server fails in every way: no answer changes.

usage: python proofs/failing_tiers.py [--every 1] [--rounds 3]

An engine with a tiny model reads texts into a directory (or a Redis through a proxy that breaks it), another one reads
them again. First the system calls are counted; then each one fails in a run of its own, with ENOSPC and with EIO. Every
answer, logits and KV, is compared with a cold engine's. ``--every 5`` lets only every fifth call fail.
"""

from __future__ import annotations

import argparse
import errno
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.faults import Fault
from benchmarks.common.servers import redis_server
from kvboost.bench.report import describe_machine
from tests.helpers.failing import MOMENTS, Failing, Judge, over_failing_disk, over_failing_redis
from tests.helpers.models import tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="of each fault of the server at each moment")
    args = parser.parse_args()
    model = tiny_model("llama")
    begin = time.monotonic()
    rows: list[tuple[str, int, Judge]] = []
    counted = Failing()
    with tempfile.TemporaryDirectory() as folder:
        over_failing_disk(Judge(model), Path(folder), counted)
    unreached = 0
    for call in ("write", "fsync", "rename", "read"):
        for error in (errno.ENOSPC, errno.EIO):
            judge, runs = Judge(model), 0
            for number in range(1, counted.counts[call] + 1, args.every):
                files = Failing(call, number, error)
                with tempfile.TemporaryDirectory() as folder:
                    over_failing_disk(judge, Path(folder), files)
                unreached += not files.failed
                runs += 1
            rows.append((f"disk: {call}, {errno.errorcode[error]}", runs, judge))
    with redis_server() as server:
        for fault in Fault:
            judge, runs = Judge(model), 0
            for moment in MOMENTS:
                for seed in range(args.rounds):
                    over_failing_redis(judge, server.port, fault, moment, seed=seed)
                    runs += 1
            rows.append((f"redis: {fault.value}", runs, judge))
    print(f"{describe_machine(dtype='float32', model='tiny llama').line}\n")
    print("| failure | runs | requests | reused something | failed | other than cold |\n|---|---:|---:|---:|---:|---:|")
    for name, runs, judge in rows:
        numbers = (runs, judge.requests, judge.reused, judge.failed, judge.differing)
        print(f"| {name} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    print(f"\n{unreached} runs ended before their call came; {time.monotonic() - begin:.0f} s.")
    return 0 if all(judge.well for _, _, judge in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
