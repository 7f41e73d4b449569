"""TTFT with non-prefix reuse: documents in a new order, against computing everything; and where reuse cannot help.

Documents were prefilled in one order and come in another, new one every round; each setting alternates with plain
Transformers and with the same engine at ``quality="exact"``. Then requests where it should not help: there it
must not cost anything. Invariant: the engines share one store that keeps nothing while they are timed, so that no
request is an exact hit for the next one.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from benchmarks.common.measure import (
    FreezableStore,
    TextSource,
    add_model_arguments,
    alternate,
    engine_beside,
    first_token,
    joined,
    load_engine,
    positive,
)
from benchmarks.common.report import BenchError, Report
from benchmarks.common.strategies import STRATEGIES
from benchmarks.internals import forget_requests
from kvboost.bench.report import Machine, Spread, Table, describe_machine, ratios, say
from kvboost.engine import KVBoost
from kvboost.types import GenerationResult

QUICK = {"lengths": [800], "repeat": 2, "pairs": 2, "stored": 1500, "force": True}
_PLAIN, _EXACT = "plain Transformers", 'quality="exact"'
_QUALITIES = ("high", "fast")
_AGAIN = "plain Transformers again"  # how far its ratio is from 1 is noise
_SHORTEST = 200  # tokens; below, the documents are shorter than a chunk
_BAR = 0.95
_MIN_DOCUMENTS, _DOCUMENT_TOKENS = 5, 600
_MIN_FOUND = 0.95
_STORED_STEP = 1000  # the store is filled with texts of this length
_SMALL_CHUNK = 64
_LEARN_FROM = (40, 300, 900)  # tokens; an engine estimates from earlier requests what pays
_STORE_BYTES = 8 * 2**30


@dataclass(frozen=True)
class Setting:
    """How to recompute, as ``--settings`` names it."""

    name: str
    engine_settings: dict[str, Any] = field(hash=False, default_factory=dict)

    def __str__(self) -> str:
        return self.name


def parse_setting(text: str) -> Setting:
    """An argparse type: ``high`` or ``fast``, a strategy's name (with the default ratio), or ``NAME=RATIO``."""
    name, given, ratio = text.partition("=")
    if name in _QUALITIES and not given:
        return Setting(name, {"quality": name})
    if name not in STRATEGIES:
        known = [*_QUALITIES, *sorted(STRATEGIES)]
        raise argparse.ArgumentTypeError(f"{name} is neither a quality nor a strategy; use one of {known}")
    if not given:
        return Setting(text, {"quality": "high", "recompute_strategy": STRATEGIES[name]})
    try:
        share = float(ratio)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: {ratio!r} is not a share; write for example {name}=0.15")
    return Setting(text, {"quality": "high", "recompute_strategy": STRATEGIES[name], "recompute_ratio": share})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    add_model_arguments(parser)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[2000, 6000], help="default: 2000 6000 tokens")
    parser.add_argument("--query", type=positive, default=30, help="query tokens behind the documents (default 30)")
    parser.add_argument(
        "--settings",
        type=parse_setting,
        nargs="+",
        default=[parse_setting(text) for text in ("high", "fast", "none=0")],
        metavar="NAME[=RATIO]",
        help="a quality, or a strategy and its share of tokens (default: high fast none=0)",
    )
    parser.add_argument("--force", action="store_true", help="reuse also where the engine would rather compute")
    parser.add_argument("--repeat", type=positive, default=7, help="rounds per length (default 7)")
    parser.add_argument("--warmups", type=positive, default=1, help="rounds run before (default 1)")
    parser.add_argument("--skip-never-slower", action="store_true", help="only documents in a new order")
    parser.add_argument("--pairs", type=positive, default=20, help="requests per never-slower workload (default 20)")
    parser.add_argument(
        "--stored", type=positive, default=8000, help="tokens of other text in the never-slower store (default 8000)"
    )


@dataclass
class _Contest:
    """Engines that read from one frozen store, and what they took."""

    label: str
    engines: dict[str, KVBoost]
    prompts: Sequence[tuple[list[int], list[int]]]
    """Tokens and boundaries, one prompt for each round, the same for all contestants."""
    results: dict[str, list[GenerationResult]] = field(default_factory=dict)
    ttft_ms: dict[str, list[float]] = field(default_factory=dict)

    def run(self, *, warmups: int) -> None:
        """All rounds; warm-ups take the first prompts."""
        self.results = {name: [] for name in self.engines}
        contestants = {name: self._contestant(name) for name in self.engines}
        repeat = len(self.prompts) - warmups
        self.ttft_ms = alternate(contestants, repeat=repeat, warmups=warmups, label=self.label)
        self.results = {name: results[warmups:] for name, results in self.results.items()}

    def _contestant(self, name: str) -> Callable[[], float]:
        def ask() -> float:
            done = self.results[name]
            tokens, boundaries = self.prompts[len(done)]
            # The store is frozen, so a beginning that comes again never turns exact: computing it would be in vain.
            forget_requests(self.engines[name])
            done.append(
                first_token(self.engines[name], tokens, baseline=name in (_PLAIN, _AGAIN), boundaries=boundaries)
            )
            return done[-1].ttft_ms

        return ask

    def raw(self) -> dict[str, Any]:
        """For the file of samples."""
        return {
            "label": self.label,
            "ttft_ms": self.ttft_ms,
            "reuse": {
                name: [
                    {
                        "prompt_tokens": result.prompt_tokens,
                        "exact_tokens": result.reuse.exact_tokens,
                        "moved_tokens": result.reuse.moved_tokens,
                        "recomputed_tokens": result.reuse.recomputed_tokens,
                        "stages_ms": dict(result.reuse.timings_ms),
                    }
                    for result in results
                ]
                for name, results in self.results.items()
            },
        }


