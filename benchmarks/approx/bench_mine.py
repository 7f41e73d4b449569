"""`kvboost bench mine` on questions with passages, then the quality and cache it names, measured together.

Each question comes three times, as in a session about one search: with its passages, again with them and another
question, and with them in another order. The questions' turns come one after the other. The command runs as a user
runs it, in a process of its own. Fails if what it recommends is not faster, or changes more answers than it may.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.measure import positive
from benchmarks.common.questions import cut_at_sentence
from benchmarks.common.rag import read_questions
from benchmarks.common.report import BenchError, Report
from kvboost import KVBoost
from kvboost.bench.compare import EXACT, compare, quality_settings
from kvboost.bench.mine import Tried
from kvboost.bench.report import say
from kvboost.bench.workloads import Request
from kvboost.cli.explain import encoded
from kvboost.explain.replay import read_log
from kvboost.hf.loading import ModelSource, load_resident, load_tokenizer

QUICK = {"questions": 2, "passages": 2, "new": 2, "dtype": "float32"}
_CHARACTERS = 1000  # of a passage
_TOLERATED = 0.05  # the command's default
_FOLLOWING = "Which of the passages says so?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model's folder")
    parser.add_argument("--data", type=Path, metavar="FILE", help="questions with passages, such as MuSiQue's")
    parser.add_argument("--questions", type=positive, default=24, help="each asked three times (default 24)")
    parser.add_argument("--passages", type=positive, default=6, help="of a prompt (default 6)")
    parser.add_argument("--new", type=positive, default=8, help="tokens of an answer (default 8)")
    parser.add_argument("--dtype", default="bfloat16", help="default bfloat16")


def run(args: argparse.Namespace) -> Report:
    """Ask for a recommendation, then measure it."""
    if args.model is None or args.data is None:
        raise BenchError("this benchmark needs a model and questions with passages; give --model and --data")
    report, model = Report("bench_mine"), args.model.expanduser().resolve()
    with tempfile.TemporaryDirectory() as scratch:
        records = read_questions(args.data.expanduser())
        log = Path(scratch) / "my.jsonl"
        prompts = _prompts(records[: args.questions], passages=args.passages)
        log.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts) + "\n", encoding="utf-8")
        asked = [*("bench", "mine", str(model), "--prompts", str(log), "--limit", str(len(prompts)))]
        asked += ["--new", str(args.new), "--dtype", args.dtype]
        first = _kvboost(asked)
        named = [shlex.split(line) for line in first.splitlines() if line.startswith("  kvboost serve ")]
        flags = dict(zip(named[0][3::2], named[0][4::2], strict=True)) if named else {}
        quality, cache = flags.get("--quality", "auto"), flags.get("--cache-bytes", "")
        source = ModelSource(str(model), dtype=args.dtype)
        # What auto does is earned on live traffic.
        again = _measured(source, log, quality, cache, new=args.new) if quality != "auto" else None
        table = report.table(
            f"What was said about {len(prompts)} prompts with {args.questions} questions",
            ["run", "output"],
            dtype=args.dtype,
            model=model,
        )
        for line in first.splitlines():
            if line.startswith(("| exact", "| high", "| fast", "Recommendation", "  kvboost serve")):
                table.add("bench mine", line.strip(" |").replace("|", ";").replace(str(model), model.name))
        report.failed = "Recommendation: " not in first
        if again is not None:
            table.add("as recommended", f"{quality} with {cache}: {again.gain:.2f}x as fast; {again.about()}")
            too_many = quality != EXACT and again.at_most(0.95) > _TOLERATED
            report.failed |= again.gain < 1.0 or too_many
        table.notes.append(
            "quality; plain ms; ours ms; plain / ours; all prompts; exact %; approx %; same answer: as `kvboost bench "
            "mine` prints them."
        )
        report.raw["first"] = first
    return report


def _measured(source: ModelSource, log: Path, quality: str, cache: str, *, new: int) -> Tried:
    """The log's prompts with this quality and this cache, and plain Transformers in turn."""
    model, tokenizer = load_resident(source), load_tokenizer(source)
    read = encoded(read_log(log), tokenizer, log)
    requests = [Request(prompt.tokens.tolist(), list(prompt.boundaries)) for prompt in read]
    with KVBoost(model, tokenizer, **quality_settings(quality), cache_bytes=cache) as engine:
        pairing = compare("your prompts", requests, engine, new=new, cold=0)
    return Tried(quality, pairing, 0)


def _prompts(records: list[dict[str, Any]], *, passages: int) -> list[str]:
    rng, prompts = random.Random(0), []
    for record in records:
        texts = [cut_at_sentence(str(passage["text"]).strip(), _CHARACTERS) for passage in record["ctxs"][:passages]]
        moved = rng.sample(texts, len(texts))
        for shown, question in ((texts, record["question"]), (texts, _FOLLOWING), (moved, record["question"])):
            together = "\n\n".join(shown)
            prompts.append(f"Answer from these passages.\n\n{together}\n\nQuestion: {question}\nAnswer:")
    return prompts


def _kvboost(arguments: list[str]) -> str:
    say(f"kvboost {shlex.join(arguments[:2])}")
    done = subprocess.run([sys.executable, "-m", "kvboost", *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchError(f"kvboost bench mine ended with {done.returncode}; see above")
    return done.stdout
