"""Whether errors pile up with depth: text computed behind non-prefix hits is stored and reused itself.

Every passage is first prefilled behind unrelated documents (depth 0). For each further depth every passage is computed
anew behind two others of the depth before, which were non-prefix hits, and only that KV is kept. Then the whole prompt
is put together from passages of one depth and compared with a full prefill.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.common import rag
from benchmarks.common.measure import add_engine_arguments, engine_beside, joined, load_engine, positive
from benchmarks.common.quality import Reference, compare, quality_cells
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.internals import passage_chunks, stored_blocks
from kvboost.engine import KVBoost
from kvboost.store import MemoryStore
from kvboost.types import KVBlock, PutOutcome

QUICK = {"prompts": 1, "passages": 3, "depth": 1}
_STORE_BYTES = 4 * 2**30
_NONE, _AUTO = "none", "auto 0.15"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_engine_arguments(parser)
    parser.add_argument("--depth", type=positive, default=3, help="how often reused text is reused again (default 3)")
    rag.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Every prompt at every depth."""
    store = MemoryStore(_STORE_BYTES)
    settings: dict[str, Any] = {"store": store, "force_approx": True, "quality": "high"}
    plain = load_engine(args, dtype="float32", **settings, recompute_strategy="none")
    auto = engine_beside(plain, recompute_ratio=0.15, **settings)
    engines = {_NONE: plain, _AUTO: auto}
    results: dict[tuple[int, str], list[dict[str, Any]]] = {}
    prompts = rag.load_prompts(plain.tokenizer, args.data, count=args.prompts, passages=args.passages)
    progress = Progress("prompts", len(prompts))
    for prompt in prompts:
        chunks = [chunk for passage in prompt.passages for chunk in passage_chunks(plain, passage)]
        if len(set(chunks)) < len(chunks):
            continue  # a passage found in another one would not be computed anew
        reference = Reference(plain, prompt, tokens=32)
        rag.prefill_before(plain, prompt, "unrelated")
        blocks = {block.tokens: block for block in stored_blocks(store)}
        head = [blocks[chunk] for chunk in passage_chunks(plain, prompt.head)]
        passages = [[_alone(blocks[chunk]) for chunk in passage_chunks(plain, p)] for p in prompt.passages]
        for depth in range(args.depth + 1):
            if depth:
                passages = _next_depth(auto, store, prompt, head, passages)
            for name, engine in engines.items():
                _fill(store, [*head, *(block for passage in passages for block in passage)])
                results.setdefault((depth, name), []).append(compare(engine, prompt, reference))
        progress.step()
    if not results:
        raise BenchError("in every prompt a passage repeats another one; give more --prompts")
    report = Report("approx_depth", raw={f"{depth} {name}": found for (depth, name), found in results.items()})
    columns = ["depth", "none: KL", "top-1, %", "auto, 15 % of the tokens: KL", "top-1, %"]
    table = report.table("Depth: errors of text that was computed behind reused text", columns, model=args.model)
    for depth in range(args.depth + 1):
        table.add(depth, *(cell for name in engines for cell in quality_cells(results[depth, name])))
    return report


def _fill(store: MemoryStore, blocks: list[KVBlock]) -> None:
    """Let the store hold exactly these."""
    store.clear()
    if any(store.put(block) is PutOutcome.REFUSED for block in blocks):
        raise BenchError("the store refused a block; give fewer or shorter --passages")


def _alone(block: KVBlock) -> KVBlock:
    """A block that needs no other block to be stored, and may be reused at any further depth."""
    return replace(block, parent_key=None, bitwise=False, approx_depth=0)


def _next_depth(
    engine: KVBoost, store: MemoryStore, prompt: rag.RagPrompt, head: list[KVBlock], passages: list[list[KVBlock]]
) -> list[list[KVBlock]]:
    """Every passage computed anew behind two others, which are non-prefix hits."""
    made: list[list[KVBlock]] = []
    count = len(passages)
    for number, passage in enumerate(prompt.passages):
        others = [(number + 1) % count, (number + 2) % count]
        _fill(store, [*head, *(block for other in others for block in passages[other])])
        known = {block.key for block in stored_blocks(store)}
        context = [prompt.passages[other] for other in others]
        tokens, ends = joined([prompt.head, *context, passage, prompt.tail])
        reuse = engine.prefill(tokens, boundaries=ends[:-1]).reuse
        assert reuse.moved_tokens == sum(map(len, context)), reuse
        wanted = {block.tokens for block in passages[number]}
        new = {b.tokens: b for b in stored_blocks(store) if b.key not in known and b.tokens in wanted}
        assert len(new) == len(wanted), "a passage was not stored"
        made.append([_alone(new[block.tokens]) for block in passages[number]])
    return made