def run(args: argparse.Namespace) -> Report:
    """Measure all lengths, then the requests where reuse should not help."""
    if min(args.lengths) < _SHORTEST:
        raise BenchError(f"--lengths {min(args.lengths)} is too short to show anything; give {_SHORTEST} or more")
    store = FreezableStore(_STORE_BYTES)
    exact = load_engine(args, dtype=args.dtype, store=store)
    source = TextSource(exact.tokenizer, args.text)

    machine = describe_machine(dtype=args.dtype, model=str(args.model))
    approx = {
        setting.name: engine_beside(exact, store=store, force_approx=args.force, **setting.engine_settings)
        for setting in args.settings
    }
    _learn(exact, approx, store, source)
    reordered = [_measure_length(exact, approx, store, source, length, args) for length in args.lengths]
    unhelpful: list[_Contest] = []
    if not args.skip_never_slower:
        unhelpful = _measure_never_slower(exact, approx, store, source, args)
    for engine in approx.values():
        engine.close()
    report = Report(
        "nonprefix_ttft", raw={"reordered": [c.raw() for c in reordered], "never_slower": [c.raw() for c in unhelpful]}
    )
    report.tables = [_table(reordered, machine, args), _stage_table(reordered, machine)]
    if unhelpful:
        report.tables.append(_never_slower_table(unhelpful, machine, args))
    return report


def _learn(exact: KVBoost, approx: dict[str, KVBoost], store: FreezableStore, source: TextSource) -> None:
    """Let every engine prefill something, as one in use has: it estimates from that whether reuse pays."""
    say("warming up")
    store.frozen = True
    for length in _LEARN_FROM:
        tokens = source.window(len(source.ids) - length, length)
        for engine in (exact, *approx.values()):
            first_token(engine, tokens)
        first_token(exact, tokens, baseline=True)


