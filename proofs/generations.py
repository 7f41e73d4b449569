"""Do errors pile up when text read behind moved chunks is kept and moved itself?

Every passage is first read in company (generation 0). For each further generation every passage is read anew
behind two others of the generation before, which were moved, and only that reading is kept. Then the whole
prompt is put together from passages of one generation and held against a full reading.

    python proofs/generations.py --model FOLDER --prompts 33 --generations 3
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from kvboost import KVBoost
from kvboost.bench import rag
from kvboost.bench.repair import FullReading, compare, interval
from kvboost.bench.report import describe_machine
from kvboost.store import MemoryStore
from kvboost.types import KVBlock, PutOutcome

_ROOM = 4 * 2**30


class Shelf(MemoryStore):
    """A store whose blocks can be taken out by what they contain, and refilled."""

    def everything(self) -> list[KVBlock]:
        """Everything stored."""
        return [entry.block for entry in self._entries.values()]

    def fill(self, blocks: list[KVBlock]) -> None:
        """Hold exactly these."""
        self.clear()
        for block in blocks:
            if self.put(block) is PutOutcome.REFUSED:
                raise RuntimeError("the store refused a block; give it more room")


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--generations", type=int, default=4)
    rag.add_arguments(parser)
    args = parser.parse_args()
    shelf = Shelf(_ROOM)
    settings = {"store": shelf, "force_approx": True}
    engines = {
        "none": KVBoost.from_pretrained(str(args.model), dtype="float32", recompute_strategy="none", **settings),
    }
    model, tokenizer = engines["none"].model, engines["none"].tokenizer
    engines["auto 0.15"] = KVBoost(model, tokenizer, recompute_ratio=0.15, **settings)
    prompts = rag.load_prompts(tokenizer, args.data, count=args.prompts, passages=args.passages)
    results: dict[tuple[int, str], list[dict[str, float]]] = {}
    for prompt in prompts:
        if _repeats_itself(engines["none"], prompt):
            continue  # a passage found in another one would not be read anew
        full = FullReading(engines["none"], prompt, tokens=32)
        rag.read_before(engines["none"], prompt, "company")
        head, passages = _sorted_out(shelf.everything(), engines["none"], prompt)
        for generation in range(args.generations + 1):
            if generation:
                passages = _next_generation(engines["auto 0.15"], shelf, prompt, head, passages)
            for name, engine in engines.items():
                shelf.fill([*head, *(block for blocks in passages for block in blocks)])
                sample = compare(engine, prompt, full, f1=False)
                results.setdefault((generation, name), []).append(sample)
        print(f"{len(results[0, 'none'])} of {len(prompts)} prompts", flush=True)
    if not results:
        raise SystemExit("in every prompt a passage repeats another one; give more --prompts")
    print(f"\n{describe_machine(dtype='float32', model=str(args.model)).line}\n")
    print("| generation | no repair: KL | top-1, % | auto, 15 % of rows: KL | top-1, % |\n|---|---|---|---|---|")
    for generation in range(args.generations + 1):
        cells = []
        for name in engines:
            for value, factor, digits in (("kl", 1.0, 4), ("top1", 100.0, 1)):
                mean, low, high = (factor * x for x in interval([s[value] for s in results[generation, name]], seed=1))
                cells.append(f"{mean:.{digits}f} [{low:.{digits}f} {high:.{digits}f}]")
        print(f"| {generation} | " + " | ".join(cells) + " |")


def _repeats_itself(engine: KVBoost, prompt: rag.RagPrompt) -> bool:
    """Whether two passages share a chunk."""
    assert engine.parts is not None
    chunks = [
        chunk.tokens
        for passage in prompt.passages
        for chunk in engine.session.prefiller.names.chunks_of_part(list(passage))
    ]
    return len(set(chunks)) < len(chunks)


def _sorted_out(
    blocks: list[KVBlock], engine: KVBoost, prompt: rag.RagPrompt
) -> tuple[list[KVBlock], list[list[KVBlock]]]:
    """The head's blocks, and each passage's; what else was read to keep them company is dropped."""
    by_tokens = {block.tokens: block for block in blocks}
    assert engine.parts is not None
    cut = engine.session.prefiller.names.chunks_of_part
    head = [by_tokens[chunk.tokens] for chunk in cut(list(prompt.head))]
    return head, [[_alone(by_tokens[chunk.tokens]) for chunk in cut(list(passage))] for passage in prompt.passages]


def _alone(block: KVBlock) -> KVBlock:
    """A block that needs no other block to be stored, and may be followed by as many generations as are asked for."""
    return replace(block, parent_key=None, bitwise=False, approx_depth=0)


def _next_generation(
    engine: KVBoost, shelf: Shelf, prompt: rag.RagPrompt, head: list[KVBlock], passages: list[list[KVBlock]]
) -> list[list[KVBlock]]:
    """Every passage read anew behind two others, which are moved."""
    made: list[list[KVBlock]] = []
    count = len(passages)
    for number, passage in enumerate(prompt.passages):
        others = [(number + 1) % count, (number + 2) % count]
        shelf.fill([*head, *(block for other in others for block in passages[other])])
        known = {block.key for block in shelf.everything()}
        parts = [prompt.head, *(prompt.passages[other] for other in others), passage, prompt.tail]
        tokens = [token for part in parts for token in part]
        ends = [sum(map(len, parts[: index + 1])) for index in range(len(parts) - 1)]
        reuse = engine.prefill(tokens, boundaries=ends).reuse
        assert reuse.moved_tokens == sum(len(prompt.passages[other]) for other in others), reuse
        wanted = {block.tokens for block in passages[number]}
        new = {block.tokens: block for block in shelf.everything() if block.key not in known and block.tokens in wanted}
        assert len(new) == len(wanted), "a passage was not kept"
        made.append([_alone(new[block.tokens]) for block in passages[number]])
    return made


if __name__ == "__main__":
    main()
