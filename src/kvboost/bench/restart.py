"""Restart: the first token of an engine that has just been made, with KV from a slower tier, against a full reading.

Called by the command line. One engine reads the prompt and flushes; for every sample a new one is made, whose memory
is empty, and asked for one token. Invariants: both read the same tokens and alternate in one run; a sample in which
less than nine tenths came from the tier is no time: it is taken again, which the table says, and in the end an error.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from kvboost.bench.measure import TextSource, add_model_arguments, alternate, first_token, load_engine, positive
from kvboost.bench.report import BenchError, Report, Spread, Table, describe_machine, ratios
from kvboost.bench.servers import redis_server
from kvboost.engine import KVBoost

_FULL, _MEMORY = "full reading", "memory"
_MOST = 0.9  # of the prompt must come from the tier
_MAX_TRIES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    add_model_arguments(parser)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[2000], help="default: 2000 tokens")
    parser.add_argument("--repeat", type=positive, default=9, help="rounds measured (default 9)")
    parser.add_argument("--warmups", type=positive, default=1, help="rounds run before (default 1)")
    parser.add_argument("--no-redis", action="store_true", help="leave out Redis, which needs redis-server")
    parser.add_argument("--directory", type=Path, help="where to put the disk tier (default: a temporary folder)")


def run(args: argparse.Namespace) -> Report:
    """Every tier in turn, and the full reading."""
    report = Report("restart", raw={"samples": []})
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.directory, prefix="kvboost-restart-"))
        tiers: dict[str, dict[str, Any]] = {"disk": {"disk_cache_dir": folder}}
        if not args.no_redis:
            tiers["redis"] = {"remote_url": stack.enter_context(redis_server()).url}
        plain = load_engine(args, dtype=args.dtype, cache_bytes="8GiB")
        source = TextSource(plain.tokenizer, args.text)
        table = Table(
            "Restart: first token of a new engine, against a full reading",
            describe_machine(dtype=args.dtype, model=str(args.model)),
            ["KV from", "prompt", "cached", "TTFT ms", "full reading ms", "times faster"],
        )
        again: Counter[str] = Counter()
        for length in args.lengths:
            prompt = source.window(0, length)
            contestants: dict[str, Callable[[], float]] = {
                _FULL: partial(_full_reading, plain, prompt),
                _MEMORY: partial(_checked, plain, prompt),
            }
            cached: dict[str, int] = {_MEMORY: _fill(plain, prompt)}
            for name, settings in tiers.items():
                with _engine(plain, settings) as writer:
                    cached[name] = _fill(writer, prompt)
                contestants[name] = partial(_from_tier, plain, settings, prompt, again)
            samples = alternate(contestants, repeat=args.repeat, warmups=args.warmups, label=f"{length} tokens")
            report.raw["samples"].append({"length": length, **samples})
            for name in cached:
                spread, full = Spread.of(samples[name]), Spread.of(samples[_FULL])
                times = Spread.of(ratios(samples[_FULL], samples[name]))
                table.add(name, str(length), str(cached[name]), spread.text(0), full.text(0), times.text())
        plain.close()
    table.notes.append(
        "Median [lowest highest]. A new engine for every sample: its memory is empty, what it reads comes from the "
        "tier. Time counts from the call of generate(). The disk is read past the page cache where its file system "
        "allows that; Redis runs on this machine."
    )
    if again["samples"]:
        table.notes.append(f"{again['samples']} samples were taken again, as the tier was out of patience.")
    report.tables.append(table)
    return report


def _engine(plain: KVBoost, settings: dict[str, Any]) -> KVBoost:
    return KVBoost(plain.model, plain.tokenizer, quality="exact", cache_bytes="8GiB", **settings)


def _fill(engine: KVBoost, prompt: list[int]) -> int:
    """Read the prompt, write it down, and say how much of it is found again."""
    engine.prefill(prompt)
    engine.flush()
    return engine.prefill(prompt).reuse.cached_tokens


def _checked(engine: KVBoost, prompt: list[int]) -> float:
    result = first_token(engine, prompt)
    if result.cached_tokens < _MOST * len(prompt):
        raise BenchError(
            f"only {result.cached_tokens} of {len(prompt)} tokens came from the cache; "
            "give the tier room, or the machine less to do"
        )
    return result.ttft_ms


def _full_reading(engine: KVBoost, prompt: list[int]) -> float:
    return first_token(engine, prompt, baseline=True).ttft_ms


def _from_tier(plain: KVBoost, settings: dict[str, Any], prompt: list[int], again: Counter[str]) -> float:
    for _ in range(_MAX_TRIES - 1):
        with _engine(plain, settings) as engine:
            try:
                return _checked(engine, prompt)
            except BenchError:
                again["samples"] += 1  # a server on a busy machine may be out of patience
    with _engine(plain, settings) as engine:
        return _checked(engine, prompt)
