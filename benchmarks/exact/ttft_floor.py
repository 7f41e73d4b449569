"""TTFT against its floor: a warm first token against the bare forward of the query tokens alone.

No cache can undercut the model's forward of the query tokens on KV already in place. Warm requests are held against it:
KV still in the engine's workspace, KV copied from the store, KV copied into new memory, and a prompt given as text.
Invariant: no question is asked twice, as a prompt is stored to its very end.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.common.measure import (
    TextSource,
    add_model_arguments,
    alternate,
    bare_forward,
    engine_beside,
    first_token,
    load_engine,
    positive,
    wall_ms,
)
from benchmarks.common.report import BenchError, Report
from kvboost.bench.report import Machine, Spread, Table, describe_machine, ratios, say
from kvboost.engine import KVBoost
from kvboost.types import GenerationResult

QUICK = {"lengths": [600], "repeat": 2, "warmups": 1, "dtype": ["float32"]}

_CHUNK = 128
_BEFORE = 2  # requests before the measured ones: a cold one, and one that shows what is left to compute
_VARIANTS = ("in place", "copied", "new memory", "text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser, dtypes=("float32", "bfloat16"))
    parser.add_argument("--lengths", type=positive, nargs="+", default=[2000, 6000], help="default: 2000 6000 tokens")
    parser.add_argument("--query", type=positive, default=32, help="query tokens (default 32, at most 128)")
    parser.add_argument("--repeat", type=positive, default=15, help="pairs measured (default 15)")
    parser.add_argument("--warmups", type=positive, default=2, help="pairs run before (default 2)")


def run(args: argparse.Namespace) -> Report:
    """Measure every dtype and length."""
    if args.query > _CHUNK:
        raise BenchError(f"--query {args.query} is more than one step of {_CHUNK} tokens; give {_CHUNK} or less")
    report = Report("ttft_floor")
    for dtype in args.dtype:
        settings: dict[str, Any] = {
            "chunking": "fixed",
            "chunk_size": _CHUNK,
            "cache_bytes": "8GiB",
            "quality": "exact",
        }
        engine = load_engine(args, dtype=dtype, **settings)
        source = TextSource(engine.tokenizer, args.text)
        machine = describe_machine(dtype=dtype, model=str(args.model))
        samples = [
            sample
            for length in args.lengths
            for sample in _measure(engine, settings, source, _length(length, args.query), args)
        ]
        report.tables += [_table(samples, machine), _stage_table(samples, machine)]
        report.raw[dtype] = samples
    return report


def _length(wanted: int, query: int) -> int:
    """The length nearest to ``wanted`` whose cached part fills whole chunks."""
    return max(1, round((wanted - query) / _CHUNK)) * _CHUNK + query


def _other_engine(engine: KVBoost, variant: str, prompt: Any, settings: dict[str, Any]) -> KVBoost:
    """The engine to ask: another one, with less memory between requests, where KV is to be copied."""
    if variant == "copied":
        first_token(engine, prompt)
        stats = engine.cache_stats()
        # Enough for one workspace (a quarter larger than the prompt) but not for two.
        capacity = int(1.6 * stats["bytes_by_tier"]["memory"])
    elif variant == "new memory":
        capacity = 0
    else:
        return engine
    return engine_beside(engine, workspace_bytes=capacity, **settings)


def _prompts(engine: KVBoost, source: TextSource, length: int, args: argparse.Namespace, *, as_text: bool) -> list[Any]:
    """One beginning with a different question behind it for every request; all have as many tokens."""
    wanted = _BEFORE + args.warmups + args.repeat
    beginning = source.window(0, length - args.query)
    found: dict[tuple[int, ...], Any] = {}
    first: list[int] = []
    for start in range(len(beginning), len(source.ids) - args.query + 1, args.query):
        prompt: Any = [*beginning, *source.window(start, args.query)]
        if as_text:
            prompt = engine.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        tokens = engine.encode(prompt)
        first = first or tokens
        cached = (len(first) - 1) // _CHUNK * _CHUNK
        # Where text is joined, other tokens may come of it.
        if len(tokens) == len(first) and tokens[:cached] == first[:cached]:
            found[tuple(tokens)] = prompt
        if len(found) == wanted:
            return list(found.values())
    raise BenchError(
        f"the text has {len(found)} questions of {args.query} tokens behind the first {len(beginning)}, "
        f"{wanted} are needed; give longer files with --text"
    )


def _measure(
    engine: KVBoost, settings: dict[str, Any], source: TextSource, length: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    found = []
    for variant in _VARIANTS:
        engine.clear()
        cold, second, *others = _prompts(engine, source, length, args, as_text=variant == "text")
        asked = _other_engine(engine, variant, cold, settings)
        say(f"{variant}: cold prefill of {length} tokens")
        first_token(asked, cold)  # stores every chunk of the beginning
        again = first_token(asked, second)
        tokens, query = again.prompt_token_ids, again.reuse.fresh_tokens
        cache = asked.prefill(second).cache
        cache.crop(-query)
        remaining = iter(others)
        results: list[GenerationResult] = []
        calls: list[float] = []

        # Another text takes the one workspace there is and leaves its own KV in it.
        between = source.window(1, length) if variant == "copied" else None

        def warm(
            asked: KVBoost = asked,
            remaining: Any = remaining,
            between: Any = between,
            results: Any = results,
            calls: Any = calls,
        ) -> float:
            if between is not None:
                first_token(asked, between)
            prompt = next(remaining)
            calls.append(wall_ms(lambda: results.append(first_token(asked, prompt))))
            return float(results[-1].ttft_ms)

        label = f"{variant}, {len(tokens)} tokens"
        times = alternate(
            {"warm": warm, "bare": bare_forward(engine, tokens[-query:], cache)},
            repeat=args.repeat,
            warmups=args.warmups,
            label=label,
        )
        kept = results[args.warmups :]
        if any(result.reuse.fresh_tokens != query for result in kept):
            raise BenchError(f"{label}: not every warm request computed {query} tokens; the cache is too small for it")
        found.append(
            {
                "variant": variant,
                "prompt_tokens": len(tokens),
                "query_tokens": query,
                "ttft_ms": times["warm"],
                "call_ms": calls[args.warmups :],
                "bare_ms": times["bare"],
                "stages_ms": [dict(result.reuse.timings_ms) for result in kept],
            }
        )
        asked.clear()
    return found


def _table(samples: list[dict[str, Any]], machine: Machine) -> Table:
    columns = ["warm request", "prompt", "query", "TTFT ms", "whole call ms", "bare forward ms", "TTFT / bare"]
    table = Table("TTFT floor: first token of a warm request / bare forward of its query tokens", machine, columns)
    for sample in samples:
        table.add(
            sample["variant"],
            sample["prompt_tokens"],
            sample["query_tokens"],
            Spread.of(sample["ttft_ms"]).text(1),
            Spread.of(sample["call_ms"]).text(1),
            Spread.of(sample["bare_ms"]).text(1),
            Spread.of(ratios(sample["ttft_ms"], sample["bare_ms"])).text(3),
        )
    table.notes.append(
        "TTFT is the engine's own, from the call; `whole call` is a clock around the same call (it adds commit and "
        "the end of generate). Every request asks another question. Pairs alternate; cells are median [min max]. "
        "`in place`: KV still in the workspace. "
        "`copied`: a workspace that holds other text, all KV copied from the store. `new memory`: an engine without "
        "workspaces, all KV copied into memory that the system hands out anew. `text`: tokenizing included."
    )
    return table


def _stage_table(samples: list[dict[str, Any]], machine: Machine) -> Table:
    stages = list(dict.fromkeys(stage for sample in samples for run in sample["stages_ms"] for stage in run))
    table = Table("Where a warm request spends its time, median ms", machine, ["warm request", "prompt", *stages])
    for sample in samples:
        medians = [statistics.median(run.get(stage, 0.0) for run in sample["stages_ms"]) for stage in stages]
        table.add(sample["variant"], sample["prompt_tokens"], *(f"{value:.2f}" for value in medians))
    return table
