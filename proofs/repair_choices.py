"""What each part of the `auto` strategy brings, and what was tried beside it, at one ratio.

python proofs/repair_choices.py --model FOLDER [--prompts 12] [--ratio 0.15] [--history company]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kvboost import KVBoost
from kvboost.approx.repair import _Chooser
from kvboost.approx.select import Auto, CacheBlend, First, Query
from kvboost.bench import rag
from kvboost.bench.measure import FreezableStore
from kvboost.bench.repair import FullReading, compare, interval
from kvboost.bench.report import describe_machine
from kvboost.extend import RepairSituation, RepairStrategy
from kvboost.hf.cache import SlabLayer


@dataclass(frozen=True)
class QuerySpread(Query):
    """The rows most looked at, and their change carried over."""

    name = "query, spread"
    spreads = True


@dataclass(frozen=True)
class AutoWithoutSpread(Auto):
    """Auto's rows, their change not carried over."""

    name = "auto without spreading"
    spreads = False


@dataclass(frozen=True)
class FirstSpread(First):
    """The first rows of each stretch, and their change carried over."""

    name = "first, spread"
    spreads = True


@dataclass(frozen=True)
class CacheBlendSpread(CacheBlend):
    """The rows that changed most, and their change carried over."""

    name = "cacheblend, spread"
    spreads = True


@dataclass(frozen=True)
class AttentionTimesChange(Query):
    """Attention times the square root of the change of values in layer 1, which all rows pass."""

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
    """Four thirds of the rows in the first third of the layers, two thirds in the last."""

    name = "auto, fewer rows with depth"

    def decision_layers(self, layer_count: int) -> Sequence[int]:
        """Three times."""
        return (0, layer_count // 3, 2 * layer_count // 3)

    def choose(self, situation: RepairSituation) -> torch.Tensor:
        """As auto, with a budget that shrinks."""
        third = 3 * situation.layer // situation.layer_count
        budget = round(situation.budget * (4 / 3, 1.0, 2 / 3)[third])
        return super().choose(replace(situation, budget=min(budget, len(situation.rows))))


@dataclass(frozen=True)
class ValuesOnly(Auto):
    """Auto's rows, of which only the values are written back."""

    name = "auto, values only"


@dataclass(frozen=True)
class TwoRounds(Auto):
    """Half of the rows, then as many again where the estimate is largest by what the first ones changed."""

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


@contextmanager
def as_tried(strategy: RepairStrategy) -> Iterator[None]:
    """While this lasts, repairs do what this strategy is about and no strategy can ask for."""
    if isinstance(strategy, ValuesOnly):
        whole = SlabLayer.update

        def update(layer: SlabLayer, keys: torch.Tensor, values: torch.Tensor, *args: Any, **more: Any) -> Any:
            if layer.rows is not None:
                keys = layer.key_store.index_select(2, layer.rows)
            return whole(layer, keys, values, *args, **more)

        with patch.object(SlabLayer, "update", update):
            yield
    elif isinstance(strategy, TwoRounds):
        # Above what is tolerated after the first round, and below it after the second.
        with patch.object(_Chooser, "remaining_error", side_effect=cycle([math.inf, 0.0])):
            yield
    else:
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--history", choices=list(rag.HISTORIES), default="company")
    rag.add_arguments(parser)
    args = parser.parse_args()
    store = FreezableStore(8 * 2**30)
    plain = KVBoost.from_pretrained(str(args.model), dtype="float32", quality="exact", store=store)
    prompts = rag.load_prompts(plain.tokenizer, args.data, count=args.prompts, passages=args.passages)
    settings: dict[str, Any] = {"store": store, "force_approx": True}
    engines = {}
    for strategy in TRIED:
        rounds = 2 if isinstance(strategy, TwoRounds) else 1
        settings["recompute_ratio"] = args.ratio / rounds
        engines[strategy] = KVBoost(plain.model, plain.tokenizer, recompute_strategy=strategy, **settings)
        parts = engines[strategy].parts
        assert parts is not None
        assert parts.moving is not None
        if rounds == 2:
            parts.moving._repairer._tolerated = 1.0
    samples: dict[str, list[dict[str, float]]] = {}
    for number, prompt in enumerate(prompts):
        full = FullReading(plain, prompt, tokens=32)
        store.frozen = False
        rag.read_before(plain, prompt, args.history)
        store.frozen = True
        for strategy, engine in engines.items():
            with as_tried(strategy):
                samples.setdefault(repr(strategy), []).append(compare(engine, prompt, full, f1=False))
        print(f"{number + 1} of {len(prompts)} prompts", flush=True)
    print(f"\n{describe_machine(dtype='float32', model=str(args.model)).line}\n")
    print(f"Passages read before: {args.history}; {len(prompts)} prompts, {args.ratio:.0%} of the rows.\n")
    print("| strategy | rows, % | KL | top-1, % |\n|---|---|---|---|")
    for strategy in TRIED:
        mine = samples[repr(strategy)]
        kl, top = (interval([s[value] for s in mine], seed=1) for value in ("kl", "top1"))
        rows = 100 * sum(s["rows"] for s in mine) / len(mine)
        options = repr(strategy).partition("(")[2].rstrip(")")
        told = f"{strategy.name} ({options})" if options else strategy.name
        spread = f"{100 * top[0]:.1f} [{100 * top[1]:.1f} {100 * top[2]:.1f}]"
        print(f"| {told} | {rows:.1f} | {kl[0]:.4f} [{kl[1]:.4f} {kl[2]:.4f}] | {spread} |")


if __name__ == "__main__":
    main()
