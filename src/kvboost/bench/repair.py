"""Repair: how near moved chunks come to a full reading, against rows computed again.

Called by the command line. Every prompt is read whole by plain Transformers, whose greedy answer is the
reference; then its passages are moved from each history by each strategy, and the reference's tokens are
fed behind the repaired cache. Invariants: all strategies of a prompt and history read from one store that
keeps nothing of what they compute; a prompt in which nothing moved is counted, not averaged.
"""

from __future__ import annotations

import argparse
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvboost.approx.select import STRATEGIES
from kvboost.bench import plot, rag
from kvboost.bench.measure import DTYPES, FreezableStore, load_engine, positive, wall_ms
from kvboost.bench.report import BenchError, Machine, Progress, Report, Table, describe_machine, say
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode, PrefillResult

_BOOTSTRAP_ROUNDS = 2000
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Strategies that choose their rows without looking at the ratio run once, with this one.
_WITHOUT_RATIO = {"none": 0.0, "selective": 0.15, "high": 0.5, "fast": 0.15}
_QUALITIES = ("high", "fast")  # as a user names them, more rows where the estimate is high included
_STORE_BYTES = 8 * 2**30


@dataclass(frozen=True)
class Setting:
    """One way of repairing."""

    strategy: str
    ratio: float

    @property
    def label(self) -> str:
        """As the table names it."""
        return self.strategy if self.strategy in _WITHOUT_RATIO else f"{self.strategy} {self.ratio:g}"


def share(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a share; give 0.15 for 15 % of the rows")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    parser.add_argument("--model", type=Path, help="folder of a causal language model (config.json and weights)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    rag.add_arguments(parser)
    histories, strategies = list(rag.HISTORIES), list(STRATEGIES)
    parser.add_argument("--histories", nargs="+", choices=histories, default=histories, help="default: all")
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=[*strategies, *_QUALITIES],
        default=strategies,
        help="default: all; also the qualities high and fast",
    )
    parser.add_argument(
        "--ratios", type=share, nargs="+", default=[0.05, 0.15, 0.3], help="shares of rows (default 0.05 0.15 0.3)"
    )
    parser.add_argument("--tokens", type=positive, default=32, help="tokens of the reference answer (default 32)")
    parser.add_argument("--chunk-size", type=positive, default=128, help="default: 128")
    parser.add_argument("--f1", action="store_true", help="also let every setting answer, and score the answers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write KL and agreement against rows as SVG to FILE")
    parser.add_argument("--seed", type=int, default=1, help="of the confidence intervals (default 1)")


def settings_of(strategies: Sequence[str], ratios: Sequence[float]) -> list[Setting]:
    """Every strategy at every ratio, without repeats: no rows and all rows are the same by any strategy."""
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
    """Compare every setting with the full reading."""
    if args.plot is not None and not args.plot.expanduser().resolve().parent.is_dir():
        raise BenchError(f"there is no folder to write {args.plot} into; create it first")
    store = FreezableStore(_STORE_BYTES)
    plain = load_engine(args, dtype=args.dtype, chunk_size=args.chunk_size, store=store)
    prompts = rag.load_prompts(
        plain.tokenizer, args.data, count=args.prompts, passages=args.passages, whole_passages=args.whole_passages
    )
    settings = settings_of(args.strategies, args.ratios)
    say(f"making {len(settings)} engines")
    engines = {setting: _engine(plain, store, setting, args) for setting in settings}
    progress = Progress("settings", len(prompts) * len(args.histories) * len(settings))
    report = Report("repair", raw={"full": [], "samples": []})
    for number, prompt in enumerate(prompts):
        full = FullReading(plain, prompt, tokens=args.tokens)
        report.raw["full"].append({"prompt": number, **full.record(prompt)})
        for history in args.histories:
            store.frozen = False
            rag.read_before(plain, prompt, history)
            store.frozen = True
            for setting, engine in engines.items():
                sample = compare(engine, prompt, full, f1=args.f1)
                labels = {"strategy": setting.strategy, "ratio": setting.ratio, "label": setting.label}
                report.raw["samples"].append({"prompt": number, "history": history, **labels, **sample})
                progress.step()
    for engine in engines.values():
        engine.close()
    _tables(report, settings, args)
    if args.plot is not None:
        drawing = plot.svg(_panels(report.raw["samples"], settings, args))
        args.plot.expanduser().write_text(drawing, encoding="utf-8")
    return report


