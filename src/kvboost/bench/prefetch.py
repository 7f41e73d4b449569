"""Prefetch: what a first token with KV from a slower tier takes, and what of it loading can hide behind.

Called by the command line. For every sample a new engine is made, whose memory is empty, and asked for one token: as
it is, placing while it loads; with the blocks placed only after the last has come; and with a prefetch before the
clock starts. Beside these a bound for loading layer by layer: the whole load runs in a thread beside an engine that has
everything in memory, and the later of the two ends the sample. Invariants: all read the same tokens and alternate in
one run; a sample in which less than nine tenths came from the cache is an error, not a time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from kvboost.bench.measure import TextSource, add_model_arguments, alternate, first_token, load_engine, positive
from kvboost.bench.report import BenchError, Report, Spread, Table, describe_machine, ratios
from kvboost.bench.servers import redis_server
from kvboost.core.loader import KVLoader
from kvboost.engine import KVBoost

_AFTER, _WHILE, _PREFETCHED = "load, then place", "place while loading", "prefetched"
_BESIDE = "bound: load beside computing"
_MOST = 0.9  # of the prompt must come from the cache
_STAGES = ("lease", "place", "first_token")
_LOAD, _LOAD_CPU = "a prefetch", "its CPU time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    add_model_arguments(parser)
    parser.add_argument("--length", type=positive, default=2000, help="default: 2000 tokens")
    parser.add_argument("--repeat", type=positive, default=9, help="rounds measured (default 9)")
    parser.add_argument("--warmups", type=positive, default=1, help="rounds run before (default 1)")
    parser.add_argument("--tiers", nargs="+", choices=("disk", "redis"), default=["disk", "redis"])
    parser.add_argument("--directory", type=Path, help="where to put the disk tier (default: a temporary folder)")


def run(args: argparse.Namespace) -> Report:
    """Every tier in turn."""
    report = Report("prefetch", raw={"samples": {}, "stages": {}})
    machine = describe_machine(dtype=args.dtype, model=str(args.model))
    plain = load_engine(args, dtype=args.dtype, cache_bytes="8GiB", workspace_bytes=0)
    prompt = TextSource(plain.tokenizer, args.text).window(0, args.length)
    plain.prefill(prompt)
    whole = Table("Prefetch: ms to the first token", machine, ["KV from", "", "TTFT ms", f"against {_AFTER!r}"])
    parts = Table(f"Prefetch: ms by stage, {_AFTER!r}", machine, ["KV from", *_STAGES, _LOAD, _LOAD_CPU])
    for name in args.tiers:
        with ExitStack() as stack:
            if name == "disk":
                folder = stack.enter_context(
                    tempfile.TemporaryDirectory(dir=args.directory, prefix="kvboost-prefetch-")
                )
                settings: dict[str, Any] = {"disk_cache_dir": folder}
            else:
                settings = {"remote_url": stack.enter_context(redis_server()).url}
            sampling = _Sampling(plain, settings, prompt)
            sampling.fill()
            contestants = sampling.contestants()
            samples = alternate(contestants, repeat=args.repeat, warmups=args.warmups, label=name)
        report.raw["samples"][name] = samples
        report.raw["stages"][name] = dict(sampling.stages)
        for way in contestants:
            against = Spread.of(ratios(samples[way], samples[_AFTER]))
            whole.add(name, way, Spread.of(samples[way]).text(0), against.text())
        parts.add(name, *(f"{median(sampling.stages[stage][-args.repeat :]):.0f}" for stage in parts.columns[1:]))
    parts.notes.append("The CPU time is this process's, in all threads; a server's is not in it.")
    whole.notes.append(
        f"{args.length} tokens; median [lowest highest] of {args.repeat} rounds. A new engine for every sample. The "
        "bound is what layer by layer could reach at best: loading and computing share the cores and never wait for "
        "each other."
    )
    report.tables += [whole, parts]
    plain.close()
    return report


class _Sampling:
    """The ways to a first token with KV from one tier."""

    def __init__(self, plain: KVBoost, settings: dict[str, Any], prompt: list[int]) -> None:
        self._plain, self._settings, self._prompt = plain, settings, prompt
        self.stages: dict[str, list[float]] = defaultdict(list)

    def contestants(self) -> dict[str, Callable[[], float]]:
        """All of them."""
        return {
            _AFTER: partial(self._from_tier, after=True),
            _WHILE: self._from_tier,
            _PREFETCHED: partial(self._from_tier, prefetched=True),
            _BESIDE: self._beside,
        }

    def _engine(self) -> KVBoost:
        plain = self._plain
        return KVBoost(plain.model, plain.tokenizer, quality="exact", cache_bytes="8GiB", **self._settings)

    def fill(self) -> None:
        """Write the prompt's KV to the tier."""
        with self._engine() as engine:
            engine.prefill(self._prompt)
            engine.flush()

    def _from_tier(self, *, after: bool = False, prefetched: bool = False) -> float:
        with self._engine() as engine, ExitStack() as stack:
            if prefetched:
                began, cpu = time.perf_counter(), time.process_time()
                engine.prefetch(self._prompt).result()
                self.stages[_LOAD].append((time.perf_counter() - began) * 1000.0)
                self.stages[_LOAD_CPU].append((time.process_time() - cpu) * 1000.0)
            if after:
                stack.enter_context(patch.object(KVLoader, "arrived", lambda *block: None))
            result = first_token(engine, self._prompt)
            self._check(result.cached_tokens)
            if after:
                for stage in _STAGES:
                    self.stages[stage].append(result.reuse.timings_ms[stage])
            return result.ttft_ms

    def _beside(self) -> float:
        """Loading in one thread, placing and computing in another."""
        with self._engine() as engine:
            began = time.perf_counter()
            loading = engine.prefetch(self._prompt)
            self._check(first_token(self._plain, self._prompt).cached_tokens)
            self._check(loading.result())
            return (time.perf_counter() - began) * 1000.0

    def _check(self, cached: int) -> None:
        if cached < _MOST * len(self._prompt):
            raise BenchError(f"only {cached} of {len(self._prompt)} tokens came from the cache; use a quieter machine")
