"""Decodes with KV many times its budget, next to the same model with all its KV in memory.

usage: python proofs/paging.py smollm2 --model FOLDER [--context 8000] [--share 8] | synthetic [--context 32000]

``smollm2``: a trained model in float32 reads a text, then decodes greedily, unpaged and with a budget of one part in
``--share`` of its KV: the same tokens, the distance of the logits, tokens/s of both, peak bytes by the pager's ledger,
and the bound that reading the spilled pages sets, measured bare in the same run. ``synthetic``: a tiny model with
a long context in a budget of 1/64, its last logits against unpaged.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from kvboost.bench.report import describe_machine
from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.runner import ModelRunner
from kvboost.offload.kv import PagedCache, probe_paging
from kvboost.offload.kv.prefill import block_tokens_for
from kvboost.offload.kv.spill import FileSpill

_STEP = 512
_TOLERANCE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["smollm2", "synthetic"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--context", type=int)
    parser.add_argument("--share", type=int)
    parser.add_argument("--new", type=int, default=128, help="tokens to decode")
    parser.add_argument("--block", type=int, help="tokens in a block; as the engine chooses")
    parser.add_argument("--directory", type=Path, help="where to spill; not one that lies in memory")
    args = parser.parse_args()
    if args.what == "smollm2":
        if args.model is None:
            parser.error("smollm2 needs --model FOLDER")
        folder = args.model.expanduser()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = text(AutoTokenizer.from_pretrained(folder), args.context or 8000)
        compare(model, ids, args, share=args.share or 8, title=folder.name)
    else:
        context = args.context or 32_000
        ids = torch.randint(3, 97, (context,), generator=torch.Generator().manual_seed(0))
        compare(tiny(context + args.new), ids, args, share=args.share or 64, title="tiny Llama")


def text(tokenizer: Any, tokens: int) -> torch.Tensor:
    """This project's own sources, which are English and code."""
    root = Path(__file__).parent.parent
    parts: list[int] = []
    for file in sorted([*root.glob("docs/**/*.md"), *root.glob("src/**/*.py")]):
        parts += tokenizer(file.read_text())["input_ids"]
        if len(parts) >= tokens:
            return torch.tensor(parts[:tokens])
    raise SystemExit(f"the repository has {len(parts)} tokens; ask for fewer")


def tiny(positions: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def run(
    model: Any, cache: Any, ids: torch.Tensor, new: int, *, when_read: Callable[[], None] = lambda: None
) -> tuple[list[int], torch.Tensor, float, float]:
    """Greedy tokens, their logits [new, vocab], seconds of reading, seconds for each token."""
    runner = ModelRunner(model)
    begun = time.perf_counter()
    for start in range(0, len(ids) - 1, _STEP):
        runner.run(ids[None, start : min(start + _STEP, len(ids) - 1)], cache, logits=False)
    read = time.perf_counter() - begun
    when_read()
    token, tokens, logits, seconds = ids[-1:], [], [], 0.0
    for _ in range(new):
        begun = time.perf_counter()
        last = runner.run(token.view(1, 1), cache, logits=True)
        seconds += time.perf_counter() - begun
        assert last is not None
        token = last.argmax().view(1)
        tokens.append(int(token))
        logits.append(last)
    return tokens, torch.stack(logits), read, seconds / new


def compare(model: Any, ids: torch.Tensor, args: argparse.Namespace, *, share: int, title: str) -> None:
    layout = probe_paging(model, directory=args.directory)
    whole = layout.bytes_per_token * (len(ids) + args.new)
    budget = whole // share
    block = args.block or block_tokens_for(layout, budget)
    print(describe_machine(dtype="float32", model=title).line, flush=True)
    expected, stock_logits, stock_read, stock_each = run(model, DynamicCache(), ids, args.new)
    _, slab_logits, _, slab_each = run(model, SlabCache(layout, capacity=len(ids) + args.new), ids, args.new)
    with PagedCache(model, kv_bytes=budget, block_tokens=block, directory=args.directory, layout=layout) as cache:
        ledger, waits = cache.ledger, list[float]()

        def when_read() -> None:
            waits.append(ledger.waited_seconds)

        found, paged_logits, paged_read, paged_each = run(model, cache, ids, args.new, when_read=when_read)
        waited_reading, waited_decoding = waits[-1], ledger.waited_seconds - waits[-1]
        per_token = sum(len(layer.slots_ahead()) for layer in cache.layers) * page_bytes(layout, block)
    bare = bare_read(args.directory, page_bytes(layout, block), cache.pages_at_once)
    equal = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(expected))
    # Behind a token that differs the two read different texts.
    compared = slice(0, min(equal + 1, args.new))
    scale = stock_logits[compared].abs().max()
    blocks = f"blocks of {block} tokens, {cache.pages_at_once} read at once"
    print(f"\n{title}, {len(ids)} tokens of context, {args.new} decoded, {blocks}\n")
    print("| | unpaged (DynamicCache) | unpaged (SlabCache) | paged |\n|---|---:|---:|---:|")
    print(f"| KV in memory, MB | {whole / 1e6:.1f} | {whole / 1e6:.1f} | {ledger.peak / 1e6:.1f} |")
    print(f"| reading the text, s | {stock_read:.1f} | | {paged_read:.1f} |")
    print(f"| decode, tokens/s | {1 / stock_each:.2f} | {1 / slab_each:.2f} | {1 / paged_each:.2f} |")
    distances = {
        name: float((logits[compared] - stock_logits[compared]).abs().max() / scale)
        for name, logits in (("SlabCache", slab_logits), ("paged", paged_logits))
    }
    for name, distance in distances.items():
        print(f"\n{name}: largest distance of logits from DynamicCache's, relative: {distance:.1e}")
    print(f"greedy tokens equal: {equal} of {args.new}")
    print(f"peak {ledger.peak:,} bytes of a budget of {ledger.limit:,} (1/{share} of the KV)")
    bound = bare / max(per_token, 1)
    print(
        f"{per_token / 1e6:.1f} MB read for each token; bare reads of them: {bare / 1e9:.2f} GB/s, which allows "
        f"{bound:.2f} tokens/s; waited for pages: {waited_reading:.1f} s reading, {waited_decoding:.1f} s decoding"
    )
    both = 1 / (1 / bound + slab_each)
    print(
        f"paged decoding against unpaged: {slab_each / paged_each:.0%}; against that bound: "
        f"{1 / paged_each / bound:.0%}; "
        f"against reading and computing one after the other ({both:.2f} tokens/s): {1 / paged_each / both:.0%}"
    )
    if equal < args.new or ledger.peak > ledger.limit or distances["paged"] > _TOLERANCE:
        sys.exit(1)


def page_bytes(layout: KVLayout, block: int) -> int:
    return -(-2 * block * layout.slots[0].bytes_per_row // 4096) * 4096


def bare_read(directory: Path | None, size: int, at_once: int, *, total: int = 200 * 10**6) -> float:
    """Bytes per second of pages of this size, as many at once, by the same means and nothing computed."""
    spill = FileSpill(directory)
    frame = spill.frame(size).random_(0, 256)
    count = max(1, total // (size * at_once))
    for slot in range(count * at_once):
        spill.write(slot, frame)
    pages = spill.frame(size * at_once).view(at_once, size)
    begun = time.perf_counter()
    for group in range(count):
        spill.read(range(group * at_once, (group + 1) * at_once), pages)
    speed = count * size * at_once / (time.perf_counter() - begun)
    spill.close()
    return speed


if __name__ == "__main__":
    main()
