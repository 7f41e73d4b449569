"""Quality of non-prefix reuse against a full prefill, by history, strategy and share of recomputed tokens.

Every prompt is prefilled whole by plain Transformers, whose greedy answer is the reference; then its passages are
reused from each history, recomputed by each strategy, and the reference's tokens are fed behind. Invariants: all
strategies of a prompt and history use one store that keeps nothing of what they compute; a prompt in which nothing was
reused is counted, not averaged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import rag
from benchmarks.common.measure import (
    DTYPES,
    FreezableStore,
    add_engine_arguments,
    engine_beside,
    load_engine,
    positive,
    share,
)
from benchmarks.common.plot import Panel, Point, save
from benchmarks.common.quality import SEED, Reference, compare, interval, mean_cell
from benchmarks.common.report import Progress, Report
from benchmarks.common.strategies import STRATEGIES
from kvboost.bench.report import Table, say
from kvboost.engine import KVBoost

QUICK = {
    "prompts": 1,
    "passages": 3,
    "tokens": 4,
    "histories": ["head", "reordered"],
    "strategies": ["none", "cacheblend", "auto"],
    "ratios": [0.15],
    "chunk_size": 64,
}
# Strategies that choose their tokens without looking at the ratio run once, with this one.
_WITHOUT_RATIO = {"none": 0.0, "selective": 0.15, "high": 0.5, "fast": 0.15}
_QUALITIES = ("high", "fast")  # as a user names them: more tokens where the error estimate is high
_STORE_BYTES = 12 * 2**30


@dataclass(frozen=True)
class Setting:
    """One strategy at one share."""

    strategy: str
    ratio: float

    @property
    def label(self) -> str:
        """As the table names it."""
        return self.strategy if self.strategy in _WITHOUT_RATIO else f"{self.strategy} {self.ratio:g}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_engine_arguments(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    rag.add_arguments(parser)
    parser.add_argument(
        "--histories",
        nargs="+",
        choices=[*rag.HISTORIES, *rag.CONTEXTS],
        default=list(rag.HISTORIES),
        metavar="NAME",
        help=f"how passages were prefilled before (default {' '.join(rag.HISTORIES)}); also {' '.join(rag.CONTEXTS)}",
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=[*STRATEGIES, *_QUALITIES],
        default=list(STRATEGIES),
        help="default: all; also the qualities high and fast",
    )
    parser.add_argument(
        "--ratios", type=share, nargs="+", default=[0.05, 0.15, 0.3], help="shares of tokens (default 0.05 0.15 0.3)"
    )
    parser.add_argument("--tokens", type=positive, default=32, help="tokens of the reference answer (default 32)")
    parser.add_argument("--chunk-size", type=positive, default=128, help="default: 128")
    parser.add_argument("--f1", action="store_true", help="also let every setting answer, and score the answers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write KL and agreement against the share to FILE")


def settings_of(strategies: Sequence[str], ratios: Sequence[float]) -> list[Setting]:
    """Every strategy at every ratio, without repeats: no tokens and all tokens are the same by any strategy."""
    found: list[Setting] = []
    for strategy in strategies:
        if strategy in _WITHOUT_RATIO:
            found.append(Setting(strategy, _WITHOUT_RATIO[strategy]))
            continue
        for ratio in ratios:
            if ratio == 0.0:
                found.append(Setting("none", 0.0))
            elif ratio < 1.0 or not any(setting.ratio == 1.0 for setting in found):
                found.append(Setting(strategy, ratio))
    return list(dict.fromkeys(found))


def run(args: argparse.Namespace) -> Report:
    """Compare every setting with the reference."""
    store = FreezableStore(_STORE_BYTES)
    plain = load_engine(args, dtype=args.dtype, chunk_size=args.chunk_size, store=store)
    prompts = rag.load_prompts(
        plain.tokenizer, args.data, count=args.prompts, passages=args.passages, whole_passages=args.whole_passages
    )
    settings = settings_of(args.strategies, args.ratios)
    say(f"making {len(settings)} engines")
    engines = {setting: _engine(plain, store, setting, args) for setting in settings}
    progress = Progress("settings", len(prompts) * len(args.histories) * len(settings))
    report = Report("recompute", raw={"reference": [], "samples": [], "stored": []})
    for number, prompt in enumerate(prompts):
        reference = Reference(plain, prompt, tokens=args.tokens)
        report.raw["reference"].append({"prompt": number, **reference.record(prompt)})
        for history in args.histories:
            store.frozen = False
            rag.prefill_before(plain, prompt, history)
            store.frozen = True
            report.raw["stored"].append({"history": history, "times": _stored(plain, store, prompt)})
            for setting, engine in engines.items():
                sample = compare(engine, prompt, reference, f1=args.f1)
                labels = {"strategy": setting.strategy, "ratio": setting.ratio, "label": setting.label}
                report.raw["samples"].append({"prompt": number, "history": history, **labels, **sample})
                progress.step()
    for engine in engines.values():
        engine.close()
    for history in args.histories:
        _add_table(report, history, settings, args)
    doc = {name: (rag.HISTORIES | rag.CONTEXTS)[name].__doc__ or "" for name in args.histories}
    report.tables[-1].notes += [f"`{name}`: {' '.join(text.split())}" for name, text in doc.items()]
    if args.plot is not None:
        save(_panels(report.raw["samples"], settings, args), args.plot.expanduser())
    return report


def _engine(plain: KVBoost, store: FreezableStore, setting: Setting, args: argparse.Namespace) -> KVBoost:
    asked: dict[str, Any] = {"quality": setting.strategy}
    if setting.strategy not in _QUALITIES:
        strategy = STRATEGIES[setting.strategy]
        asked = {"quality": "high", "recompute_strategy": strategy, "recompute_ratio": setting.ratio}
    common: dict[str, Any] = {"store": store, "chunk_size": args.chunk_size, "force_approx": True}
    return engine_beside(plain, **common, **asked)


def _stored(plain: KVBoost, store: FreezableStore, prompt: rag.RagPrompt) -> float:
    """The tokens whose KV the history left in the store, in multiples of the passages' own."""
    per_token = plain.prefill(list(prompt.head)).cache.layout.bytes_per_token
    return (store.stats().bytes / per_token - len(prompt.head)) / prompt.passage_tokens


