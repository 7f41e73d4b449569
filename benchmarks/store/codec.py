"""Codec: what storing KV in fewer bits costs in quality and time, and what it saves.

A text's first part is prefilled once; its KV is packed and unpacked chunk by chunk into
another cache, the rest of the text is fed behind both, and the predictions are compared. Beside the codecs of the
package stand the schemes they were chosen from, which only round here. Invariant: all of them see the same KV.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common import rag
from benchmarks.common.measure import DTYPES, add_engine_arguments, load_engine, positive
from benchmarks.common.quality import agreement, mean_cell
from benchmarks.common.report import Progress, Report
from benchmarks.common.roundings import SCHEMES, Rounding
from benchmarks.internals import (
    KeyRepositioner,
    KVCodec,
    KVLayout,
    SlabCache,
    TensorSpec,
    codec_for,
    probe_model,
    probe_reposition,
)
from kvboost.bench.report import Table, describe_machine, say
from kvboost.errors import UnsupportedModelError

_SHAPES = {"SmolLM2-135M": (30, 3, 64), "Llama-3-8B": (32, 8, 128)}  # layers, key and value heads, dim
QUICK = {"prompts": 2, "context": 300, "tokens": 8, "repeat": 2}
_BITS = (8, 4)
_16_BIT = 2  # bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    add_engine_arguments(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    rag.add_arguments(parser)
    parser.set_defaults(prompts=50)
    parser.add_argument("--context", type=positive, default=1000, help="tokens whose KV is packed (default 1000)")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens fed behind them (default 64)")
    parser.add_argument("--chunk-size", type=positive, default=128, help="tokens packed at a time (default 128)")
    parser.add_argument("--codecs-only", action="store_true", help="leave out the schemes that were not chosen")
    parser.add_argument("--repeat", type=positive, default=15, help="of each timing (default 15)")


def run(args: argparse.Namespace) -> Report:
    """Quality on real text, then speed on two models' shapes."""
    engine = load_engine(args, dtype=args.dtype)
    layout = probe_model(engine.model).layout
    prompts = rag.load_prompts(
        engine.tokenizer, args.data, count=args.prompts, passages=args.passages, whole_passages=args.whole_passages
    )
    trips = _trips(engine.model, layout, codecs_only=args.codecs_only)
    report = Report("codec", raw={"samples": []})
    progress = Progress("texts", len(prompts))
    for number, prompt in enumerate(prompts):
        for name, sample in _compare(engine.model, layout, prompt.tokens, trips, args).items():
            report.raw["samples"].append({"text": number, "name": name, **sample})
        progress.step()
    report.tables.append(_quality_table(report.raw, list(trips), args))
    report.raw["speed"] = speeds(chunk=args.chunk_size, repeat=args.repeat)
    report.tables.append(_speed_table(report.raw["speed"], args))
    return report


Trip = Callable[[Sequence[torch.Tensor], int], Sequence[torch.Tensor]]
"""A block's tensors and where they stood -> the same as they come back from the store."""


def _trips(model: Any, layout: KVLayout, *, codecs_only: bool) -> dict[str, Trip]:
    """Every way of packing, by name."""
    trips: dict[str, Trip] = {}
    for bits in _BITS:
        codec = codec_for(bits, layout)
        trips[codec.name] = partial(_through, codec)
    if codecs_only:
        return trips
    try:
        mover: KeyRepositioner | None = probe_reposition(model, layout)
    except UnsupportedModelError as error:
        say(f"without the schemes that store keys before RoPE: {error}")
        mover = None
    for name, rounding in SCHEMES.items():
        if mover is not None or not rounding.before_rope:
            trips[name] = partial(_rounded, rounding, layout, mover)
    return trips


def _through(codec: KVCodec, tensors: Sequence[torch.Tensor], start: int) -> Sequence[torch.Tensor]:
    return codec.unpack(codec.pack(tensors, start=start))


def _rounded(
    rounding: Rounding, layout: KVLayout, mover: KeyRepositioner | None, tensors: Sequence[torch.Tensor], start: int
) -> Sequence[torch.Tensor]:
    return rounding.trip(tensors, layout, mover if rounding.before_rope else None, start)


