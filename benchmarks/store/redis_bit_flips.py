"""Flipped bits in a Redis: every one must be a miss, and nothing else may be one.

Starts a redis-server of its own. A flip goes anywhere into the value of
a small or a large block. After each, the damaged block must be a miss and gone, and another, whole one must be found.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from contextlib import closing

import redis
import torch

from benchmarks.common.measure import positive
from benchmarks.common.report import Report
from benchmarks.common.servers import redis_server
from benchmarks.store.redis_tier import make_block, open_tier
from kvboost.types import PutOutcome

QUICK = {"flips": 200}
_SIZES = (100, 5_000, 60_000, 1_200_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--flips", type=positive, default=10_000, help="default: 10000")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    """Store, flip, load."""
    rng = random.Random(args.seed)
    served = wrong = 0
    begin = time.monotonic()
    with redis_server() as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = redis.Redis.from_url(server.url)
        with closing(open_tier(server.url, timeout_s=600.0)) as tier:
            whole = make_block(0, 1000)
            tier.store(whole)
            targets = [make_block(number + 1, size) for number, size in enumerate(_SIZES)]
            for _ in range(args.flips):
                target = targets[rng.choices(range(4), (10, 10, 10, 1))[0]]
                wrong += tier.store(target) is not PutOutcome.STORED
                name = rng.choice(list(client.scan_iter(f"*{target.key.hex()}*", count=1000, _type="string")))
                at = rng.randrange(client.strlen(name))
                old = client.getrange(name, at, at)[0]
                client.setrange(name, at, bytes((old ^ 1 << rng.randrange(8),)))
                damaged, sound = tier.load([target.key, whole.key])
                served += damaged is not None
                wrong += sound is None or not torch.equal(sound.tensors[0], whole.tensors[0])
            rejected = tier.stats().rejected
    report = Report("redis_bit_flips", failed=bool(served or wrong or rejected != args.flips))
    table = report.table("Flipped bits in Redis", ["flips", "rejected", "served", "other faults", "seconds"])
    table.add(f"{args.flips:,}", f"{rejected:,}", served, wrong, f"{time.monotonic() - begin:.0f}")
    return report
