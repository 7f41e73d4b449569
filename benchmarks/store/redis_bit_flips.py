"""Flips bits of what lies in a Redis and loads it: every flip must be a miss, and nothing else may be one.

usage: python proofs/redis_damage.py [--flips 10000] [--seed 0]

Starts a redis-server of its own. Blocks are small, of one value, and large, of several; a flip goes anywhere into the
values of one block. After each, the damaged block must be a miss and gone, and another, whole one must be found.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from contextlib import closing

import redis
import torch

from benchmarks.common.servers import redis_server
from benchmarks.store.redis_tier import make_block, open_tier
from kvboost.bench.report import describe_machine
from kvboost.types import PutOutcome

_SIZES = (100, 5_000, 60_000, 1_200_000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chooser = random.Random(args.seed)
    served = wrong = 0
    begin = time.monotonic()
    with redis_server() as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = redis.Redis.from_url(server.url)
        with closing(open_tier(server.url, patience_s=600.0)) as tier:
            whole = make_block(0, 1000)
            tier.store(whole)
            targets = [make_block(number + 1, size) for number, size in enumerate(_SIZES)]
            for _ in range(args.flips):
                target = targets[chooser.choices(range(4), (10, 10, 10, 1))[0]]
                if tier.store(target) is not PutOutcome.STORED:
                    wrong += 1
                names = list(client.scan_iter(f"*{target.key.hex()}*", count=1000, _type="string"))
                name = chooser.choice(names)
                at = chooser.randrange(client.strlen(name))
                old = client.getrange(name, at, at)[0]
                client.setrange(name, at, bytes((old ^ 1 << chooser.randrange(8),)))
                damaged, sound = tier.load([target.key, whole.key])
                served += damaged is not None
                wrong += sound is None or not torch.equal(sound.tensors[0], whole.tensors[0])
            stats = tier.stats()
    print(f"{describe_machine().line}\n")
    print(f"{args.flips:,} flipped bits, {stats.rejected:,} rejected, {served} served, {wrong} other faults;", end=" ")
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if served or wrong or stats.rejected != args.flips else 0


if __name__ == "__main__":
    sys.exit(main())
