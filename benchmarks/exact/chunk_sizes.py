"""What the chunk size costs: a cold prefill that stores its chunks against plain Transformers, by size and rule."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.common.measure import TextSource, add_model_arguments, alternate, load_engine, positive, wall_ms
from benchmarks.internals import make_chunker, token_array
from kvboost.bench.report import Report, Spread, Table, describe_machine, ratios, say
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode, PrefillResult

QUICK = {"tokens": 400, "sizes": [64, 128], "repeat": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser, dtypes=("float32",))
    parser.add_argument("--tokens", type=positive, default=2000, help="prompt length (default 2000)")
    parser.add_argument("--sizes", type=positive, nargs="+", default=[64, 128, 256, 512], help="chunk sizes")
    parser.add_argument("--repeat", type=positive, default=5, help="pairs measured (default 5)")


def run(args: argparse.Namespace) -> Report:
    """Measure every chunk size and rule."""
    report = Report("chunk_sizes")
    for dtype in args.dtype:
        plain = load_engine(args, dtype=dtype)
        ids = TextSource(plain.tokenizer, args.text).window(0, args.tokens)
        table = Table(
            f"Chunk sizes: cold prefill of {len(ids)} tokens / plain Transformers",
            describe_machine(dtype=dtype, model=str(args.model)),
            ["chunking", "size", "steps", "cold ms", "of it storing ms", "plain ms", "cold / plain"],
        )
        say(f"{dtype}: {2 * len(args.sizes)} settings")
        report.raw[dtype] = [
            _measure(plain, ids, chunking, size, args.repeat, table)
            for chunking in ("content", "fixed")
            for size in args.sizes
        ]
        table.notes.append(
            "Times are clocks around engine.prefill() on an empty cache and around engine.prefill(mode=BASELINE); "
            "pairs alternate; cells are median [min max]. Storing the chunks is part of the cold call."
        )
        report.tables.append(table)
    return report


def _measure(plain: KVBoost, ids: list[int], chunking: str, size: int, repeat: int, table: Table) -> dict[str, Any]:
    engine = KVBoost(plain.model, plain.tokenizer, chunking=chunking, chunk_size=size, quality="exact")
    results: list[PrefillResult] = []

    def prefill(mode: GenerationMode) -> Callable[[], float]:
        def call() -> float:
            engine.clear()
            results.clear()  # the previous cache goes before the clock starts
            return wall_ms(lambda: results.append(engine.prefill(ids, mode=mode)))

        return call

    storing: list[float] = []

    def cold() -> float:
        took = prefill(GenerationMode.CHUNK_KV_REUSE)()
        storing.append(results[0].reuse.timings_ms["commit"])
        return took

    contestants = {"cold": cold, "plain": prefill(GenerationMode.BASELINE)}
    # The warm-up also pays for the digest of the weights, once per engine.
    times = alternate(contestants, repeat=repeat, warmups=1, label=f"{chunking} {size}")
    engine.close()
    cuts = make_chunker(chunking, size=size).cut(token_array(ids))
    steps = len(cuts) + (not cuts or cuts[-1] < len(ids))
    table.add(
        chunking,
        size,
        steps,
        Spread.of(times["cold"]).text(0),
        Spread.of(storing[1:]).text(0),
        Spread.of(times["plain"]).text(0),
        Spread.of(ratios(times["cold"], times["plain"])).text(3),
    )
    return {"chunking": chunking, "size": size, "steps": steps, "storing_ms": storing[1:], **times}