def _engine(plain: KVBoost, store: FreezableStore, setting: Setting, args: argparse.Namespace) -> KVBoost:
    asked: dict[str, Any] = {"quality": setting.strategy}
    if setting.strategy not in _QUALITIES:
        asked = {"recompute_strategy": setting.strategy, "recompute_ratio": setting.ratio}
    return KVBoost(
        plain.model,
        plain.tokenizer,
        store=store,
        chunk_size=args.chunk_size,
        force_approx=True,
        **asked,
    )


class FullReading:
    """The prompt read in one go by plain Transformers, and its greedy answer."""

    def __init__(self, engine: KVBoost, prompt: rag.RagPrompt, *, tokens: int) -> None:
        self._tokenizer = engine.tokenizer
        self._tokens = tokens
        self._ends = end_tokens(engine.model)
        read = engine.prefill(prompt.tokens, mode=GenerationMode.BASELINE)
        self.answer, self.logits = self.answer_behind(engine.model, read)
        """Token ids, the end token included if it came, and the logits each was chosen from: [tokens, vocab]."""

    def answer_behind(self, model: Any, read: PrefillResult) -> tuple[list[int], torch.Tensor]:
        """The greedy answer of at most as many tokens, and its logits [tokens, vocab]."""
        answer: list[int] = []
        logits = [read.logits]
        while True:
            answer.append(int(logits[-1].argmax()))
            if len(answer) == self._tokens or answer[-1] in self._ends:
                return answer, torch.stack(logits)
            logits.append(_forward(model, answer[-1:], read.cache)[0])

    def text(self, answer: Sequence[int]) -> str:
        """What an answer says."""
        return str(self._tokenizer.decode([token for token in answer if token not in self._ends])).strip()

    def record(self, prompt: rag.RagPrompt) -> dict[str, Any]:
        """For the file of samples."""
        said = self.text(self.answer)
        sizes = {"prompt_tokens": len(prompt.tokens), "passage_tokens": prompt.passage_tokens}
        return {**sizes, "answer": said, "answer_tokens": len(self.answer), "f1": best_f1(said, prompt.answers)}


def end_tokens(model: Any) -> set[int]:
    """The tokens at which this model's answers end."""
    ends = model.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


@torch.no_grad()
def _forward(model: Any, tokens: Sequence[int], cache: Any) -> torch.Tensor:
    """The logits [tokens, vocab] of these tokens behind ``cache``, which grows by them."""
    ids = torch.tensor([list(tokens)], device=model.get_input_embeddings().weight.device)  # [1, tokens]
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits[0]


def compare(engine: KVBoost, prompt: rag.RagPrompt, full: FullReading, *, f1: bool) -> dict[str, Any]:
    """Read ``prompt`` with moved passages, feed the full reading's answer behind it, and say how far the two agree."""
    reads: list[PrefillResult] = []
    took = wall_ms(lambda: reads.append(engine.prefill(prompt.tokens, boundaries=prompt.boundaries)))
    read = reads[0]
    if not rag.passages_moved(prompt, read.reuse):
        return {"moved": False, "reason": read.reuse.reason, "prefill_ms": took}
    logits = read.logits.view(1, -1)
    forced = full.answer[:-1]
    if forced:
        logits = torch.cat([logits, _forward(engine.model, forced, read.cache)])
    sample: dict[str, Any] = {
        "moved": True,
        "moved_tokens": read.reuse.moved_tokens,
        "recomputed_tokens": read.reuse.recomputed_tokens,
        "rows": read.reuse.recomputed_tokens / read.reuse.moved_tokens,
        "error_estimate": read.reuse.error_estimate,
        "prefill_ms": took,
        "stages_ms": dict(read.reuse.timings_ms),
        **agreement(full.logits, logits),
    }
    if f1:
        read.cache.crop(-len(forced))
        answer, _ = full.answer_behind(engine.model, read)
        sample["answer"] = full.text(answer)
        sample["f1"] = best_f1(sample["answer"], prompt.answers)
    return sample


