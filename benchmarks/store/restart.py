"""Restart: the first token of a new engine with KV from a slower tier, and what of the load can be hidden.

One engine prefills the prompt and flushes; for every sample a new one is made, whose memory is empty, and asked for one
token: as it is, which places blocks while others still load; with all blocks placed after the last one has come; and
with a prefetch before the clock starts. A bound for loading layer by layer: the whole load runs in a thread beside an
engine that has everything in memory, and the later of the two ends the sample. Invariants: all prefill the same tokens
and alternate in one run; a sample in which less than nine tenths came from the tier is no time: it is taken again, and
in the end an error.
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

from benchmarks.common.measure import (
    TextSource,
    add_model_arguments,
    alternate,
    engine_beside,
    first_token,
    load_engine,
    positive,
)
from benchmarks.common.report import BenchError, Report
from benchmarks.common.servers import redis_server
from benchmarks.internals import place_after_loading
from kvboost.bench.report import Spread, ratios
from kvboost.engine import KVBoost

QUICK = {"length": 1000, "repeat": 2, "tiers": ["disk"]}
_FULL, _MEMORY = "full prefill", "memory"
_AFTER, _WHILE, _PREFETCHED = "load, then place", "place while loading", "prefetched"
_BOUND = "bound: load beside computing"
_MIN_CACHED = 0.9  # of the prompt must come from the tier
_MAX_TRIES = 5
_STAGES = ("lease", "place", "first_token")
_LOAD, _LOAD_CPU = "a prefetch", "its CPU time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.add_argument("--length", type=positive, default=2000, help="default: 2000 tokens")
    parser.add_argument("--repeat", type=positive, default=9, help="rounds measured (default 9)")
    parser.add_argument("--warmups", type=positive, default=1, help="rounds run before (default 1)")
    parser.add_argument("--tiers", nargs="+", choices=("disk", "redis"), default=["disk", "redis"])
    parser.add_argument("--directory", type=Path, help="where to put the disk tier (default: a temporary folder)")


def run(args: argparse.Namespace) -> Report:
    """Every tier in turn, each in every way, against a full prefill."""
    report = Report("restart", raw={"samples": {}, "stages": {}})
    plain = load_engine(args, dtype=args.dtype, cache_bytes="8GiB", workspace_bytes=0)
    prompt = TextSource(plain.tokenizer, args.text).window(0, args.length)
    plain.prefill(prompt)
    about: dict[str, Any] = {"dtype": args.dtype, "model": args.model}
    whole = report.table(
        f"Restart: first token of a new engine, {args.length} tokens",
        ["KV from", "", "TTFT ms", "full prefill / this", f"against {_AFTER!r}"],
        **about,
    )
    parts = report.table(f"Restart: ms by stage, {_AFTER!r}", ["KV from", *_STAGES, _LOAD, _LOAD_CPU], **about)
    retaken = 0
    for name in args.tiers:
        with ExitStack() as stack:
            if name == "disk":
                folder = tempfile.TemporaryDirectory(dir=args.directory, prefix="kvboost-restart-")
                settings: dict[str, Any] = {"disk_cache_dir": stack.enter_context(folder)}
            else:
                settings = {"remote_url": stack.enter_context(redis_server()).url}
            sampling = _Sampling(plain, settings, prompt)
            contestants = sampling.contestants()
            samples = alternate(contestants, repeat=args.repeat, warmups=args.warmups, label=name)
        report.raw["samples"][name], report.raw["stages"][name] = samples, dict(sampling.stages)
        for way in contestants:
            whole.add(
                name,
                way,
                Spread.of(samples[way]).text(0),
                Spread.of(ratios(samples[_FULL], samples[way])).text(),
                Spread.of(ratios(samples[way], samples[_AFTER])).text(),
            )
        parts.add(name, *(f"{median(sampling.stages[stage][-args.repeat :]):.0f}" for stage in parts.columns[1:]))
        retaken += sampling.retaken
    plain.close()
    whole.notes.append(
        f"Median [lowest highest] of {args.repeat} rounds, from the call of generate(). A new engine for every sample "
        f"but {_MEMORY!r} and {_FULL!r}. The disk is read past the page cache where its file system allows that; Redis "
        "runs on this machine. The bound is what layer by layer could reach at best: loading and computing share the "
        f"cores and never wait for each other. {retaken} samples were taken again, as a tier missed its deadline."
    )
    parts.notes.append("The CPU time is this process's, in all threads; a server's is not in it.")
    return report


class _Sampling:
    """The ways to a first token with KV from one tier, which holds the prompt."""

    def __init__(self, plain: KVBoost, settings: dict[str, Any], prompt: list[int]) -> None:
        self._plain, self._settings, self._prompt = plain, settings, prompt
        self.stages: dict[str, list[float]] = defaultdict(list)
        self.retaken = 0
        with self._engine() as engine:
            engine.prefill(prompt)
            engine.flush()

    def contestants(self) -> dict[str, Callable[[], float]]:
        """All of them."""
        return {
            _FULL: lambda: first_token(self._plain, self._prompt, baseline=True).ttft_ms,
            _MEMORY: lambda: self._checked(self._plain)[0],
            _AFTER: partial(self._from_tier, after=True),
            _WHILE: self._from_tier,
            _PREFETCHED: partial(self._from_tier, prefetched=True),
            _BOUND: self._beside,
        }

    def _engine(self) -> KVBoost:
        plain = self._plain
        return engine_beside(plain, quality="exact", cache_bytes="8GiB", **self._settings)

    def _from_tier(self, *, after: bool = False, prefetched: bool = False) -> float:
        for attempt in range(1, _MAX_TRIES + 1):
            try:
                with self._engine() as engine, ExitStack() as stack:
                    if prefetched:
                        began, cpu = time.perf_counter(), time.process_time()
                        engine.prefetch(self._prompt).result()
                        self.stages[_LOAD].append((time.perf_counter() - began) * 1000.0)
                        self.stages[_LOAD_CPU].append((time.process_time() - cpu) * 1000.0)
                    if after:
                        stack.enter_context(place_after_loading())
                    took, timings = self._checked(engine)
            except BenchError:
                self.retaken += 1
                if attempt == _MAX_TRIES:
                    raise
            else:
                break
        if after:
            for stage in _STAGES:
                self.stages[stage].append(timings[stage])
        return took

    def _beside(self) -> float:
        """Loading in one thread, placing and computing in another."""
        with self._engine() as engine:
            began = time.perf_counter()
            loading = engine.prefetch(self._prompt)
            self._checked(self._plain)
            self._check(loading.result())
            return (time.perf_counter() - began) * 1000.0

    def _checked(self, engine: KVBoost) -> tuple[float, dict[str, float]]:
        result = first_token(engine, self._prompt)
        self._check(result.cached_tokens)
        return result.ttft_ms, dict(result.reuse.timings_ms)

    def _check(self, cached: int) -> None:
        if cached < _MIN_CACHED * len(self._prompt):
            raise BenchError(
                f"only {cached} of {len(self._prompt)} tokens came from the cache; "
                "give the tier more capacity, or use a quieter machine"
            )
