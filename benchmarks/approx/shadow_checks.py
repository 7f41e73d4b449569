"""Shadow checks: they end bad non-prefix reuse soon, and leave good reuse alone.

Short prompts are put together from passages that were prefilled before; every answer is checked. Bad: nothing is
recomputed, on the tokens of source code in random order, with 5 % of the answers allowed to differ. Good: the default
strategy with half of the tokens, on text, with a fifth allowed to differ. Holds if the bad engine is switched off and
the good one is not.
"""

from __future__ import annotations

import argparse
import inspect
import random
import warnings
from typing import Any

from benchmarks.common import rag
from benchmarks.common.measure import add_engine_arguments, engine_beside, joined, load_engine, positive
from benchmarks.common.report import Progress, Report
from benchmarks.internals import wait_for_shadow_check
from kvboost.bench.report import Table
from kvboost.engine import KVBoost

QUICK = {"requests": 20, "prompts": 2}
_PASSAGES, _LENGTH = 60, 64  # how many, and tokens of each
_HEAD = "You answer questions from what you are given.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_engine_arguments(parser)
    parser.add_argument("--requests", type=positive, default=2000, help="default: 2000")
    rag.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """One line for each engine."""
    common: dict[str, Any] = {"chunk_size": 16, "shadow_share": 1.0, "force_approx": True}
    bad = load_engine(args, dtype="float32", recompute_strategy="none", **{**common, "quality": 0.05})
    good = engine_beside(bad, recompute_ratio=0.5, quality=0.2, **common)
    report = Report("shadow_checks")
    columns = ["passages", "recomputed", "allowed to differ", "requests", "checked", "differed", "share at most"]
    table = report.table("Shadow checks", [*columns, "still reusing"], dtype="float32", model=args.model)
    code = bad.tokenizer(inspect.getsource(random))["input_ids"]
    shuffled = random.Random(1).sample(code, len(code))
    still_bad = ask_all(bad, pieces(shuffled), ("shuffled code", "none"), table, requests=args.requests)
    prompts = rag.load_prompts(bad.tokenizer, args.data, count=args.prompts, passages=args.passages)
    text = [token for prompt in prompts for passage in prompt.passages for token in passage]
    still_good = ask_all(good, pieces(text), ("text", "auto 0.5"), table, requests=args.requests)
    # A short run has too few checks for a verdict.
    report.failed = args.requests >= 500 and (still_bad or not still_good)
    return report


def pieces(tokens: list[int]) -> list[list[int]]:
    """The first passages of a text."""
    return [tokens[i * _LENGTH : (i + 1) * _LENGTH] for i in range(_PASSAGES)]


def ask_all(engine: KVBoost, passages: list[list[int]], label: tuple[str, str], table: Table, *, requests: int) -> bool:
    """Ask until the requests are over or reuse is off. Whether it is still on."""
    head = engine.encode(_HEAD)
    for passage in passages:
        engine.warm([*head, *passage], boundaries=[len(head), len(head) + len(passage)])
    rng = random.Random(2)
    progress = Progress(label[0], requests)
    asked = 0
    while asked < requests and engine.cache_stats()["non_prefix_reuse"]["allowed"]:
        # Something new in front each time: a passage behind the same text as before would be computed.
        new = engine.encode(f"Request {asked}, {rng.random()}.\n")
        question = engine.encode("Question: what is said here?\nAnswer:")
        tokens, ends = joined([head, new, *rng.sample(passages, 3), question])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that reuse is off is what the table says
            engine.generate(tokens, boundaries=ends[:-1], max_new_tokens=8, temperature=0)
            wait_for_shadow_check(engine)
        asked += 1
        progress.step()
    stats = engine.cache_stats()["non_prefix_reuse"]
    allowed: bool = stats["allowed"]
    counts = (asked, stats["checked"], stats["differing"], f"{stats['differing_at_most']:.3f}")
    table.add(*label, engine.config.quality, *counts, "yes" if allowed else "no")
    engine.close()
    return allowed
