"""Decodes with streamed weights, with a draft and without, in turns: tokens per pass and per second, and the tokens.

usage: python -m proofs.speculation smollm2 --model FOLDER | large [--tokens N] [--rounds N] [--scratch FOLDER]

``smollm2``: a quarter of its weights in memory; the drafts are prompt lookup, its own first layers, and itself in
memory, which is no draft anybody would use but says how much one could give. ``large``: the Llama-shaped checkpoint of
random weights of ``proofs.streaming`` (``--quick``: the smaller one) with prompt lookup.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from kvboost import GenerationResult, KVBoost
from kvboost.bench.report import describe_machine
from kvboost.offload.weights import streamer_of

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["smollm2", "large"])
    parser.add_argument("--model", type=Path, help="for smollm2: its folder")
    parser.add_argument("--quick", action="store_true", help="for large: the smaller checkpoint")
    parser.add_argument("--tokens", type=int, default=64, help="to decode in each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="for the layers' files")
    args = parser.parse_args()
    if args.what == "smollm2" and args.model is None:
        parser.error("smollm2 needs --model FOLDER")
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch) / "model"
        if args.what == "smollm2":
            shutil.copytree(args.model.expanduser(), folder)
        else:
            from proofs.streaming import _SIZES, make_checkpoint

            make_checkpoint(folder, _SIZES["quick" if args.quick else "full"])
        same = compare(args, folder)
    if not same:
        raise SystemExit(1)


def compare(args: argparse.Namespace, folder: Path) -> bool:
    """Every text in every way, round by round. Whether all ways gave the same tokens."""
    from proofs.streaming import _tensor_bytes

    weights = sum(_tensor_bytes(file) for file in folder.glob("*.safetensors"))
    title = "SmolLM2-135M-Instruct" if args.what == "smollm2" else "Llama-shaped, random weights"
    print(describe_machine(dtype="float32", model=title).line, flush=True)
    same = True
    ways = _ways(args, folder)
    with KVBoost.from_pretrained(
        str(folder), dtype="float32", device="cpu", weight_budget=weights // 4, chunk_size=64
    ) as engine:
        assert streamer_of(engine.model) is not None
        print(f"\n{title}, {weights / 1e6:.0f} MB; {engine.describe()['weights']}", flush=True)
        print(f"{args.tokens} tokens at most, greedy; {args.rounds} rounds, the ways in turns; the prompt is cached\n")
        print(
            "| text | draft | passes | proposed | accepted | accepted per pass | tokens/s (spread) | of none | tokens |"
        )
        print("|---|---|---:|---:|---:|---:|---:|---:|---|")
        for name, prompt in _prompts(engine, args.what).items():
            engine.warm(prompt)
            runs: dict[str, list[GenerationResult]] = {way: [] for way in ways}
            for _ in range(args.rounds):
                for way, arguments in ways.items():
                    runs[way].append(engine.generate(prompt, max_new_tokens=args.tokens, temperature=0, **arguments))
            none = statistics.median(_speed(result) for result in runs["none"])
            for way, results in runs.items():
                equal = all(result.token_ids == runs["none"][0].token_ids for result in results)
                same = same and equal
                print(_row(name, way, results, none=none, equal=equal), flush=True)
    return same


def _row(name: str, way: str, results: list[GenerationResult], *, none: float, equal: bool) -> str:
    speeds = sorted(_speed(result) for result in results)
    speed = statistics.median(speeds)
    told = results[0].speculation
    counts = (
        f"{told.passes} | {told.proposed} | {told.accepted} | {told.accepted_per_pass:.2f}"
        if told is not None
        else f"{len(results[0].token_ids)} | - | - | -"
    )
    return (
        f"| {name} | {way} | {counts} | {speed:.2f} ({speeds[0]:.2f} to {speeds[-1]:.2f}) | {speed / none:.2f}x "
        f"| {'the same' if equal else 'DIFFER'} |"
    )


def _speed(result: GenerationResult) -> float:
    """New tokens per second over the whole call: a draft reads the prompt before the first one."""
    return len(result.token_ids) / result.total_ms * 1000.0


def _ways(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    ways: dict[str, dict[str, Any]] = {"none": {}, "prompt lookup": _LOOKUP}
    if args.what == "smollm2":
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()  # it would list the layers that are left out
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        part = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", num_hidden_layers=_FIRST_LAYERS).eval()
        ways[f"its first {_FIRST_LAYERS} layers"] = {"assistant_model": part}
        ways["itself, in memory (bound)"] = {"assistant_model": whole}
    return ways


def _prompts(engine: KVBoost, what: str) -> dict[str, list[int]]:
    if what == "large":
        return {"made-up tokens": [(i * 7919) % 250 + 3 for i in range(200)]}
    template = engine.tokenizer.apply_chat_template
    return {
        name: template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)["input_ids"]
        for name, text in TEXTS.items()
    }


if __name__ == "__main__":
    main()
