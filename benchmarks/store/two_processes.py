"""Two engines in two processes over one directory or one Redis: each reuses what the other computed, bit for bit.

usage: python proofs/two_processes.py [--texts 10] [--families llama qwen2 gemma3_text gpt2] [--model FOLDER]

In every round both processes read a text of their own at the same time and write it down; then each reads the other's.
What it reused must be as much as the one who computed it finds again itself, and logits and KV must be that one's
and a cold engine's in this process. Tiny models, one for each family; with ``--model`` a trained one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.servers import redis_server
from kvboost import KVBoost
from kvboost.bench.report import describe_machine
from kvboost.store import RedisTier
from tests.helpers.models import tiny_model

_TOKENS = 400


def load(name: str) -> Any:
    """A tiny model of a family, or the model in a folder."""
    if "/" not in name:
        return tiny_model(name)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()


def text(seed: int) -> list[int]:
    return torch.randint(3, 97, (_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(engine: KVBoost, seed: int) -> list[Any]:
    """How much was reused, and a digest of everything that came out."""
    result = engine.prefill(text(seed))
    digest = hashlib.sha256(result.logits.numpy().tobytes())
    for rows in result.cache.extract(0, _TOKENS):
        digest.update(rows.contiguous().numpy().tobytes())
    return [result.reuse.cached_tokens, result.reuse.bitwise, digest.hexdigest()]


def serve(name: str, settings: dict[str, Any]) -> int:
    """One of the two processes: reads what it is told to read."""
    torch.set_num_threads(1)
    with KVBoost(load(name), None, **settings) as engine:
        # About bits, not about time: what is there is loaded, however long that takes and however fast computing is.
        store: Any = engine._store
        store._compute_seconds = None
        for tier in store._tiers:
            if isinstance(tier, RedisTier):
                tier._server._patience_s = 10.0
        print("ready", flush=True)
        for line in sys.stdin:
            answer = read(engine, int(line))
            engine.flush()
            print(json.dumps(answer), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=10, help="of each process")
    parser.add_argument("--families", nargs="+", default=["llama", "qwen2", "gemma3_text", "gpt2"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], json.loads(args.serve[1]))
    torch.set_num_threads(1)
    names = [str(args.model.resolve())] if args.model else args.families
    failed = False
    begin = time.monotonic()
    rows = []
    with redis_server() as server:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                for kind, where in (("directory", {"disk_cache_dir": folder}), ("Redis", {"remote_url": server.url})):
                    row = both_ways(name, {"chunk_size": 32, "quality": "exact", **where}, args.texts)
                    rows.append((Path(name).name, kind, *row))
    print(f"{describe_machine(dtype='float32').line}\n")
    print(
        "| model | over one | texts, both ways | reused by the other | tokens reused | same bits | as a cold engine |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, kind, texts, reused, tokens, same, cold in rows:
        print(f"| {name} | {kind} | {texts} | {reused} | {tokens:,} of {texts * _TOKENS:,} | {same} | {cold} |")
        failed |= not texts == reused == same == cold
    print(f"\n{time.monotonic() - begin:.0f} s.")
    return int(failed)


def both_ways(name: str, settings: dict[str, Any], texts: int) -> tuple[int, int, int, int, int]:
    command = [sys.executable, __file__, "--serve", name, json.dumps(settings)]
    ones = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    reused = tokens = same = as_cold = 0
    plain = {key: settings[key] for key in ("chunk_size", "quality")}
    with KVBoost(load(name), None, **plain, cache_bytes=0, workspace_bytes=0) as cold:
        for one in ones:
            assert _answer(one) == "ready"
        for number in range(texts):
            own = [2 * number, 2 * number + 1]
            computed = _ask(ones, own)
            found = _ask(ones, own[::-1])[::-1]
            at_home = _ask(ones, own)
            results = zip(own, computed, found, at_home, strict=True)
            for seed, (_, _, there), (count, bitwise, here), (most, _, _) in results:
                reused += 0 < most == count and bitwise
                tokens += count
                same += here == there
                as_cold += here == read(cold, seed)[2]
    for one in ones:
        assert one.stdin is not None
        one.stdin.close()
        one.wait()
    return 2 * texts, reused, tokens, same, as_cold


def _ask(ones: list[subprocess.Popen[str]], seeds: list[int]) -> list[list[Any]]:
    """Both at the same time."""
    for one, seed in zip(ones, seeds, strict=True):
        assert one.stdin is not None
        one.stdin.write(f"{seed}\n")
        one.stdin.flush()
    return [json.loads(_answer(one)) for one in ones]


def _answer(one: subprocess.Popen[str]) -> str:
    assert one.stdout is not None
    return one.stdout.readline().strip()


if __name__ == "__main__":
    sys.exit(main())
