"""Paged KV: decoding with KV many times its budget, next to the same model with all its KV in memory.

A model in float32 prefills a text, then decodes greedily, unpaged and with a budget of one part in ``--share`` of its
KV: the same tokens, the distance of the logits, tokens/s of both, peak bytes by the pager's ledger, and the bound that
reading the spilled pages sets, measured bare in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from benchmarks.common.measure import TextSource, positive
from benchmarks.common.report import Report
from benchmarks.internals import KVLayout, ModelRunner, SlabCache
from kvboost.offload.kv.cache import PagedCache, probe_paging
from kvboost.offload.kv.pager import FileSpill
from kvboost.offload.kv.prefill import page_tokens_for

QUICK = {"context": 2000, "share": 8, "new": 8}
_STEP = 512
_TOLERANCE = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--trained", type=Path, metavar="FOLDER", help="a trained model instead of a tiny one")
    parser.add_argument("--text", type=Path, nargs="+", help="text for a trained model (default: Python's own library)")
    parser.add_argument("--context", type=positive, help="default: 8000 with a trained model, else 32000")
    parser.add_argument("--share", type=positive, help="one part of the KV as budget (default: 8 and 64)")
    parser.add_argument("--new", type=positive, default=128, help="tokens to decode (default 128)")
    parser.add_argument("--block", type=positive, help="tokens in a block; as the engine chooses")
    parser.add_argument("--directory", type=Path, help="where to spill; not one that lies in memory")


def run(args: argparse.Namespace) -> Report:
    """A trained model and its text, or a tiny one and made-up tokens."""
    if args.trained is not None:
        folder = args.trained.expanduser()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        source = TextSource(AutoTokenizer.from_pretrained(folder), args.text)
        ids = torch.tensor(source.window(0, args.context or 8000))
        return compare(model, ids, args, share=args.share or 8, title=folder.name)
    context = args.context or 32_000
    ids = torch.randint(3, 97, (context,), generator=torch.Generator().manual_seed(0))
    return compare(tiny(context + args.new), ids, args, share=args.share or 64, title="tiny Llama")


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
def decode(
    model: Any, cache: Any, ids: torch.Tensor, new: int, *, when_read: Callable[[], None] = lambda: None
) -> tuple[list[int], torch.Tensor, float, float]:
    """Greedy tokens, their logits [new, vocab], seconds of prefill, seconds for each token."""
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


def compare(model: Any, ids: torch.Tensor, args: argparse.Namespace, *, share: int, title: str) -> Report:
    layout = probe_paging(model, directory=args.directory)
    whole = layout.bytes_per_token * (len(ids) + args.new)
    budget = whole // share
    block = args.block or page_tokens_for(layout, budget)
    expected, stock_logits, stock_read, stock_each = decode(model, DynamicCache(), ids, args.new)
    _, slab_logits, _, slab_each = decode(model, SlabCache(layout, capacity=len(ids) + args.new), ids, args.new)
    with PagedCache(model, kv_bytes=budget, block_tokens=block, directory=args.directory, layout=layout) as cache:
        ledger, waits = cache.ledger, list[float]()

        def when_read() -> None:
            waits.append(ledger.waited_seconds)

        found, paged_logits, paged_read, paged_each = decode(model, cache, ids, args.new, when_read=when_read)
        waited_reading, waited_decoding = waits[-1], ledger.waited_seconds - waits[-1]
        per_token = sum(len(layer.slots_ahead()) for layer in cache.layers) * page_bytes(layout, block)
    bare = bare_read(args.directory, page_bytes(layout, block), cache.pages_at_once)
    equal = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(expected))
    # Behind a token that differs the two read different texts.
    compared = slice(0, min(equal + 1, args.new))
    scale = stock_logits[compared].abs().max()
    report = Report("kv_paging")
    table = report.table(
        f"{len(ids)} tokens of context, {args.new} decoded, blocks of {block}, {cache.pages_at_once} read at once",
        ["", "unpaged (DynamicCache)", "unpaged (SlabCache)", "paged"],
        dtype="float32",
        model=title,
    )
    distances = [
        float((logits[compared] - stock_logits[compared]).abs().max() / scale) for logits in (slab_logits, paged_logits)
    ]
    table.add("KV in memory, MB", *(f"{size / 1e6:.1f}" for size in (whole, whole, ledger.peak)))
    table.add("prefill, s", f"{stock_read:.1f}", "", f"{paged_read:.1f}")
    table.add("decode, tokens/s", *(f"{1 / each:.2f}" for each in (stock_each, slab_each, paged_each)))
    table.add("largest relative distance of logits", "-", *(f"{distance:.1e}" for distance in distances))
    bound = bare / max(per_token, 1)
    both = 1 / (1 / bound + slab_each)
    table.notes += [
        f"Greedy tokens equal: {equal} of {args.new}. Peak {ledger.peak:,} bytes of a budget of {ledger.limit:,} "
        f"(1/{share} of the KV).",
        f"{per_token / 1e6:.1f} MB read for each token; bare reads of them: {bare / 1e9:.2f} GB/s, which allows "
        f"{bound:.2f} tokens/s; waited for pages: {waited_reading:.1f} s in prefill, {waited_decoding:.1f} s decoding.",
        f"Paged decoding against unpaged: {slab_each / paged_each:.0%}; against that bound: "
        f"{1 / paged_each / bound:.0%}; against reading and computing one after the other ({both:.2f} tokens/s): "
        f"{1 / paged_each / both:.0%}.",
    ]
    report.failed = equal < args.new or ledger.peak > ledger.limit or distances[1] > _TOLERANCE
    return report


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
