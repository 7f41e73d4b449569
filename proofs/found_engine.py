"""How much a real engine finds again, with every rule it has about what may be kept: RAGPulse, and moved passages.

    python proofs/found_engine.py --tokenizer FOLDER [--requests 7106]
    python proofs/found_engine.py --requests 2500 --capacity 10MiB 40MiB

`python -m kvboost.bench found` counts what could be found. Here the prompts go through the engine's own reader and
store, with a one-layer model that costs next to nothing: generations of approximate KV, variants of one content,
places that are computed at their second visit, and the price of moving (as guessed before anything was timed) all have
their say. Then passages of MuSiQue, read once in a row, come again in another order, each behind a preamble of
random length; with the passages' ends given, and with cutting left to the chunker. With ``--capacity``: the trace in a
memory of that size instead, by LRU, by the default policy, and by that policy when it is not told of contents.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvboost import KVBoost
from kvboost.bench import found, rag
from kvboost.bench.report import describe_machine
from kvboost.config import parse_bytes
from kvboost.core.clock import StageClock
from kvboost.core.plan import SegmentKind
from kvboost.extend import EvictionPolicy
from kvboost.store import LeafFirstLRU, LeastExpected, MemoryStore


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
    return KVBoost(model, None, recompute_strategy="none", **{"cache_bytes": "16GiB", **settings})


def read(engine: KVBoost, tokens: Sequence[int], ends: Sequence[int]) -> dict[SegmentKind, Any]:
    """Read a prompt as a request does, without an answer; for each kind of reuse, which tokens it served."""
    assert engine.parts is not None
    reader = engine.session.prefiller
    with reader.open(list(tokens), boundaries=ends, new_rows=0, clock=StageClock(), move=True) as reading:
        served = {kind: np.zeros(len(tokens), dtype=bool) for kind in SegmentKind}
        for segment in reading.plan.segments:
            served[segment.kind][segment.start : segment.end] = True
        reader.advance_to_last_step(reading)
        reader.commit(reading)
    return served


class WithoutContent(LeastExpected):
    """The default policy as it would be if it knew blocks by their own keys only."""

    def inserted(self, key: bytes, *, content: bytes | None = None, **facts: Any) -> None:
        super().inserted(key, **facts)

    def admits(self, key: bytes, *, content: bytes | None = None, **facts: Any) -> bool:
        return super().admits(key, **facts)


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "LRU": LeafFirstLRU,
    "default": LeastExpected,
    "default, not told of contents": WithoutContent,
}


def replay_within(folder: Path, *, requests: int | None, capacity: str) -> None:
    """The trace in a memory that is too small for it, by policy."""
    print(f"| RAGPulse in {capacity}, % of tokens | exact | moved | together |\n|---|---:|---:|---:|")
    for name, policy in _POLICIES.items():
        engine = tiny_engine(store=MemoryStore(parse_bytes(capacity, name="--capacity"), policy=policy()))
        total = exact = moved = 0
        for parts in tqdm(found.read_trace(folder, limit=requests), mininterval=10, desc=name):
            tokens, _, ends = found._prompt(parts, found.part_tokens)
            served = read(engine, tokens.tolist(), ends)
            total += len(tokens)
            exact += int(served[SegmentKind.EXACT].sum())
            moved += int(served[SegmentKind.APPROX].sum())
        shares = [f"{100 * count / total:.1f}" for count in (exact, moved, exact + moved)]
        print(f"| {name} | {' | '.join(shares)} |", flush=True)
        engine.close()


def replay(folder: Path, *, requests: int | None) -> None:
    """The trace, by kind of part."""
    engine = tiny_engine()
    kinds = [kind.label for kind in found._KINDS]
    total = np.zeros(len(kinds), dtype=np.int64)
    exact, moved = total.copy(), total.copy()
    for parts in tqdm(found.read_trace(folder, limit=requests), mininterval=10, desc="requests"):
        tokens, kind_of, ends = found._prompt(parts, found.part_tokens)
        served = read(engine, tokens.tolist(), ends)
        total += found._by_kind(kind_of)
        exact += found._by_kind(kind_of[served[SegmentKind.EXACT]])
        moved += found._by_kind(kind_of[served[SegmentKind.APPROX]])
    print(f"| RAGPulse, reused, % of tokens | all | {' | '.join(kinds)} |\n|---|{'---:|' * (len(kinds) + 1)}")
    for name, count in (("exact", exact), ("moved", moved), ("together", exact + moved)):
        shares = [100 * part / max(1, whole) for part, whole in zip(count, total, strict=True)]
        print(f"| {name} | {100 * count.sum() / total.sum():.1f} | {' | '.join(f'{s:.1f}' for s in shares)} |")
    engine.close()


def reorder(tokenizer: Any, data: Path, *, prompts: int) -> None:
    """Passages in another order, each behind a preamble of its own length."""
    print("| reordered passages behind preambles, found again, % | ends given | cut by the chunker alone |")
    print("|---|---:|---:|")
    for size in (32, 64, 128):
        for whole in (False, True):
            shares = []
            for given in (True, False):
                rng = random.Random(1)
                known = wanted = 0
                for prompt in rag.load_prompts(tokenizer, data, count=prompts, whole_passages=whole):
                    engine = tiny_engine(chunk_size=size)
                    parts: list[Sequence[int]] = [prompt.head, *prompt.passages]
                    read(engine, *laid_out(parts, given))
                    for passage in rng.sample(prompt.passages, len(prompt.passages)):
                        parts[1:] = [
                            [rng.randrange(50_000) for _ in range(rng.randrange(1, 200))],
                            passage,
                            prompt.tail,
                        ]
                        tokens, ends = laid_out(parts, given)
                        first = len(parts[0]) + len(parts[1])
                        served = read(engine, tokens, ends)[SegmentKind.APPROX][first : first + len(passage)]
                        known, wanted = known + int(served.sum()), wanted + len(passage)
                    engine.close()
                shares.append(100 * known / wanted)
            length = "whole (about 550 tokens)" if whole else "cut (about 250 tokens)"
            print(f"| chunks of {size}, passages {length} | {shares[0]:.1f} | {shares[1]:.1f} |")


def laid_out(parts: Sequence[Sequence[int]], given: bool) -> tuple[list[int], list[int]]:
    """The tokens, and where the parts end if that is told."""
    tokens = [token for part in parts for token in part]
    return tokens, [int(end) for end in np.cumsum([len(part) for part in parts])] if given else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=Path("../shared/traces/ragpulse"))
    parser.add_argument("--requests", type=int)
    parser.add_argument("--capacity", nargs="+", default=[], help="replay within these sizes of memory, and no more")
    parser.add_argument("--tokenizer", help="folder with a tokenizer")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/musique_150.json"))
    parser.add_argument("--prompts", type=int, default=20)
    args = parser.parse_args()
    print(f"{describe_machine().line}\n")
    for capacity in args.capacity:
        replay_within(args.trace, requests=args.requests, capacity=capacity)
        print()
    if args.capacity:
        return
    if args.tokenizer is None:
        parser.error("passages are reordered with a tokenizer: give --tokenizer FOLDER")
    reorder(AutoTokenizer.from_pretrained(args.tokenizer), args.data, prompts=args.prompts)
    print()
    replay(args.trace, requests=args.requests)


if __name__ == "__main__":
    main()