def documents(source: TextSource, length: int) -> list[list[int]]:
    """Real text of ``length`` tokens in documents of unlike lengths."""
    count = max(_MIN_DOCUMENTS, length // _DOCUMENT_TOKENS)
    weights = [3 + number * 7 % 5 for number in range(count)]
    ends = [length * sum(weights[: number + 1]) // sum(weights) for number in range(count)]
    text = source.window(0, length)
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def new_orders(count: int, *, wanted: int, rng: random.Random) -> list[list[int]]:
    """``wanted`` different orders of ``count`` documents; none begins as they were prefilled (0, 1, 2, ...)."""
    if count <= 7:
        every = [list(order) for order in permutations(range(count)) if order[0] != 0]
        if wanted > len(every):
            raise BenchError(
                f"{count} documents have only {len(every)} new orders, {wanted} are needed; give --repeat less"
            )
        rng.shuffle(every)
        return every[:wanted]
    found: list[list[int]] = []
    while len(found) < wanted:
        order = rng.sample(range(count), count)
        if order[0] != 0 and order not in found:
            found.append(order)
    return found


def _measure_length(
    exact: KVBoost,
    approx: dict[str, KVBoost],
    store: FreezableStore,
    source: TextSource,
    length: int,
    args: argparse.Namespace,
) -> _Contest:
    parts = documents(source, length)
    store.frozen = False
    exact.clear()
    say(f"prefilling {length} tokens in {len(parts)} documents")
    tokens, ends = joined(parts)
    exact.warm(tokens, boundaries=ends)
    store.frozen = True
    prompts = []
    rounds = args.warmups + args.repeat
    for number, order in enumerate(new_orders(len(parts), wanted=rounds, rng=random.Random(length))):
        tokens, ends = joined([parts[index] for index in order])
        prompts.append(([*tokens, *source.window(length + number * args.query, args.query)], ends))
    contest = _Contest(f"{length} tokens", {_PLAIN: exact, _EXACT: exact, **approx}, prompts)
    contest.run(warmups=args.warmups)
    for name, results in contest.results.items():
        for result in results:
            reuse = result.reuse
            if reuse.exact_tokens or 0 < reuse.moved_tokens < _MIN_FOUND * length:
                raise BenchError(
                    f"{name}: {reuse.exact_tokens} exact and {reuse.moved_tokens} of {length} non-prefix hits; "
                    "the text repeats itself, give other files with --text"
                )
    return contest


def _measure_never_slower(
    exact: KVBoost, approx: dict[str, KVBoost], store: FreezableStore, source: TextSource, args: argparse.Namespace
) -> list[_Contest]:
    """Requests of which nothing, or hardly anything, is known."""
    rng = random.Random(1)
    half = len(source.ids) // 2
    store.frozen = False
    exact.clear()
    say(f"prefilling {args.stored} tokens of other text")
    for start in range(0, args.stored, _STORED_STEP):
        exact.warm(source.window(start % max(1, half - _STORED_STEP), min(_STORED_STEP, half)))
    small = [source.window(half + number * _SMALL_CHUNK, _SMALL_CHUNK) for number in range(8)]
    for chunk in small:
        exact.warm(chunk, boundaries=[len(chunk)])
    store.frozen = True
    begin = half + len(small) * _SMALL_CHUNK

    def unknown(length: int) -> list[int]:
        length = min(length, (len(source.ids) - begin) // 2)
        return source.window(rng.randrange(begin, len(source.ids) - length), length)

    def one_known_chunk() -> tuple[list[int], list[int]]:
        tokens, ends = joined([unknown(rng.randint(100, 900)), rng.choice(small), unknown(rng.randint(100, 900))])
        return tokens, ends[:-1]

    workloads: dict[str, Callable[[], tuple[list[int], list[int]]]] = {
        "unrelated, 300 to 2,000 tokens": lambda: (unknown(rng.randint(300, 2000)), []),
        "tiny, 5 to 60 tokens": lambda: (unknown(rng.randint(5, 60)), []),
        f"one known chunk of {_SMALL_CHUNK} tokens in 264 to 1,864": one_known_chunk,
    }
    contests = []
    for label, make in workloads.items():
        prompts = [make() for _ in range(args.warmups + args.pairs)]
        contest = _Contest(label, {_PLAIN: exact, _EXACT: exact, **approx, _AGAIN: exact}, prompts)
        contest.run(warmups=args.warmups)
        contests.append(contest)
    return contests


def _reused_share(results: Sequence[GenerationResult]) -> str:
    return f"{100 * statistics.median(result.reuse.moved_tokens / result.prompt_tokens for result in results):.0f}"


def _table(contests: Sequence[_Contest], machine: Machine, args: argparse.Namespace) -> Table:
    columns = ["documents", "engine", "reused, %", "recomputed, %", "TTFT ms", "plain / this", "exact / this"]
    table = Table("TTFT with non-prefix reuse: documents seen before in another order", machine, columns)
    for contest in contests:
        for name, times in contest.ttft_ms.items():
            results = contest.results[name]
            reused = sum(result.reuse.moved_tokens for result in results)
            recomputed = sum(result.reuse.recomputed_tokens for result in results)
            table.add(
                contest.label,
                name,
                _reused_share(results),
                f"{100 * recomputed / reused:.1f}" if reused else "-",
                Spread.of(times).text(0),
                Spread.of(ratios(contest.ttft_ms[_PLAIN], times)).text(2),
                Spread.of(ratios(contest.ttft_ms[_EXACT], times)).text(2),
            )
    table.notes.append(
        f"Cells are median [min max] of {args.repeat} rounds, ratios round by round; TTFT from the call. All alternate "
        f"on the same prompt, the documents in an order not seen before, with {args.query} new tokens behind them. No "
        'request has an exact hit, so `quality="exact"` computes everything, chunk by chunk, and keeps nothing here '
        "(nor does anybody: keeping comes after the first token)."
    )
    return table


def _stage_table(contests: Sequence[_Contest], machine: Machine) -> Table:
    every = [result.reuse.timings_ms for c in contests for results in c.results.values() for result in results]
    stages = list(dict.fromkeys(stage for timings in every for stage in timings))
    table = Table("Where these requests spend their time, median ms", machine, ["documents", "engine", *stages])
    for contest in contests:
        for name, results in contest.results.items():
            medians = [statistics.median(r.reuse.timings_ms.get(stage, 0.0) for r in results) for stage in stages]
            table.add(contest.label, name, *(f"{value:.1f}" for value in medians))
    return table


def _never_slower_table(contests: Sequence[_Contest], machine: Machine, args: argparse.Namespace) -> Table:
    columns = ["prompts", "engine", "reused in", "TTFT ms", "plain TTFT ms", "plain / this", f"bar {_BAR}"]
    table = Table("Never slower: requests where non-prefix reuse should not help", machine, columns)
    for contest in contests:
        for name, times in contest.ttft_ms.items():
            if name == _PLAIN:
                continue
            ratio = Spread.of(ratios(contest.ttft_ms[_PLAIN], times))
            table.add(
                contest.label,
                name,
                f"{sum(result.reuse.moved_tokens > 0 for result in contest.results[name])} of {len(times)}",
                Spread.of(times).text(0),
                Spread.of(contest.ttft_ms[_PLAIN]).text(0),
                ratio.text(3),
                "met" if ratio.median >= _BAR else "missed",
            )
    table.notes.append(
        f"{args.pairs} different prompts per line, alternating; cells are median [min max], the ratio pair by pair; "
        f"the bar is for its median. The ratio of `{_AGAIN}` is noise. The store "
        f"holds {args.stored} tokens of other text and the known chunks, and "
        "keeps nothing while this runs."
    )
    return table
