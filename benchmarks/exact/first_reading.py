"""A first reading against plain Transformers, and a second one against a hand-kept cache.

Cold: a prompt that is not stored, through ``engine.generate`` and ``model.generate``, one new token each, storing
included. Warm: a text that was read before with a question behind it, as plain text without boundaries, against plain
Transformers and against the bare forward of the question on a ``DynamicCache`` in place. Every call alternates.
With ``--moe`` the model is a mixture of experts with random weights, 2 of 8 experts for each token in 4 layers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measure import (
    TextSource,
    add_model_arguments,
    alternate,
    bare_forward,
    load_engine,
    positive,
    wall_ms,
)
from benchmarks.common.report import BenchError, Report
from benchmarks.internals import stock_cache
from kvboost.bench.report import Machine, Spread, Table, describe_machine, ratios, say
from kvboost.engine import KVBoost

QUICK = {"lengths": [200], "read": 200, "repeat": 1, "dtype": ["float32"]}

_QUESTION = "\n\nIn one sentence: what is the text above about, and what does it not say?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser, dtypes=("float32", "bfloat16"))
    parser.add_argument(
        "--moe",
        type=positive,
        nargs="?",
        const=1024,
        metavar="WIDTH",
        help="in the place of --model: a made-up mixture of experts with so many inputs (default 1024)",
    )
    parser.add_argument("--lengths", type=positive, nargs="+", default=[280, 2000, 6000], help="tokens of cold prompts")
    parser.add_argument("--read", type=positive, default=2000, help="tokens read before the question (default 2000)")
    parser.add_argument("--repeat", type=positive, default=7, help="rounds measured (default 7)")
    parser.add_argument("--warmups", type=int, default=1, help="rounds before, of cold prompts (default 1)")


def run(args: argparse.Namespace) -> Report:
    """Measure every dtype."""
    if args.moe is None:
        return _measure(args)
    from benchmarks.common.stand_ins import make_mixture

    with tempfile.TemporaryDirectory(prefix="kvboost-mixture-") as scratch:
        args.model = make_mixture(Path(scratch), width=args.moe)
        return _measure(args)


def _measure(args: argparse.Namespace) -> Report:
    report = Report("first_reading")
    for dtype in args.dtype:
        engine = load_engine(args, dtype=dtype, cache_bytes="4GiB")
        source = TextSource(engine.tokenizer, args.text)
        machine = describe_machine(dtype=dtype, model=str(args.model))
        cold = [_cold(engine, source.window(0, length), args.repeat, args.warmups) for length in args.lengths]
        warm = _warm(engine, source.window(1, args.read), args.repeat)
        report.tables += [_cold_table(cold, machine), _warm_table(warm, machine)]
        report.raw[dtype] = {"cold": cold, "warm": warm}
    return report


def _plain(engine: KVBoost, tokens: list[int]) -> Callable[[], float]:
    """Plain Transformers, up to the first new token."""
    ids = torch.tensor([tokens], device=engine.model.device)
    wanted = {"max_new_tokens": 1, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return lambda: wall_ms(lambda: engine.model.generate(ids, **wanted))


def _cold(engine: KVBoost, tokens: list[int], repeat: int, warmups: int) -> dict[str, Any]:
    def first() -> float:
        engine.clear()
        took = wall_ms(lambda: results.append(engine.generate(tokens, max_new_tokens=1, temperature=0)))
        if results[-1].reuse.exact_tokens:
            raise BenchError("a first reading found something stored")
        return took

    results: list[Any] = []
    label = f"cold, {len(tokens)} tokens"
    times = alternate({"ours": first, "plain": _plain(engine, tokens)}, repeat=repeat, warmups=warmups, label=label)
    return {"tokens": len(tokens), **times}


def _warm(engine: KVBoost, tokens: list[int], repeat: int) -> dict[str, Any]:
    engine.clear()
    text = engine.tokenizer.decode(tokens)
    prompt = text + _QUESTION
    say(f"reading {len(tokens)} tokens")
    read = engine.generate(text, max_new_tokens=1, temperature=0).prompt_token_ids
    asked = list(engine.encode(prompt))
    common = next((i for i, (a, b) in enumerate(zip(read, asked, strict=False)) if a != b), len(read))
    ids = torch.tensor([asked], device=engine.model.device)
    cache = stock_cache()
    with torch.no_grad():
        engine.model(input_ids=ids[:, :common], past_key_values=cache, use_cache=True, logits_to_keep=1)
    results: list[Any] = []

    def second(run: int = 0) -> float:
        engine.clear()
        engine.generate(text, max_new_tokens=1, temperature=0)
        return wall_ms(lambda: results.append(engine.generate(prompt, max_new_tokens=1, temperature=0)))

    times = alternate(
        {"ours": second, "bare": bare_forward(engine, asked[common:], cache), "plain": _plain(engine, asked)},
        repeat=repeat,
        warmups=1,
        label=f"warm, {len(asked)} tokens",
    )
    reused = {result.reuse.exact_tokens for result in results}
    ttft = [result.ttft_ms for result in results[1:]]
    return {"tokens": len(asked), "common": common, "reused": sorted(reused), "ttft": ttft, **times}


def _cold_table(samples: list[dict[str, Any]], machine: Machine) -> Table:
    table = Table("A first reading", machine, ["prompt", "plain ms", "kvboost ms", "kvboost / plain"])
    for sample in samples:
        table.add(
            sample["tokens"],
            Spread.of(sample["plain"]).text(0),
            Spread.of(sample["ours"]).text(0),
            Spread.of(ratios(sample["ours"], sample["plain"])).text(3),
        )
    table.notes.append("Whole calls, one new token, storing included; cells are median [min max].")
    return table


def _warm_table(sample: dict[str, Any], machine: Machine) -> Table:
    columns = ["prompt", "read before", "reused", "plain ms", "bare ms", "TTFT ms", "TTFT / bare", "plain / whole call"]
    table = Table("A text read before, with a question behind it, as plain text", machine, columns)
    table.add(
        sample["tokens"],
        sample["common"],
        ", ".join(map(str, sample["reused"])),
        Spread.of(sample["plain"]).text(0),
        Spread.of(sample["bare"]).text(1),
        Spread.of(sample["ttft"]).text(1),
        Spread.of(ratios(sample["ttft"], sample["bare"])).text(3),
        Spread.of(ratios(sample["plain"], sample["ours"])).text(1),
    )
    table.notes.append(
        "Bare: the model's own forward of the tokens that are not in common, on a DynamicCache in place. TTFT is from "
        "the call, tokenizing included."
    )
    return table
