"""The ends of several prompts read in one forward, against one after another: seconds, in turns.

Behind a long beginning that is in place, as after an earlier request, every prompt has a short end of its own. The KV
of both ways is compared to the bit. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from benchmarks.common.measure import TextSource, add_model_arguments, load_engine, positive
from benchmarks.common.report import Report
from benchmarks.internals import JointPrefill, ModelRunner, SlabCache, probe_joint, same_bits
from kvboost.bench.report import Spread, ratios, say

QUICK = {"jobs": 3, "context": 40, "end": 5, "rounds": 1, "dtype": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.set_defaults(dtype="float32")
    parser.add_argument("--jobs", type=positive, default=10, help="prompts (default 10)")
    parser.add_argument("--context", type=positive, default=1000, help="tokens of their beginning (default 1000)")
    parser.add_argument("--end", type=positive, default=25, help="tokens of each one's end (default 25)")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")


def one_by_one(runner: ModelRunner, ends: Sequence[Sequence[int]], caches: Sequence[SlabCache]) -> float:
    """Seconds of reading the ends one after another."""
    begin = time.perf_counter()
    for tokens, cache in zip(ends, caches, strict=True):
        runner.append(tokens, cache, logits=True)
    return time.perf_counter() - begin


def together(joint: JointPrefill, ends: Sequence[Sequence[int]], caches: Sequence[SlabCache]) -> float:
    """Seconds of reading them in one forward."""
    begin = time.perf_counter()
    joint.append(ends, caches)
    return time.perf_counter() - begin


def run(args: argparse.Namespace) -> Report:
    """Both ways in turns, each over caches of its own."""
    report = Report("joint_prefill")
    with load_engine(args, dtype=args.dtype) as engine:
        runner, layout = engine.parts.runner, engine.parts.layout
        assert layout is not None
        joint, source = probe_joint(runner, layout), TextSource(engine.tokenizer, args.text)
        beginning = source.window(0, args.context)
        ends = [source.window(args.context + i * args.end, args.end) for i in range(args.jobs)]
        say("reading the beginning")
        first = SlabCache(layout, capacity=args.context + args.end)
        runner.append(beginning, first, logits=False)
        both: list[list[SlabCache]] = [[], []]
        for caches in both:
            for _ in ends:
                cache = SlabCache(layout, capacity=args.context + args.end)
                cache.place(0, first.span(0, args.context))
                caches.append(cache)
        alone_seconds, joint_seconds, differing = [], [], 0
        for number in range(args.rounds + 1):
            say(f"round {number} of {args.rounds}")
            for cache in (*both[0], *both[1]):
                cache.set_length(args.context)
            if number % 2:
                joint_seconds.append(together(joint, ends, both[1]))
                alone_seconds.append(one_by_one(runner, ends, both[0]))
            else:
                alone_seconds.append(one_by_one(runner, ends, both[0]))
                joint_seconds.append(together(joint, ends, both[1]))
            for mine, other in zip(*both, strict=True):
                pairs = zip(*(cache.extract(0, args.context + args.end) for cache in (mine, other)), strict=True)
                differing += not all(same_bits(a, b) for a, b in pairs)
        title = f"{args.jobs} ends of {args.end} tokens behind {args.context}, median [min max] of {args.rounds} rounds"
        columns = ["one after another, s", "together, s", "times as fast", "KV that differs"]
        table = report.table(title, columns, dtype=args.dtype, model=args.model)
        counted = alone_seconds[1:], joint_seconds[1:]  # the first round is not counted
        table.add(
            *(Spread.of(seconds).text(2) for seconds in counted),
            Spread.of(ratios(*counted)).text(),
            f"{differing} of {(args.rounds + 1) * args.jobs}",
        )
        report.failed = differing > 0
    return report
