"""A process that writes blocks to a Redis until it is killed: ``python -m tests.helpers.redis_writer URL``.

For each line with a number on its input it forks a writer, says ``pid N``, and the writer says ``stored N`` for
every block, beginning with that number.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch

from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.redis.tier import RedisTier
from kvboost.types import KVBlock, PutOutcome
from tests.contracts.blocks import namespace


def numbered(number: int) -> KVBlock:
    """A block made from its number alone: 3 MB in some layers, so that it is written in pieces."""
    raw = hashlib.shake_128(b"%d" % number).digest(64 * 1024) * 48
    layers = torch.frombuffer(bytearray(raw), dtype=torch.float16).view(12, -1).unbind(0)
    digest = hashlib.sha512(b"%d" % number).digest()
    return KVBlock(digest[:32], None, digest[32:], b"abcd" * 128, layers, len(raw), True)


def main() -> None:
    url = sys.argv[1]
    for line in sys.stdin:
        pid = os.fork()
        if pid:
            print(f"pid {pid}", flush=True)
            os.waitpid(pid, 0)
            print("ended", flush=True)
            continue
        tier = RedisTier(url, records=RecordFormat(namespace()), timeout_s=60.0)
        for number in range(int(line), int(line) + 1000):
            if tier.store(numbered(number)) is PutOutcome.STORED:
                os.write(1, b"stored %d\n" % number)
        time.sleep(60)


if __name__ == "__main__":
    main()
