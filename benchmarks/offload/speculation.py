"""Speculation over streamed weights, with a draft and without, in turns: tokens per pass, per second, and the tokens.

A trained model has a quarter of its weights in memory. The drafts are prompt lookup, its own first layers, and itself
in memory: nobody would use that, but it says how much a draft could give. Without a trained model: the checkpoint of
random weights of ``weight_streaming``, with prompt lookup.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.measure import positive
from benchmarks.common.report import Report
from benchmarks.offload.weight_streaming import SIZES, make_checkpoint, tensor_bytes
from kvboost.bench.report import Spread
from kvboost.engine import KVBoost
from kvboost.hf.weights import streamed_weights_of
from kvboost.types import GenerationResult

QUICK = {"small": True, "tokens": 4, "rounds": 1}

_LOOKUP = {"prompt_lookup_num_tokens": 10}
_FIRST_LAYERS = 10
_CODE = """def total_price(items, tax):
    total = 0.0
    for item in items:
        price = item.price * item.amount
        if item.discount is not None:
            price = price * (1.0 - item.discount)
        total = total + price
    return total * (1.0 + tax)
"""
_PASSAGE = (
    "The lighthouse on the northern cape was built in 1871 by the harbour board of the town. Its lamp burned oil until "
    "1923, when it was connected to the town's electricity. Ships saw its light from twenty miles away. The last "
    "keeper, Anna Holm, left the tower in 1987, and since then a computer has switched the lamp on at dusk."
)
TEXTS = {
    "code edit": f"Rewrite this function. Rename tax to rate and change nothing else.\n\n```python\n{_CODE}```",
    "quotes": f"Write down the following text again, word for word.\n\n{_PASSAGE}",
    "open question": "Why do people like to live near the sea? Answer in a few sentences.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--trained", type=Path, metavar="FOLDER", help="a trained chat model; else random weights")
    parser.add_argument("--small", action="store_true", help="random weights of 0.8 GB instead of 2.7")
    parser.add_argument("--tokens", type=positive, default=64, help="to decode in each run (default 64)")
    parser.add_argument("--rounds", type=positive, default=3, help="default: 3")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="for the layers' files")


def run(args: argparse.Namespace) -> Report:
    """Every text in every way, round by round; holds if all ways give the same tokens."""
    report = Report("speculation")
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch) / "model"
        if args.trained is not None:
            shutil.copytree(args.trained.expanduser(), folder)
        else:
            make_checkpoint(folder, SIZES["small" if args.small else "full"])
        weights = sum(tensor_bytes(file) for file in folder.glob("*.safetensors"))
        ways = _ways(args, folder)
        settings: dict[str, Any] = {"weight_budget": weights // 4, "chunk_size": 64}
        with KVBoost.from_pretrained(str(folder), dtype="float32", device="cpu", **settings) as engine:
            assert streamed_weights_of(engine.model) is not None
            columns = ["text", "draft", "passes", "proposed", "accepted", "accepted per pass", "tokens/s", "of none"]
            table = report.table(
                f"{weights / 1e6:.0f} MB; {engine.describe()['weights']}; {args.tokens} tokens at most, greedy",
                [*columns, "tokens"],
                dtype="float32",
                model=args.trained or "Llama-shaped, random weights",
            )
            for name, prompt in _prompts(engine, trained=args.trained is not None).items():
                engine.warm(prompt)
                runs: dict[str, list[GenerationResult]] = {way: [] for way in ways}
                for _ in range(args.rounds):
                    for way, options in ways.items():
                        result = engine.generate(prompt, max_new_tokens=args.tokens, temperature=0, **options)
                        runs[way].append(result)
                none = statistics.median(_speed(result) for result in runs["none"])
                for way, results in runs.items():
                    same = all(result.token_ids == runs["none"][0].token_ids for result in results)
                    report.failed |= not same
                    speed = Spread.of([_speed(result) for result in results])
                    against = f"{speed.median / none:.2f}x"
                    table.add(name, way, *_counts(results[0]), speed.text(), against, "same" if same else "DIFFER")
    table.notes.append(f"{args.rounds} rounds, the ways in turns; the prompt is cached.")
    return report


def _counts(result: GenerationResult) -> tuple[object, ...]:
    told = result.speculation
    if told is None:
        return len(result.token_ids), "-", "-", "-"
    return told.passes, told.proposed, told.accepted, f"{told.accepted / told.passes:.2f}"


def _speed(result: GenerationResult) -> float:
    """New tokens per second over the whole call: a draft prefills the prompt before the first one."""
    return len(result.token_ids) / result.total_ms * 1000.0


def _ways(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    ways: dict[str, dict[str, Any]] = {"none": {}, "prompt lookup": _LOOKUP}
    if args.trained is not None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()  # it would list the layers that are left out
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        part = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", num_hidden_layers=_FIRST_LAYERS).eval()
        ways[f"its first {_FIRST_LAYERS} layers"] = {"assistant_model": part}
        ways["itself, in memory (bound)"] = {"assistant_model": whole}
    return ways


def _prompts(engine: KVBoost, *, trained: bool) -> dict[str, list[int]]:
    if not trained:
        return {"made-up tokens": [(i * 7919) % 250 + 3 for i in range(200)]}
    template = engine.tokenizer.apply_chat_template
    return {
        name: template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)["input_ids"]
        for name, text in TEXTS.items()
    }