def agreement(full: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """How near the logits ``other`` are to ``full``, both [tokens, vocab]: KL(full || other) and equal best tokens."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (full, other))
    divergence = (p.exp() * (p - q)).sum(dim=-1)  # [tokens]
    same = (full.argmax(dim=-1) == other.argmax(dim=-1)).double()  # [tokens]
    return {
        "kl": float(divergence.mean()),
        "first_kl": float(divergence[0]),
        "top1": float(same.mean()),
        "all_top1": float(same.min()),
    }


def normalised(answer: str) -> list[str]:
    """The words of an answer as SQuAD compares them: lower case, no punctuation, no articles."""
    bare = "".join(char for char in answer.lower() if char not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def best_f1(answer: str, gold: Sequence[str]) -> float:
    """Token F1 against the gold answer that fits best."""
    return max((_f1(normalised(answer), normalised(right)) for right in gold), default=0.0)


def _f1(said: list[str], right: list[str]) -> float:
    if not said or not right:
        return float(said == right)
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right))


def interval(values: Sequence[float], *, seed: int) -> tuple[float, float, float]:
    """The mean, and the ends of its 95 % interval by bootstrap over the values."""
    array = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(array), (_BOOTSTRAP_ROUNDS, len(array)))
    low, high = np.percentile(array[drawn].mean(axis=1), [2.5, 97.5])
    return float(array.mean()), float(low), float(high)


def _of(samples: Sequence[dict[str, Any]], history: str, setting: Setting) -> list[dict[str, Any]]:
    return [s for s in samples if s["history"] == history and s["label"] == setting.label]


def _tables(report: Report, settings: Sequence[Setting], args: argparse.Namespace) -> None:
    machine = describe_machine(dtype=args.dtype, model=str(args.model))
    for history in args.histories:
        report.tables.append(_table(report.raw, history, settings, args, machine))
    doc = {name: " ".join((rag.HISTORIES[name].__doc__ or "").split()) for name in args.histories}
    report.tables[-1].notes += [f"`{name}`: {text}" for name, text in doc.items()]


def _table(
    raw: dict[str, Any], history: str, settings: Sequence[Setting], args: argparse.Namespace, machine: Machine
) -> Table:
    columns = ["rows again", "moved", "rows, %", "KL", "first-token KL", "top-1, %", "all equal, %", "prefill ms*"]
    table = Table(
        f"Repair: passages read before: {history}; against a full reading of {len(raw['full'])} prompts",
        machine,
        [*columns, *(["F1"] if args.f1 else [])],
    )

    def cell(samples: Sequence[dict[str, Any]], name: str, *, factor: float = 1.0, digits: int = 4) -> str:
        mean, low, high = (factor * x for x in interval([s[name] for s in samples], seed=args.seed))
        return f"{mean:.{digits}f} [{low:.{digits}f} {high:.{digits}f}]"

    if args.f1:
        table.add("everything: full reading", *["-"] * (len(columns) - 1), cell(raw["full"], "f1", digits=3))
    for setting in settings:
        every = _of(raw["samples"], history, setting)
        moved = [sample for sample in every if sample["moved"]]
        count = f"{len(moved)} of {len(every)}"
        if not moved:
            table.add(setting.label, count, *["-"] * (len(table.columns) - 2))
            continue
        table.add(
            setting.label,
            count,
            f"{100 * sum(s['rows'] for s in moved) / len(moved):.1f}",
            cell(moved, "kl"),
            cell(moved, "first_kl"),
            cell(moved, "top1", factor=100, digits=1),
            cell(moved, "all_top1", factor=100, digits=0),
            f"{float(np.median([s['prefill_ms'] for s in moved])):.0f}",
            *([cell(moved, "f1", digits=3)] if args.f1 else []),
        )
    table.notes.append(
        f"Mean [95 % bootstrap interval over prompts, seed {args.seed}]. KL(full || reuse) in nats, mean over the full "
        f"reading's greedy answer of up to {args.tokens} tokens, fed to both; `all equal`: prompts whose best token is "
        "the same at every one of them. `rows`: recomputed / moved, averaged over layers. `moved`: prompts in which "
        "the engine moved the passages; where it found computing cheaper, the prompt is left out of the row. "
        "* median, not a speed claim: nothing alternates here, see `moved` for times."
    )
    return table


def _panels(samples: list[dict[str, Any]], settings: Sequence[Setting], args: argparse.Namespace) -> list[plot.Panel]:
    """KL and agreement of every history, side by side."""
    panels = []
    for history in args.histories:
        for name, label, factor in (
            ("kl", "KL to the full reading, nats", 1.0),
            ("top1", "equal best tokens, %", 100.0),
        ):
            lines: dict[str, list[plot.Point]] = {}
            for setting in settings:
                moved = [sample for sample in _of(samples, history, setting) if sample["moved"]]
                if not moved:
                    continue
                rows = 100 * sum(sample["rows"] for sample in moved) / len(moved)
                value, low, high = (factor * x for x in interval([s[name] for s in moved], seed=args.seed))
                lines.setdefault(setting.strategy, []).append(plot.Point(rows, value, low, high))
            nothing = lines.get("none", [])
            for strategy, points in lines.items():
                if strategy not in _WITHOUT_RATIO:  # every line over ratios begins where nothing is repaired
                    lines[strategy] = sorted([*nothing, *points], key=lambda point: point.x)
            panels.append(plot.Panel(f"read before: {history}", "rows computed again, %", label, lines, name == "kl"))
    return panels