@torch.no_grad()
def _compare(
    model: Any,
    layout: KVLayout,
    tokens: Sequence[int],
    trips: dict[str, Trip],
    args: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """How each trip changes the predictions for the tokens behind the context."""
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([list(tokens[: args.context + args.tokens + 1])], device=device)
    context = ids.shape[1] - args.tokens - 1
    rest, truth = ids[:, context:-1], ids[0, context + 1 :]
    cache = SlabCache(layout, capacity=ids.shape[1])
    model(input_ids=ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
    blocks = [
        (start, cache.extract(start, min(start + args.chunk_size, context)))
        for start in range(0, context, args.chunk_size)
    ]
    full = model(input_ids=rest, past_key_values=cache, use_cache=True).logits[0]  # [tokens, vocab]
    samples = {"as it is": {**agreement(full, full), "nll": _nll(full, truth)}}
    for name, trip in trips.items():
        for start, tensors in blocks:
            cache.place(start, trip(tensors, start))
        cache.set_length(context)
        logits = model(input_ids=rest, past_key_values=cache, use_cache=True).logits[0]
        samples[name] = {**agreement(full, logits), "nll": _nll(logits, truth)}
    return samples


def _nll(logits: torch.Tensor, truth: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits.float(), truth))


def packed_bits(codec: KVCodec, layout: KVLayout, tokens: int, *, start: int = 1) -> float:
    """Bits per element that a block of this many tokens takes, everything counted."""
    block = [
        torch.zeros(len(slots), spec.heads, tokens, spec.dim, dtype=spec.dtype, device=spec.device)
        for spec, slots in layout.groups.items()
    ]
    packed = sum(t.numel() * t.element_size() for t in codec.pack(block, start=start))
    return 8 * packed / sum(t.numel() for t in block)


def speeds(*, chunk: int, repeat: int) -> list[dict[str, Any]]:
    """Packing and unpacking of one block on one thread, by its processor time: another's load does not count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    try:
        for shape, (layers, heads, dim) in _SHAPES.items():
            for dtype in DTYPES:
                kind: torch.dtype = getattr(torch, dtype)
                layout = KVLayout((TensorSpec(heads, dim, kind, torch.device("cpu")),) * (2 * layers))
                cache = SlabCache(layout, capacity=4 * chunk)
                block = (torch.randn(2 * layers, heads, chunk, dim).to(kind),)
                size = block[0].numel() * _16_BIT
                for bits in (16, *_BITS):
                    codec = codec_for(bits, layout)
                    packed = codec.pack(block, start=chunk)
                    entry: dict[str, Any] = {"shape": shape, "dtype": dtype, "codec": codec.name}
                    entry["ratio"] = 16.0 / packed_bits(codec, layout, chunk) if bits < 16 else None
                    entry["encode"] = _rate(size, partial(codec.pack, block, start=chunk), repeat)
                    entry["decode"] = _rate(size, partial(codec.place, cache, chunk, packed), repeat)
                    found.append(entry)
    finally:
        torch.set_num_threads(threads)
    return found


def _rate(size: int, call: Callable[[], Any], repeat: int) -> list[float]:
    """GB/s of every run after the first two."""
    rates = []
    for _ in range(repeat + 2):
        begin = time.thread_time()
        call()
        rates.append(size / 1e9 / (time.thread_time() - begin))
    return rates[2:]


def _quality_table(raw: dict[str, Any], names: Sequence[str], args: argparse.Namespace) -> Table:
    table = Table(
        f"Codec: {args.prompts} texts, {args.context} tokens packed, {args.tokens} predicted behind them",
        describe_machine(dtype=args.dtype, model=str(args.model)),
        ["stored as", "mean KL [95 %]", "first-token KL", "top-1, %", "perplexity"],
    )
    for name in ("as it is", *names):
        samples = [sample for sample in raw["samples"] if sample["name"] == name]
        first, top = (sum(s[key] for s in samples) / len(samples) for key in ("first_kl", "top1"))
        perplexity = math.exp(sum(s["nll"] for s in samples) / len(samples))
        kl = mean_cell(samples, "kl", digits=5)
        table.add(name, kl, f"{first:.5f}", f"{100 * top:.2f}", f"{perplexity:.3f}")
    table.notes.append(f"KL(untouched, packed) over the whole vocabulary. Chunks of {args.chunk_size} tokens.")
    return table


def _speed_table(found: Sequence[dict[str, Any]], args: argparse.Namespace) -> Table:
    table = Table(
        f"Codec: one block of {args.chunk_size} tokens, one thread, GB/s of 16-bit output, median [min max]",
        describe_machine(),
        ["shape, dtype, codec", "ratio to 16 bits", "encode", "decode"],
    )
    for entry in found:
        rates = [sorted(entry[way]) for way in ("encode", "decode")]
        cells = [f"{rate[len(rate) // 2]:.2f} [{rate[0]:.2f} {rate[-1]:.2f}]" for rate in rates]
        ratio = f"{entry['ratio']:.2f}" if entry["ratio"] else "-"
        table.add(f"{entry['shape']}, {entry['dtype']}, {entry['codec']}", ratio, *cells)
    table.notes.append("Every element counts two bytes, whatever the dtype. Processor time of the thread.")
    return table
