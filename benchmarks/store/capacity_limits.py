"""Capacity limits under load: eight threads and three tenants at random; no ledger is ever over its limit.

One memory and one directory, each with a limit for all tenants and one for each, and small enough that most of what is
put evicts something; below them a redis-server of its own, whose limit is its own. What is done and looked at:
``tests/helpers/workload.py``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from benchmarks.common.measure import positive
from benchmarks.common.report import Report
from benchmarks.common.servers import redis_server
from tests.helpers import workload

QUICK = {"operations": 2000, "no_redis": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--operations", type=positive, default=50_000, help="default: 50000")
    parser.add_argument("--threads", type=positive, default=8, help="default: 8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-redis", action="store_true")


def run(args: argparse.Namespace) -> Report:
    """All operations, then the ledgers."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, nullcontext() if args.no_redis else redis_server() as server:
        seen = workload.run(
            args.operations,
            threads=args.threads,
            directory=Path(folder) / "cache",
            redis_url=server.url if server else None,
            seed=args.seed,
        )
    report = Report("capacity_limits", failed=bool(seen.over or seen.wrong))
    table = report.table("Ledgers", ["ledger", "limit, bytes", "highest", "looks", "over"])
    for ledger in sorted(seen.looks):
        over = sum(found.startswith(ledger + ":") for found in seen.over)
        numbers = (workload.LIMITS[ledger], seen.most[ledger], seen.looks[ledger], over)
        table.add(ledger, *(f"{number:,}" for number in numbers))
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in seen.kinds.most_common())
    table.notes += [
        f"{seen.operations:,} operations by {args.threads} threads ({kinds}); {seen.evictions:,} evictions; "
        f"{seen.blocks_seen:,} blocks compared with what was put; {time.monotonic() - begin:.0f} s.",
        f"{len(seen.over)} times over a limit; {len(seen.wrong)} other faults (leaked leases, wrong blocks, books).",
        *(f"- {found}" for found in [*seen.over[:5], *seen.wrong[:5]]),
    ]
    return report
