"""vLLM with our connector against vLLM alone: after a restart, behind other text, and on prompts never seen.

Two engines of one vLLM environment, each in its own process, asked in turn; vLLM's own prefix cache is on in both.
A time is of a call for one token. After a restart: the engine with the connector is made anew for every sample, the
other one's prefix cache is emptied. Behind other text: questions over four passages that both engines have read in
another order and behind another preamble. Never seen: random tokens, also as 16 requests at once.
"""

from __future__ import annotations

import argparse
import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common.measure import positive, share
from benchmarks.common.rag import load_prompts
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.common.vllm_engine import VLLMEngine, lasting_tiers, random_prompt, vllm_python
from kvboost.bench.report import Spread, Table, ratios

QUICK = {"repeat": 1, "questions": 1}
_PREAMBLES = ("Read these texts with care.\n\n", "You are a librarian. Some texts follow, then a question.\n\n")
_ORDER = (2, 0, 3, 1)
_ANSWER = 16  # tokens that are compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--vllm-venv", type=Path, metavar="FOLDER", help="an environment with vLLM and kvboost")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=positive, default=2000, help="of a prompt that was read before")
    parser.add_argument("--repeat", type=positive, default=5, help="pairs (default 5)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="questions with passages, for text behind other text")
    parser.add_argument("--questions", type=positive, default=8, help="of them (default 8)")
    parser.add_argument(
        "--ratios", type=share, nargs="+", default=[0.15, 0.1, 0.0], help="recomputed of moved text (0.15 0.1 0)"
    )
    parser.add_argument("--parts", nargs="+", default=["restart", "moved", "new"], choices=("restart", "moved", "new"))


def run(args: argparse.Namespace) -> Report:
    """Every part in turn."""
    if args.model is None:
        raise BenchError("give --model FOLDER")
    vllm_python(args.vllm_venv)
    report = Report("vllm_tiers")
    parts = {"restart": _restart, "moved": _moved, "new": _new}
    for part in args.parts:
        if part != "moved" or args.data is not None:
            parts[part](args, report)
    return report


def _engine(args: argparse.Namespace, connector: dict[str, Any] | None, **options: Any) -> VLLMEngine:
    return VLLMEngine(
        vllm_python(args.vllm_venv), args.model.expanduser(), connector=connector, dtype=args.dtype, **options
    )


def _restart(args: argparse.Namespace, report: Report) -> None:
    table = report.table(
        f"After a restart: {args.tokens} tokens read before, first token",
        ["KV from", "reused", "vLLM alone s", "with the connector s", "alone / with", "same log-probabilities"],
        dtype=args.dtype,
        model=args.model,
    )
    prompt = random_prompt(0, args.tokens)
    with lasting_tiers() as places, _engine(args, None) as alone:
        _say_versions(table, alone)
        alone.generate(random_prompt(2, args.tokens), new=1)  # its kernels' first use
        for name, connector in places.items():
            with _engine(args, connector) as first:
                first.generate(prompt, new=1)
            progress = Progress(f"restart, {name}", args.repeat)
            plain, ours, reused, same = [], [], [], []
            for _ in range(args.repeat):
                with _engine(args, connector) as again:
                    again.generate(random_prompt(1, 200), new=1)  # its kernels' first use
                    alone.forget()
                    plain.append(alone.generate(prompt, new=1)[0]["seconds"])
                    (answer,) = again.generate(prompt, new=1)
                    ours.append(answer["seconds"])
                    reused.append(answer["cached"])
                    (own,) = alone.generate(prompt, new=1)  # from its own prefix cache, up to the same page
                    same.append(own["cached"] == answer["cached"] and own["logprobs"] == answer["logprobs"])
                    progress.step()
            table.add(
                name,
                Spread.of(reused).text(0),
                Spread.of(plain).text(),
                Spread.of(ours).text(),
                Spread.of(ratios(plain, ours)).text(1),
                f"{sum(same)} of {len(same)}",
            )
            report.raw[f"restart {name}"] = {"alone": plain, "with": ours, "reused": reused}


def _moved(args: argparse.Namespace, report: Report) -> None:
    from transformers import AutoTokenizer

    table = report.table(
        "Behind other text: four passages read before in another order and behind another preamble, first token",
        [
            "recomputed",
            "claimed of the prompt",
            "of the passages not computed",
            "vLLM alone s",
            "with the connector s",
            "alone / with",
            "same token",
            f"same {_ANSWER} tokens",
        ],
        dtype=args.dtype,
        model=args.model,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model.expanduser())
    heads = [tuple(tokenizer.encode(text)) for text in _PREAMBLES]
    questions = load_prompts(tokenizer, args.data, count=args.questions, passages=4)
    for ratio in args.ratios:
        settings = {"mode": "approximate", "recompute_ratio": ratio}
        with ExitStack() as stack:
            alone, ours = (stack.enter_context(_engine(args, each)) for each in (None, settings))
            if ratio == args.ratios[0]:
                _say_versions(table, alone)
            plain, times, shares, spared, same, answers = [], [], [], [], [], []
            progress = Progress(f"behind other text, {ratio:.0%} recomputed", len(questions))
            for number, question in enumerate(questions):
                seen = [*heads[0], *(t for i in _ORDER for t in question.passages[i]), *question.tail]
                asked = [*heads[1], *(t for passage in question.passages for t in passage), *question.tail]
                for engine in (alone, ours):
                    engine.generate(seen, new=1)
                pair = [alone, ours] if number % 2 else [ours, alone]
                before = ours.counts()["moved_tokens"]
                first = {engine: engine.generate(asked, new=1)[0] for engine in pair}
                one, other = first[alone], first[ours]
                moved = ours.counts()["moved_tokens"] - before
                # Nothing approximate is kept, so ours moves the passages once more.
                answer, again = (engine.generate(asked, new=_ANSWER)[0]["tokens"] for engine in (alone, ours))
                answers.append(answer == again)
                plain.append(one["seconds"])
                times.append(other["seconds"])
                shares.append(other["cached"] / len(asked))
                spared.append(moved / sum(map(len, question.passages)))
                same.append(one["tokens"] == other["tokens"])
                progress.step()
            table.add(
                f"{ratio:.0%}",
                Spread.of(shares).text(),
                Spread.of(spared).text(),
                Spread.of(plain).text(),
                Spread.of(times).text(),
                Spread.of(ratios(plain, times)).text(),
                f"{sum(same)} of {len(same)}",
                f"{sum(answers)} of {len(answers)}",
            )
            if "could not be" in ours.log():
                raise BenchError("KV could not be loaded; see the connector's log")


def _new(args: argparse.Namespace, report: Report) -> None:
    table = report.table(
        "Never seen before: the connector on against off",
        ["KV goes to", "prompts", "off s", "on s", "off / on"],
        dtype=args.dtype,
        model=args.model,
    )
    shapes = {
        f"one of {args.tokens} tokens, first token": (1, args.tokens, 1),
        "16 x 200 tokens, 32 new": (16, 200, 32),
    }
    seed = itertools.count(100)
    with lasting_tiers() as places, _engine(args, None, max_num_seqs=16) as off:
        _say_versions(table, off)
        for place, connector in {"memory": {}, **places}.items():
            with _engine(args, connector, max_num_seqs=16) as on:
                for name, (count, length, new) in shapes.items():
                    times: dict[VLLMEngine, list[float]] = {off: [], on: []}
                    progress = Progress(f"{place}, {name}", args.repeat + 1)
                    for number in range(args.repeat + 1):
                        prompts = [random_prompt(next(seed), length) for _ in range(count)]
                        for engine in (off, on) if number % 2 else (on, off):
                            seconds = engine.generate(*prompts, new=new)[0]["seconds"]
                            if number:  # the first pair warms both up
                                times[engine].append(seconds)
                        progress.step()
                    table.add(
                        place,
                        name,
                        Spread.of(times[off]).text(),
                        Spread.of(times[on]).text(),
                        Spread.of(ratios(times[off], times[on])).text(),
                    )


def _say_versions(table: Table, engine: VLLMEngine) -> None:
    said = ", ".join(f"{name} {version}" for name, version in engine.versions.items())
    table.notes.append(f"In vLLM's environment: {said}.")
