"""RAG as a newcomer writes it: six passages as plain text, no boundaries, question after question over one pool.

Every request goes to plain Transformers and to engines with stores of their own, in turn. `auto` is as it begins:
every answer is exact, and checks go on behind it. No line is earned: the two below it are the repairs that it would try
first, used at once whatever they do to the answers. Invariants: all see the same texts in the same order; a
check that an engine makes in idle time is over before another is timed.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.measure import add_model_arguments, engine_beside, load_engine, positive
from benchmarks.common.questions import cut_at_sentence, read_questions
from benchmarks.common.report import BenchError, Report
from benchmarks.internals import wait_for_shadow_check, why_no_approx
from kvboost.bench.report import Spread, Table, describe_machine, ratios, say
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode, GenerationResult

QUICK = {"requests": 6, "passages": 3, "pool": 2, "tokens": 2}
_PLAIN = "plain Transformers"
_ENGINES = {
    "exact (default)": {"quality": "exact"},
    "auto, not earned yet": {"quality": "auto"},
    "nothing recomputed": {"quality": "fast", "recompute_strategy": "none"},
    "fast": {"quality": "fast"},
}
_CHARACTERS = 1000  # of a passage, about
_STORE_BYTES = 4 * 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    add_model_arguments(parser)
    parser.add_argument("--data", type=Path, metavar="FILE", help="questions with passages, such as MuSiQue's")
    parser.add_argument("--requests", type=positive, default=40, help="the last half counts (default 40)")
    parser.add_argument("--passages", type=positive, default=6, help="in a prompt (default 6)")
    parser.add_argument("--pool", type=positive, default=4, help="questions whose passages are drawn (default 4)")
    parser.add_argument("--tokens", type=positive, default=8, help="of an answer (default 8)")


def prompts_of(file: Path, *, requests: int, passages: int, pool: int) -> list[str]:
    """Texts in which the passages of a few questions come again and again, in ever new orders."""
    records = read_questions(file.expanduser())[:pool]
    if any(len(record["ctxs"]) < passages for record in records):
        raise BenchError(f"a question in {file.name} has fewer than {passages} passages; give --passages less")
    texts = [
        [cut_at_sentence(str(passage["text"]).strip(), _CHARACTERS) for passage in record["ctxs"][:passages]]
        for record in records
    ]
    rng = random.Random(7)
    prompts = []
    for number in range(requests):
        mine = number % len(records)
        strangers = [text for other, several in enumerate(texts) if other != mine for text in several]
        # Two thirds are about the question, as a retriever finds them.
        chosen = rng.sample(texts[mine], max(1, passages * 2 // 3))
        chosen += rng.sample(strangers, min(passages - len(chosen), len(strangers)))
        rng.shuffle(chosen)
        parts = ["Answer from these passages.", *chosen, f"Question: {records[mine]['question']}\nAnswer:"]
        prompts.append("\n\n".join(parts))
    return prompts


@dataclass
class _Rival:
    name: str
    engine: KVBoost
    results: list[GenerationResult]

    def ask(self, prompt: str, *, tokens: int) -> None:
        mode = GenerationMode.BASELINE if self.name == _PLAIN else GenerationMode.CHUNK_KV_REUSE
        self.results.append(self.engine.generate(prompt, mode=mode, max_new_tokens=tokens, temperature=0))
        if self.engine.parts.shadow is not None:
            wait_for_shadow_check(self.engine)


def run(args: argparse.Namespace) -> Report:
    """Ask everybody everything."""
    if args.data is None:
        raise BenchError("this benchmark needs questions with passages; give them with --data FILE")
    prompts = prompts_of(args.data, requests=args.requests, passages=args.passages, pool=args.pool)
    plain = load_engine(args, dtype=args.dtype, cache_bytes=_STORE_BYTES)
    rivals = [_Rival(_PLAIN, plain, [])] + [
        _Rival(name, engine_beside(plain, cache_bytes=_STORE_BYTES, **settings), [])
        for name, settings in _ENGINES.items()
    ]
    if (reason := why_no_approx(rivals[-1].engine)) is not None:
        raise BenchError(f"this model has no non-prefix reuse: {reason}")
    warm = "A first request, which nobody counts. " * 8
    for rival in rivals:
        rival.ask(warm, tokens=args.tokens)
        rival.results.clear()
    for number, prompt in enumerate(prompts, 1):
        for rival in rivals[number % len(rivals) :] + rivals[: number % len(rivals)]:
            rival.ask(prompt, tokens=args.tokens)
        say(f"request {number} of {len(prompts)}")
    machine = describe_machine(dtype=args.dtype, model=str(args.model))
    table = Table(
        "Plain-text RAG: time to the first token over the last half of the requests",
        machine,
        ("engine", "TTFT ms", "plain / this", "exact, %", "moved, %", "recomputed, %", "same answer"),
    )
    half = len(prompts) // 2
    reference = rivals[0].results[half:]
    for rival in rivals:
        counted = rival.results[half:]
        total = sum(result.prompt_tokens for result in counted)
        shares = (
            100 * sum(getattr(result.reuse, name) for result in counted) / total
            for name in ("exact_tokens", "moved_tokens", "recomputed_tokens")
        )
        times, plain_times = ([one.ttft_ms for one in several] for several in (counted, reference))
        same = sum(one.token_ids == other.token_ids for one, other in zip(counted, reference, strict=True))
        table.add(
            rival.name,
            Spread.of(times).text(0),
            Spread.of(ratios(plain_times, times)).text(),
            *(f"{share:.1f}" for share in shares),
            f"{same} of {len(counted)}",
        )
    table.notes = [
        f"{len(prompts)} requests of {args.passages} passages out of {args.pool * args.passages}, "
        f"{min(one.prompt_tokens for one in reference)} to {max(one.prompt_tokens for one in reference)} tokens; "
        f"cells are median [min max] of the last {len(counted)}, ratios request by request. "
        f"An answer has {args.tokens} tokens. "
        "Moved includes recomputed."
    ]
    raw = {
        rival.name: [
            {"ttft_ms": one.ttft_ms, "tokens": one.token_ids, "reuse": str(one.reuse)} for one in rival.results
        ]
        for rival in rivals
    }
    for rival in rivals[1:]:
        rival.engine.close()
    plain.close()
    return Report("plain_rag", tables=[table], raw=raw)
