"""What each part of the `auto` strategy brings, and what was tried beside it, at one share of recomputed tokens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common import rag
from benchmarks.common.measure import FreezableStore, add_engine_arguments, engine_beside, load_engine, share
from benchmarks.common.quality import Reference, compare, quality_cells
from benchmarks.common.report import Progress, Report
from benchmarks.common.strategies import First, Query
from benchmarks.internals import (
    Auto,
    CacheBlend,
    allow_second_round,
    second_round_always,
    values_only,
)
from kvboost.engine import KVBoost
from kvboost.extend import RepairSituation, RepairStrategy

QUICK = {"prompts": 1, "passages": 3}


@dataclass(frozen=True)
class QuerySpread(Query):
    """The tokens with most attention, and their change carried over."""

    name = "query, spread"
    spreads = True


@dataclass(frozen=True)
class AutoWithoutSpread(Auto):
    """Auto's tokens, their change not carried over."""

    name = "auto without spreading"
    spreads = False


@dataclass(frozen=True)
class FirstSpread(First):
    """The first tokens of each span, and their change carried over."""

    name = "first, spread"
    spreads = True


@dataclass(frozen=True)
class CacheBlendSpread(CacheBlend):
    """The tokens that changed most, and their change carried over."""

    name = "cacheblend, spread"
    spreads = True


@dataclass(frozen=True)
class AttentionTimesChange(Query):
    """Attention times the square root of the change of values in layer 1, which all tokens pass."""

    name = "attention x change, spread"
    spreads = True

    def decision_layers(self, layer_count: int) -> Sequence[int]:
        """Behind layer 1."""
        return (2,)

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """The highest products."""
        assert situation.attention is not None
        assert situation.value_change is not None
        score = situation.attention * situation.value_change.sqrt()
        return score.topk(min(situation.budget, len(score))).indices.sort().values


@dataclass(frozen=True)
class Shrinking(Auto):
    """Four thirds of the tokens in the first third of the layers, two thirds in the last."""

    name = "auto, fewer tokens with depth"

    def decision_layers(self, layer_count: int) -> Sequence[int]:
        """Three times."""
        return (0, layer_count // 3, 2 * layer_count // 3)

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """As auto, with a budget that shrinks."""
        third = 3 * situation.layer // situation.layer_count
        budget = round(situation.budget * (4 / 3, 1.0, 2 / 3)[third])
        return super().choose(replace(situation, budget=min(budget, len(situation.positions))))


@dataclass(frozen=True)
class ValuesOnly(Auto):
    """Auto's tokens, of which only the values are written back."""

    name = "auto, values only"


@dataclass(frozen=True)
class TwoRounds(Auto):
    """Half of the tokens, then as many again where the estimate is largest by what the first ones changed."""

    name = "auto, two rounds"


TRIED: list[RepairStrategy] = [
    CacheBlend(),
    CacheBlendSpread(),
    First(),
    FirstSpread(),
    Query(),
    QuerySpread(),
    AutoWithoutSpread(),
    Auto(),
    Auto(neighbours=1),
    Auto(every=12),
    AttentionTimesChange(),
    Shrinking(),
    ValuesOnly(),
    TwoRounds(),
]


def as_tried(strategy: RepairStrategy) -> AbstractContextManager[Any]:
    """While this lasts, recomputing does what this strategy is about and no strategy can ask for."""
    if isinstance(strategy, ValuesOnly):
        return values_only()
    return second_round_always() if isinstance(strategy, TwoRounds) else nullcontext()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_engine_arguments(parser)
    parser.add_argument("--ratio", type=share, default=0.15, help="share of tokens (default 0.15)")
    parser.add_argument("--history", choices=list(rag.HISTORIES), default="unrelated", help="default: unrelated")
    rag.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Every strategy on every prompt."""
    store = FreezableStore(8 * 2**30)
    plain = load_engine(args, dtype="float32", store=store)
    prompts = rag.load_prompts(plain.tokenizer, args.data, count=args.prompts, passages=args.passages)
    engines: dict[RepairStrategy, KVBoost] = {}
    for strategy in TRIED:
        rounds = 2 if isinstance(strategy, TwoRounds) else 1
        settings: dict[str, Any] = {"store": store, "force_approx": True, "recompute_ratio": args.ratio / rounds}
        settings["quality"] = "high"
        engines[strategy] = engine_beside(plain, recompute_strategy=strategy, **settings)
        if rounds == 2:
            allow_second_round(engines[strategy])
    samples: dict[str, list[dict[str, Any]]] = {}
    progress = Progress("prompts", len(prompts))
    for prompt in prompts:
        reference = Reference(plain, prompt, tokens=32)
        store.frozen = False
        rag.prefill_before(plain, prompt, args.history)
        store.frozen = True
        for strategy, engine in engines.items():
            with as_tried(strategy):
                samples.setdefault(repr(strategy), []).append(compare(engine, prompt, reference))
        progress.step()
    report = Report("recompute_ablation", raw=samples)
    table = report.table(
        f"Passages prefilled before: {args.history}; {len(prompts)} prompts, {args.ratio:.0%} of the tokens",
        ["strategy", "recomputed, %", "KL", "top-1, %"],
        dtype="float32",
        model=args.model,
    )
    for strategy in TRIED:
        mine = samples[repr(strategy)]
        options = repr(strategy).partition("(")[2].rstrip(")")
        label = f"{strategy.name} ({options})" if options else strategy.name
        table.add(label, f"{100 * sum(s['recomputed'] for s in mine) / len(mine):.1f}", *quality_cells(mine))
    return report
