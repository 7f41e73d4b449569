"""Hit rate of a real engine: the RAGPulse trace, the trace in a small memory, and reordered passages.

`hit_rate` counts what could be reused. Here the prompts go through the engine's own prefill and store, with a one-layer
model that costs next to nothing: the depth of approximate KV, variants of one content, beginnings that are computed at
their second visit, and the price of reuse (as guessed before anything was timed) all have their say. Then passages of
MuSiQue, prefilled once in a row, come again in another order, each behind a preamble of random length; with the
passages' ends given, and with cutting left to the chunker. With ``--capacity``: the trace in a memory of that size
instead, by LRU, by the default policy, and by that policy when it is not told of contents.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.common import rag
from benchmarks.common.measure import joined, positive
from benchmarks.common.ragpulse import KINDS, by_kind, part_tokens, prompt_of, read_trace
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.internals import prefill_reuse
from kvboost.config import parse_bytes
from kvboost.engine import KVBoost
from kvboost.extend import EvictionPolicy
from kvboost.store import LeafFirstLRU, LeastExpected, MemoryStore

QUICK = {"prompts": 1, "requests": 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="the folder of traces, with RAGPulse in ragpulse")
    parser.add_argument("--requests", type=positive, help="how many requests, from the first on (default all)")
    parser.add_argument("--capacity", nargs="+", default=[], help="replay within these sizes of memory, and no more")
    parser.add_argument("--model", type=Path, help="folder with a tokenizer, for the reordered passages")
    rag.add_arguments(parser)
    parser.set_defaults(prompts=20)


def run(args: argparse.Namespace) -> Report:
    """The trace within each capacity, or the reordered passages and the whole trace."""
    report = Report("hit_rate_engine")
    for capacity in args.capacity:
        replay_within(report, args, capacity)
    if not args.capacity:
        if args.model is None:
            raise BenchError("passages are reordered with a tokenizer; give its folder with --model FOLDER")
        reorder(report, args)
        replay(report, args)
    return report


def tiny_engine(**settings: Any) -> KVBoost:
    """A real engine around a model of one small layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50_000,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=2**17,
    )
    model = LlamaForCausalLM(config).eval()
    return KVBoost(model, None, recompute_strategy="none", **{"quality": "high", "cache_bytes": "16GiB", **settings})


class WithoutContent(LeastExpected):
    """The default policy as it would be if it knew blocks by their own keys only."""

    def inserted(self, key: bytes, *, content: bytes | None = None, **facts: Any) -> None:
        """A block was stored, whatever its content."""
        super().inserted(key, **facts)

    def admits(self, key: bytes, *, content: bytes | None = None, **facts: Any) -> bool:
        """Whether a block may take a victim's place, whatever its content."""
        return super().admits(key, **facts)


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "LRU": LeafFirstLRU,
    "default": LeastExpected,
    "default, not told of contents": WithoutContent,
}


def replay_within(report: Report, args: argparse.Namespace, capacity: str) -> None:
    """The trace in a memory that is too small for it, by policy."""
    columns = ["policy", "exact", "non-prefix", "together"]
    table = report.table(f"RAGPulse in {capacity}: reused, % of tokens", columns)
    for name, policy in _POLICIES.items():
        engine = tiny_engine(store=MemoryStore(parse_bytes(capacity, name="--capacity"), policy=policy()))
        total, exact, approx = (int(counts.sum()) for counts in _replay(engine, args, name))
        table.add(name, *(f"{100 * count / total:.1f}" for count in (exact, approx, exact + approx)))


def replay(report: Report, args: argparse.Namespace) -> None:
    """The trace, by kind of part."""
    total, exact, approx = _replay(tiny_engine(), args, "requests")
    table = report.table("RAGPulse: reused, % of tokens", ["", "all", *(kind.label for kind in KINDS)])
    for name, count in (("exact", exact), ("non-prefix", approx), ("together", exact + approx)):
        shares = [100 * part / max(1, whole) for part, whole in zip(count, total, strict=True)]
        table.add(name, f"{100 * count.sum() / total.sum():.1f}", *(f"{share:.1f}" for share in shares))


def _replay(engine: KVBoost, args: argparse.Namespace, label: str) -> tuple[Any, Any, Any]:
    """Tokens, exact hits and non-prefix hits, each by kind of part."""
    total = np.zeros(len(KINDS), dtype=np.int64)
    exact, approx = total.copy(), total.copy()
    requests = read_trace(args.traces, limit=args.requests)
    progress = Progress(label, len(requests))
    for parts in requests:
        tokens, kind_of, ends = prompt_of(parts, part_tokens)
        is_exact, is_approx = prefill_reuse(engine, tokens.tolist(), ends)
        total += by_kind(kind_of)
        exact += by_kind(kind_of[is_exact])
        approx += by_kind(kind_of[is_approx])
        progress.step()
    engine.close()
    return total, exact, approx


def reorder(report: Report, args: argparse.Namespace) -> None:
    """Passages in another order, each behind a preamble of its own length."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    columns = ["chunks, passages", "ends given", "cut by the chunker alone"]
    table = report.table("Reordered passages behind preambles: found again, %", columns)
    for size in (32, 64, 128):
        for whole in (False, True):
            prompts = rag.load_prompts(
                tokenizer, args.data, count=args.prompts, passages=args.passages, whole_passages=whole
            )
            shares = [_found_again(prompts, size, ends_given=given) for given in (True, False)]
            length = "whole (about 550 tokens)" if whole else "cut (about 250 tokens)"
            table.add(f"chunks of {size}, passages {length}", *(f"{share:.1f}" for share in shares))


def _found_again(prompts: Sequence[rag.RagPrompt], size: int, *, ends_given: bool) -> float:
    """Per cent of the passages' tokens."""
    rng = random.Random(1)
    known = wanted = 0
    for prompt in prompts:
        with tiny_engine(chunk_size=size) as engine:
            tokens, ends = joined([prompt.head, *prompt.passages])
            prefill_reuse(engine, tokens, ends if ends_given else [])
            for passage in rng.sample(prompt.passages, len(prompt.passages)):
                preamble = [rng.randrange(50_000) for _ in range(rng.randrange(1, 200))]
                tokens, ends = joined([prompt.head, preamble, passage, prompt.tail])
                _, reused = prefill_reuse(engine, tokens, ends if ends_given else [])
                known += int(reused[ends[1] : ends[2]].sum())
                wanted += len(passage)
    return 100 * known / wanted