def _of(samples: Sequence[dict[str, Any]], history: str, setting: Setting) -> list[dict[str, Any]]:
    return [s for s in samples if s["history"] == history and s["label"] == setting.label]


def _add_table(report: Report, history: str, settings: Sequence[Setting], args: argparse.Namespace) -> Table:
    raw = report.raw
    columns = ["strategy", "reused", "recomputed, %", "KL", "first-token KL", "top-1, %", "all equal, %", "prefill ms*"]
    table = report.table(
        f"Recompute: passages prefilled before: {history}; against a full prefill of {len(raw['reference'])} prompts",
        [*columns, *(["F1"] if args.f1 else [])],
        dtype=args.dtype,
        model=args.model,
    )
    if args.f1:
        table.add("full prefill", *["-"] * (len(columns) - 1), mean_cell(raw["reference"], "f1", digits=3))
    for setting in settings:
        every = _of(raw["samples"], history, setting)
        reused = [sample for sample in every if sample["reused"]]
        count = f"{len(reused)} of {len(every)}"
        if not reused:
            table.add(setting.label, count, *["-"] * (len(table.columns) - 2))
            continue
        table.add(
            setting.label,
            count,
            f"{100 * sum(s['recomputed'] for s in reused) / len(reused):.1f}",
            mean_cell(reused, "kl"),
            mean_cell(reused, "first_kl"),
            mean_cell(reused, "top1", factor=100, digits=1),
            mean_cell(reused, "all_top1", factor=100, digits=0),
            f"{float(np.median([s['prefill_ms'] for s in reused])):.0f}",
            *([mean_cell(reused, "f1", digits=3)] if args.f1 else []),
        )
    stored = [entry["times"] for entry in raw["stored"] if entry["history"] == history]
    table.notes.append(
        f"The store holds {sum(stored) / len(stored):.1f} times the KV of the passages. Mean [95 % bootstrap interval "
        f"over prompts, seed {SEED}]. KL(full || reuse) in nats, mean over the reference's greedy answer of up to "
        f"{args.tokens} tokens, fed to both; `all equal`: prompts whose best token is the same at every one of them. "
        "`recomputed`: of the reused tokens, averaged over layers. `reused`: prompts whose passages the engine reused; "
        "where computing was cheaper, the prompt is left out of the line. * median, not a speed claim: nothing "
        "alternates here, see `nonprefix_ttft` for times."
    )
    return table


def _panels(samples: list[dict[str, Any]], settings: Sequence[Setting], args: argparse.Namespace) -> list[Panel]:
    """KL and agreement of every history, side by side."""
    panels = []
    for history in args.histories:
        for name, label, factor in (("kl", "KL to a full prefill, nats", 1.0), ("top1", "equal best tokens, %", 100.0)):
            lines: dict[str, list[Point]] = {}
            for setting in settings:
                reused = [sample for sample in _of(samples, history, setting) if sample["reused"]]
                if not reused:
                    continue
                x = 100 * sum(sample["recomputed"] for sample in reused) / len(reused)
                value, low, high = (factor * y for y in interval([s[name] for s in reused]))
                lines.setdefault(setting.strategy, []).append(Point(x, value, low, high))
            nothing = lines.get("none", [])
            for strategy, points in lines.items():
                if strategy not in _WITHOUT_RATIO:  # every line over ratios begins where nothing is recomputed
                    lines[strategy] = sorted([*nothing, *points], key=lambda point: point.x)
            panels.append(Panel(f"prefilled before: {history}", "recomputed tokens, %", label, lines, name == "kl"))
    return panels
