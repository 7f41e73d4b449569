"""Is non-prefix reuse good, fast and safe on a model: every strategy on every history, against a full reading.

Questions with passages in the model's own chat template. The passages were seen before: `alone`, behind `unrelated`
ones, `reordered`, or in the `traffic` of other questions. Every strategy's answer is compared with that of plain
Transformers, which reads the whole prompt. Floors stand beside it: the other dtype, KV in 8 bits, exact reuse.
`--out FILE` is appended sample by sample; the same command continues it. `--report FILE...` prints tables from such
files. Invariants: all strategies of a prompt and history use one store that keeps nothing of what they compute; the
full reading of a prompt is made once.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.approx.yard.measure import Case
from benchmarks.approx.yard.strategies import DEFAULT, Setting, parse_strategy, settings_of
from benchmarks.approx.yard.tables import FLOOR, KIND, report_of
from benchmarks.approx.yard.traffic import GROUP, Stream
from benchmarks.common import rag
from benchmarks.common.journal import Journal, load
from benchmarks.common.measure import (
    DTYPES,
    FreezableStore,
    add_engine_arguments,
    engine_beside,
    load_engine,
    positive,
    share,
)
from benchmarks.common.quality import Reference
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.internals import family_of, why_no_approx
from kvboost.bench.report import describe_machine, say
from kvboost.engine import KVBoost
from kvboost.store import MemoryStore

_PROMPTS = 60
HISTORIES = ("alone", "unrelated", "reordered", "traffic")
FLOORS = ("dtype", "int8", "exact")
QUICK = {
    "prompts": 1,
    "passages": 2,
    "tokens": 4,
    "floors": ["exact"],
    "strategies": [parse_strategy(text) for text in ("auto=0.15", "variants-mean", "variants-fit=0.15")],
}
_SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "musique_150.json"
_STORE_BYTES = 8 * 2**30
_OTHER_DTYPE = {"float32": "bfloat16", "bfloat16": "float32", "float16": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_engine_arguments(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    rag.add_arguments(parser)
    parser.set_defaults(prompts=None)  # so that --report knows whether it was given
    parser.add_argument("--out", type=Path, metavar="FILE", help="append every sample to FILE, and skip those in it")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="print the tables of such files only")
    parser.add_argument(
        "--histories", nargs="+", choices=HISTORIES, default=list(HISTORIES), help="how passages were seen before"
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        type=parse_strategy,
        default=[parse_strategy(text) for text in DEFAULT],
        metavar="NAME[=RATIO]",
        help=f"also NAME+spread and NAME-spread (default: {' '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--ratios",
        type=share,
        nargs="+",
        default=[0.15, 0.3, 0.5],
        help="shares of recomputed tokens for strategies named without one (default 0.15 0.3 0.5)",
    )
    parser.add_argument("--floors", nargs="*", choices=FLOORS, default=list(FLOORS), help="default: all")
    parser.add_argument("--tokens", type=positive, default=24, help="tokens of an answer at most (default 24)")
    parser.add_argument("--time", action="store_true", help="also time first tokens against plain Transformers")


def run(args: argparse.Namespace) -> Report:
    """Measure what is not in the file yet, then print the tables."""
    if args.report:
        files = [load(file.expanduser(), KIND) for file in args.report]
        return report_of([(header, _first(samples, args.prompts)) for header, samples in files])
    args.prompts = args.prompts or _PROMPTS
    store = FreezableStore(_STORE_BYTES)
    engine = load_engine(args, dtype=args.dtype, store=store, quality="high", force_approx=True)
    if (reason := why_no_approx(engine)) is not None:
        raise BenchError(f"this model has no non-prefix reuse: {reason}; give another --model")
    data = args.data if args.data is not None else _SHARED if _SHARED.is_file() else None
    prompts = _prompts(engine, data, args)
    machine = describe_machine(dtype=args.dtype, model=str(args.model))
    settings = {
        "model": machine.model,
        "dtype": args.dtype,
        "data": data_digest(data),
        "passages": args.passages,
        "whole_passages": args.whole_passages,
        "tokens": args.tokens,
        "timed": args.time,
    }
    with Journal(args.out.expanduser() if args.out is not None else None, KIND, settings, machine) as journal:
        yard = _Yard(engine, store, journal, args)
        yard.measure(prompts)
        return report_of([(journal.header, journal.samples)])


def _first(samples: list[dict[str, Any]], prompts: int | None) -> list[dict[str, Any]]:
    """Those of the first ``prompts``, or all."""
    return samples if prompts is None else [sample for sample in samples if sample["prompt"] < prompts]


def data_digest(file: Path) -> str:
    """By which a file of samples knows its questions."""
    return hashlib.sha256(file.expanduser().read_bytes()).hexdigest()[:16]


def _prompts(engine: KVBoost, data: Path | None, args: argparse.Namespace) -> list[rag.RagPrompt]:
    """The questions in whole groups, behind the begin token where the model has one and no chat template puts it there.

    Whole groups, so that a run with more prompts continues the same traffic.
    """
    tokenizer, count = engine.tokenizer, args.prompts
    if data is not None:
        count = max(count, min(-(-count // GROUP) * GROUP, len(rag.read_questions(data.expanduser()))))
    prompts = rag.load_prompts(tokenizer, data, count=count, passages=args.passages, whole_passages=args.whole_passages)
    begin = getattr(tokenizer, "bos_token_id", None)
    if begin is None or getattr(tokenizer, "chat_template", None) is not None or prompts[0].head[0] == begin:
        return prompts
    return [replace(prompt, head=(int(begin), *prompt.head)) for prompt in prompts]


class _Yard:
    """The engine, its store and the samples so far."""

    def __init__(self, engine: KVBoost, store: FreezableStore, journal: Journal, args: argparse.Namespace) -> None:
        self._engine, self._store, self._journal, self._args = engine, store, journal, args
        self._settings = settings_of(args.strategies, args.ratios)
        self._floors = _floor_engines(engine, args)
        self._references: dict[int, Reference] = {}

    def measure(self, prompts: Sequence[rag.RagPrompt]) -> None:
        """Everything that is not in the journal yet, of the first prompts."""
        count: int = self._args.prompts
        self._progress = Progress("samples", max(1, sum(1 for _ in self._missing(range(count)))))
        for first in range(0, count, GROUP):
            group = range(first, min(first + GROUP, count))
            self._references.clear()
            for number in group:
                self._measure_floors(number, prompts[number])
                for history in self._args.histories:
                    if history != "traffic":
                        self._measure_history(number, prompts[number], history)
            if "traffic" in self._args.histories:
                self._measure_traffic(group, prompts)

    def _missing(self, numbers: Sequence[int], history: str | None = None) -> Iterator[tuple[int, str, str]]:
        """The samples that are to be measured, of one history or of all."""
        labels = [setting.label for setting in self._settings]
        wanted = {FLOOR: list(self._floors), **dict.fromkeys(self._args.histories, labels)}
        for number in numbers:
            for name in wanted if history is None else [history]:
                for label in wanted[name]:
                    if (number, name, label) not in self._journal and not self._impossible(name, label):
                        yield number, name, label

    def _impossible(self, history: str, label: str) -> bool:
        return history == "alone" and label.startswith("variants")  # alone a passage has one variant

    def _case(self, number: int, prompt: rag.RagPrompt, *, known: Sequence[bool] | None = None) -> Case:
        if number not in self._references:
            self._references[number] = Reference(self._engine, prompt, tokens=self._args.tokens)
        return Case(prompt, self._references[number], known or [True] * len(prompt.passages))

    def _add(self, number: int, history: str, label: str, sample: dict[str, Any]) -> None:
        self._journal.add({"prompt": number, "history": history, "strategy": label, **sample})
        self._progress.step()

    def _measure_floors(self, number: int, prompt: rag.RagPrompt) -> None:
        for _, _, label in list(self._missing([number], FLOOR)):
            engine = self._floors[label]
            self._store.frozen = False
            sample = self._case(number, prompt).measure_exact(engine, warm=engine.model is self._engine.model)
            self._add(number, FLOOR, label, sample)

    def _measure_history(self, number: int, prompt: rag.RagPrompt, history: str) -> None:
        missing = {label for _, _, label in self._missing([number], history)}
        if not missing:
            return
        case = self._case(number, prompt)
        self._store.frozen = False
        rag.prefill_before(self._engine, prompt, history)
        self._measure_settings(number, history, case, [s for s in self._settings if not s.needs_variants], missing)
        with_variants = [s for s in self._settings if s.needs_variants and s.label in missing]
        if with_variants:
            self._store.frozen = False
            rag.add_variants(self._engine, prompt, history)
            self._measure_settings(number, history, case, with_variants, missing)

    def _measure_traffic(self, group: Sequence[int], prompts: Sequence[rag.RagPrompt]) -> None:
        if not any(self._missing(group, "traffic")):
            return
        self._store.frozen = False
        stream = Stream(self._engine, prompts[group[0] : group[0] + GROUP])
        for number in group:
            missing = {label for _, _, label in self._missing([number], "traffic")}
            if missing:
                case = self._case(number, prompts[number], known=stream.known(prompts[number]))
                self._measure_settings(number, "traffic", case, self._settings, missing)
            self._store.frozen = False
            stream.ask(prompts[number])

    def _measure_settings(
        self, number: int, history: str, case: Case, settings: Sequence[Setting], missing: set[str]
    ) -> None:
        """The settings that are missing, over what the store holds now."""
        self._store.frozen = True
        wanted = [setting for setting in settings if setting.label in missing]
        for place, setting in enumerate(wanted):
            if setting.needs_variants:
                continue
            repair = setting.repair(family=family_of(self._engine))
            sample = case.measure(self._engine, repair)
            if self._args.time:
                sample |= case.time_first_token(self._engine, repair, plain_first=(number + place) % 2 == 0)
            self._add(number, history, setting.label, sample)
        candidates = [setting for setting in wanted if setting.needs_variants]
        if candidates:
            for setting, sample in case.measure_variants(self._engine, self._store, candidates):
                self._add(number, history, setting.label, sample)


def _floor_engines(engine: KVBoost, args: argparse.Namespace) -> dict[str, KVBoost]:
    """By label, what each floor is measured with."""
    floors: dict[str, KVBoost] = {}
    if "dtype" in args.floors:
        other = _OTHER_DTYPE[args.dtype]
        floors[f"{other} instead of {args.dtype}"] = load_engine(args, dtype=other, store=MemoryStore(0))
    if "int8" in args.floors:
        say("making an engine with KV in 8 bits")
        # Without workspaces: a cache that is still there has all its bits.
        settings: dict[str, Any] = {"quality": "exact", "kv_cache_bits": 8, "workspace_bytes": 0}
        floors["KV in 8 bits"] = engine_beside(engine, store=MemoryStore(_STORE_BYTES), **settings)
    if "exact" in args.floors:
        floors["exact reuse"] = engine
    return floors
