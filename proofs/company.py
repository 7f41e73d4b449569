"""How far company carries: how much of it, how related, how many variants, and what each costs in bytes.

    python proofs/company.py --model FOLDER [--prompts 16]

Every passage of a prompt was read before, behind the head and so many others: strangers (passages of other
questions) or others of its own prompt. Then the prompt is put together, once without repair and once with 15 % of
the rows, and held against a full reading. What kept the passage company is kept as well, and counted. Variants: the
passages were read in so many prompts of the same passages, each in another order, and the engine takes of every
passage the variant whose own context fits best.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from kvboost import KVBoost
from kvboost.bench import rag
from kvboost.bench.measure import FreezableStore
from kvboost.bench.rag import RagPrompt, _ends, _warm
from kvboost.bench.repair import FullReading, compare, interval
from kvboost.bench.report import describe_machine

History = Callable[[KVBoost, RagPrompt], None]


def behind(count: int, *, related: bool, pool: Sequence[RagPrompt]) -> History:
    """Each passage behind the head and ``count`` others, drawn for each passage."""

    def read(engine: KVBoost, prompt: RagPrompt) -> None:
        rng = random.Random(prompt.question)
        strangers = [passage for other in pool if other.question != prompt.question for passage in other.passages]
        for passage in prompt.passages:
            own = [other for other in prompt.passages if other != passage]
            company = rng.sample(own if related else strangers, count)
            # The line break keeps the first passage from being an exact hit where there is no company.
            _warm(engine, [prompt.head, *(company or [prompt.line_break])], passage)

    return read


def variants(count: int) -> History:
    """Whole prompts of the same passages in ``count`` other orders."""

    def read(engine: KVBoost, prompt: RagPrompt) -> None:
        rng = random.Random(prompt.question)
        for _ in range(count):
            order = list(prompt.passages)
            while order[0] == prompt.passages[0]:
                rng.shuffle(order)
            tokens = [*prompt.head, *(token for passage in order for token in passage)]
            engine.warm(tokens, boundaries=_ends(prompt.head, *order))

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    rag.add_arguments(parser)
    args = parser.parse_args()
    store = FreezableStore(12 * 2**30)
    plain = KVBoost.from_pretrained(str(args.model), dtype="float32", quality="exact", store=store)
    prompts = rag.load_prompts(plain.tokenizer, args.data, count=args.prompts, passages=args.passages)
    repairs = {
        strategy: KVBoost(
            plain.model,
            plain.tokenizer,
            store=store,
            recompute_strategy=strategy,
            recompute_ratio=0.15,
            force_approx=True,
        )
        for strategy in ("none", "auto")
    }
    histories: dict[str, History] = {"head only": behind(0, related=False, pool=prompts)}
    for count in (1, 2, 4):
        histories[f"head + {count} unrelated"] = behind(count, related=False, pool=prompts)
    for count in (1, 2, 4):
        histories[f"head + {count} of the same prompt"] = behind(count, related=True, pool=prompts)
    for count in (1, 2, 4):
        histories[f"{count} whole prompts in other orders"] = variants(count)
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {s: [] for s in repairs} for name in histories}
    kept: dict[str, list[float]] = {name: [] for name in histories}
    for number, prompt in enumerate(prompts):
        full = FullReading(plain, prompt, tokens=32)
        for name, read_before in histories.items():
            store.frozen = False
            plain.clear()
            plain.warm(list(prompt.head), boundaries=[len(prompt.head)])
            read_before(plain, prompt)
            store.frozen = True
            assert plain.parts is not None
            rows = store.stats().bytes / plain.parts.assembly.facts.layout.bytes_per_token - len(prompt.head)
            kept[name].append(rows / prompt.passage_tokens)
            for strategy, engine in repairs.items():
                found[name][strategy].append(compare(engine, prompt, full, f1=False))
        print(f"{number + 1} of {len(prompts)} prompts", flush=True)
    print(f"\n{describe_machine(dtype='float32', model=str(args.model)).line}\n")
    print("| each passage was read | KV kept, times its own | none: KL | top-1, % | auto 15 %: KL | top-1, % |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, by_strategy in found.items():
        cells = []
        for samples in by_strategy.values():
            for value, factor, digits in (("kl", 1, 4), ("top1", 100, 1)):
                mean, low, high = (factor * x for x in interval([s[value] for s in samples], seed=1))
                cells.append(f"{mean:.{digits}f} [{low:.{digits}f} {high:.{digits}f}]")
        print(f"| {name} | {sum(kept[name]) / len(kept[name]):.1f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
