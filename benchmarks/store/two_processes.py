"""Two engines in two processes over one directory or one Redis: each reuses what the other computed, bit for bit.

In every round both processes prefill a text of their own at the same time and flush it; then each prefills the other's.
What it reused must be as much as the one who computed it finds again itself, and logits and KV must be that one's
and a cold engine's in this process. Tiny models, one for each family, or a trained one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measure import positive
from benchmarks.common.report import Report
from benchmarks.common.servers import redis_server
from benchmarks.internals import without_deadlines
from kvboost.engine import KVBoost
from tests.helpers.models import tiny_model

QUICK = {"texts": 1, "families": ["llama"]}
_TOKENS = 400


def load(name: str) -> Any:
    """A tiny model of a family, or the model in a folder."""
    if "/" not in name:
        return tiny_model(name)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()


def text(seed: int) -> list[int]:
    return torch.randint(3, 97, (_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill(engine: KVBoost, seed: int) -> list[Any]:
    """How much was reused, and a digest of everything that came out."""
    result = engine.prefill(text(seed))
    digest = hashlib.sha256(result.logits.numpy().tobytes())
    for states in result.cache.extract(0, _TOKENS):
        digest.update(states.contiguous().numpy().tobytes())
    return [result.reuse.cached_tokens, result.reuse.bitwise, digest.hexdigest()]


def answer_requests(name: str, settings: dict[str, Any]) -> None:
    """One of the two processes: prefills what it is told to."""
    torch.set_num_threads(1)
    with KVBoost(load(name), None, **settings) as engine:
        without_deadlines(engine)  # this is about bits, not about time
        print("ready", flush=True)
        for line in sys.stdin:
            answer = prefill(engine, int(line))
            engine.flush()
            print(json.dumps(answer), flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--texts", type=positive, default=10, help="of each process (default 10)")
    parser.add_argument("--families", nargs="+", default=["llama", "qwen2", "gemma3_text", "gpt2"])
    parser.add_argument("--trained", type=Path, metavar="FOLDER", help="a trained model instead of tiny ones")


def run(args: argparse.Namespace) -> Report:
    """Every model over a directory and over Redis."""
    torch.set_num_threads(1)
    names = [str(args.trained.resolve())] if args.trained else args.families
    report = Report("two_processes")
    columns = ["model", "over one", "texts, both ways", "reused by the other", "tokens reused", "same bits", "as cold"]
    table = report.table("Two processes over one tier", columns, dtype="float32")
    with redis_server() as server:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                for kind, where in (("directory", {"disk_cache_dir": folder}), ("Redis", {"remote_url": server.url})):
                    settings = {"chunk_size": 32, "quality": "exact", **where}
                    texts, reused, tokens, same, cold = both_ways(name, settings, args.texts)
                    share = f"{tokens:,} of {texts * _TOKENS:,}"
                    table.add(Path(name).name, kind, texts, reused, share, same, cold)
                    report.failed |= not texts == reused == same == cold
    return report


def both_ways(name: str, settings: dict[str, Any], texts: int) -> tuple[int, int, int, int, int]:
    code = f"from benchmarks.store.two_processes import answer_requests; answer_requests({name!r}, {settings!r})"
    command = [sys.executable, "-c", code]
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
            for seed, (_, _, there), (count, bitwise, here), (own_hit, _, _) in results:
                reused += 0 < own_hit == count and bitwise
                tokens += count
                same += here == there
                as_cold += here == prefill(cold, seed)[2]
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
