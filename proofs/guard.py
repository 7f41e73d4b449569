"""Does the shadow check put an end to bad repairs soon, and leave good ones alone?

Short prompts are put together from passages that were read before; every answer is checked. Bad: no repair at all, on
the tokens of source code in random order, with 5 % of the answers allowed to differ. Good: the default strategy with
half of the rows, on text, with a fifth allowed to differ.

    python proofs/guard.py --model FOLDER --requests 2000
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import warnings
from pathlib import Path

from tqdm import tqdm

from kvboost import KVBoost
from kvboost.bench.report import describe_machine

_PASSAGES, _LENGTH = 60, 64  # how many, and tokens of each
_HEAD = "You answer questions from what you are given.\n"


def main() -> None:
    """Print one line for each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a causal language model")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/musique_150.json"))
    args = parser.parse_args()
    common = {"chunk_size": 16, "shadow_share": 1.0, "force_approx": True}
    bad = KVBoost.from_pretrained(args.model, dtype="float32", recompute_strategy="none", quality=0.05, **common)
    good = KVBoost(bad.model, bad.tokenizer, recompute_ratio=0.5, quality=0.2, **common)
    print(f"{describe_machine(dtype='float32', model=args.model).line}\n")
    print("| passages | repair | allowed to differ | requests | checked | differed | share at most | still moving |")
    print("|---|---|---|---|---|---|---|---|")
    code = bad.tokenizer(inspect.getsource(random))["input_ids"]
    shuffled = random.Random(1).sample(code, len(code))
    ask_all(bad, pieces(shuffled), "shuffled code", "none", requests=args.requests)
    text = "\n".join(passage["text"] for record in json.loads(args.data.read_text()) for passage in record["ctxs"][:1])
    ask_all(good, pieces(bad.tokenizer(text[:60_000])["input_ids"]), "text", "auto 0.5", requests=args.requests)


def pieces(tokens: list[int]) -> list[list[int]]:
    """The first passages of a text."""
    return [tokens[i * _LENGTH : (i + 1) * _LENGTH] for i in range(_PASSAGES)]


def ask_all(engine: KVBoost, passages: list[list[int]], kind: str, repair: str, *, requests: int) -> None:
    """Ask until the requests are over or moving is off."""
    head = engine.encode(_HEAD)
    for passage in passages:
        engine.warm([*head, *passage], boundaries=[len(head), len(head) + len(passage)])
    rng = random.Random(2)
    asked = 0
    for number in tqdm(range(requests), desc=kind, mininterval=10):
        if not engine.cache_stats()["non_prefix_reuse"]["allowed"]:
            break
        asked += 1
        # Something new in front each time: what stood behind the same text before is computed, not moved.
        new = engine.encode(f"Request {number}, {rng.random()}.\n")
        parts = [head, new, *rng.sample(passages, 3), engine.encode("Question: what is said here?\nAnswer:")]
        ends = [sum(map(len, parts[: i + 1])) for i in range(len(parts) - 1)]
        tokens = [token for part in parts for token in part]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that moving is off is what the table says
            engine.generate(tokens, boundaries=ends, max_new_tokens=8, temperature=0)
            assert engine.parts.shadow is not None
            engine.parts.shadow.wait()
    stats = engine.cache_stats()["non_prefix_reuse"]
    share = engine.config.quality
    print(
        f"| {kind} | {repair} | {share} | {asked} | {stats['checked']} | {stats['differing']} "
        f"| {stats['differing_at_most']:.3f} | {'yes' if stats['allowed'] else 'no'} |",
        flush=True,
    )
    engine.close()


if __name__ == "__main__":
    main()
