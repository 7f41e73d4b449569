"""Eight threads use the stores of three tenants at random while every ledger is watched: none is ever over.

usage: python proofs/ledgers.py [--operations 50000] [--threads 8] [--seed 0] [--no-redis]

One memory, one directory and one redis-server of its own, each with a limit for all tenants and one for each, and small
enough that most of what is put makes something else go. What is done and looked at: ``tests/helpers/workload.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.servers import redis_server
from kvboost.bench.report import describe_machine
from tests.helpers import workload


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=50_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-redis", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, nullcontext() if args.no_redis else redis_server() as server:
        seen = workload.run(
            args.operations,
            threads=args.threads,
            directory=Path(folder) / "cache",
            redis_url=server.url if server else None,
            seed=args.seed,
        )
    print(f"{describe_machine().line}\n")
    print("| ledger | limit, bytes | most seen | looks | over |\n|---|---:|---:|---:|---:|")
    for ledger in sorted(seen.looks):
        limit = workload.LIMITS[ledger]
        over = sum(found.startswith(ledger + ":") for found in seen.over)
        print(f"| {ledger} | {limit:,} | {seen.most[ledger]:,} | {seen.looks[ledger]:,} | {over} |")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in seen.kinds.most_common())
    print(
        f"\n{seen.operations:,} operations by {args.threads} threads ({kinds}); {seen.evictions:,} evictions; ", end=""
    )
    print(f"{seen.blocks_seen:,} blocks compared with what was put; {time.monotonic() - begin:.0f} s.")
    print(f"{len(seen.over)} times over a limit; {len(seen.wrong)} other faults (leaked leases, wrong blocks, books).")
    for found in [*seen.over[:5], *seen.wrong[:5]]:
        print(f"- {found}")
    return 1 if seen.over or seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
