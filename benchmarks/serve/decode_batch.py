"""What one decode step of several sequences takes, and what Transformers' own batching does to their bits.

Single decodes one after another, a joint step over the rows of a batch (ours), the same with a shared beginning
attended to once, one padded dense batch, and Transformers' continuous batching. Medians of a few steps, in CPU time, so
that others on the machine count less; run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import model_runner as their_runner

from benchmarks.common.measure import add_model_arguments, load_engine, positive
from benchmarks.common.report import BenchError, Report
from benchmarks.internals import ModelRunner, RaggedRunner, RowBatch, SharedPrefix, SlabCache, probe_model

QUICK = {"context": 100, "steps": 2}

_BATCHES = (1, 4, 16)


def median_ms(step: Callable[[], Any], *, steps: int) -> float:
    step()
    samples = []
    for _ in range(steps):
        begin = time.process_time()
        step()
        samples.append((time.process_time() - begin) * 1000.0)
    return statistics.median(samples)


@torch.no_grad()
def ours(model: Any, prompt: list[int], *, batch: int, steps: int) -> dict[str, float]:
    runner, layout = ModelRunner(model), probe_model(model).layout
    ragged = RaggedRunner(runner)
    length, shared = len(prompt), len(prompt) - 32
    first = SlabCache(layout, capacity=length + steps + 2)
    runner.append(prompt, first, logits=False)
    caches, rows, joint = [first], [], RowBatch(layout)
    for number in range(batch):
        if number:
            caches.append(SlabCache(layout, capacity=length + steps + 2))
            caches[-1].place(0, first.span(0, length))
        rows.append(joint.add(tokens=length + steps + 2))
        rows[-1].place(0, first.span(0, length))
    together = [SharedPrefix(tuple(range(batch)), shared)] if batch > 1 else []

    def back() -> None:
        for cache in (*caches, *rows):
            cache.set_length(length)

    def timed(step: Callable[[], Any]) -> float:
        back()
        return median_ms(step, steps=steps)

    taken = {
        "one after another": timed(lambda: [runner.append([7], cache, logits=True) for cache in caches]),
        "joint, own KV": timed(lambda: ragged.decode([7] * batch, joint)),
        "joint, shared beginning": timed(lambda: ragged.decode([7] * batch, joint, shared=together)),
    }
    dense = SlabCache(layout, capacity=length + steps + 2, batch=batch)
    for row in range(batch):
        dense.place(0, first.span(0, length), row=row)
    dense.set_length(length)
    ids = torch.full((batch, 1), 7)

    def padded() -> None:
        mask = torch.ones(batch, dense.get_seq_length() + 1, dtype=torch.long)
        mask[: batch // 2, :3] = 0  # half of them are shorter
        runner.run_batch(ids, dense, attention_mask=mask)

    taken["padded dense batch"] = median_ms(padded, steps=steps)
    return taken


def theirs(model: Any, prompts: list[list[int]], *, steps: int, look: Callable[[Any], Any] | None = None) -> Any:
    """Median ms of their pure decode steps, or what ``look`` sees of their manager after the first prompt's prefill."""
    taken: list[float] = []
    compute = their_runner.ModelRunner.compute_batch

    def timed(self: Any, model: Any, batch_data: Any) -> Any:
        begin = time.process_time()
        result = compute(self, model, batch_data)
        if batch_data["input_ids"].shape[1] == len(prompts):
            taken.append((time.process_time() - begin) * 1000.0)
        return result

    their_runner.ModelRunner.compute_batch = timed
    try:
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                max_new_tokens=steps + 2 + len(prompts), do_sample=False, eos_token_id=-1
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=len(prompts) * 8, page_size=256, max_batch_tokens=2048, allow_block_sharing=False
            ),
        )
        names = [f"r{i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            manager.add_request(prompt, request_id=name, max_new_tokens=steps + 2 + len(prompts), streaming=True)
        manager.start()
        ended, seen = 0, None
        while ended < len(prompts):
            output = manager.get_result(timeout=600)
            if output is None:
                raise BenchError("Transformers' manager gave nothing for ten minutes")
            if output.error:
                raise BenchError(output.error)
            if look is not None and seen is None and output.request_id == "r0":
                seen = look(manager)
            ended += output.is_finished()
        manager.stop(block=True)
    finally:
        their_runner.ModelRunner.compute_batch = compute
    return seen if look is not None else statistics.median(taken[1:] or [float("nan")])


def kv_of_first(manager: Any, length: int) -> torch.Tensor:
    """Layer 1's keys of request r0, copied out of its pages."""
    allocator = manager.batch_processor.cache.layer_to_allocator[1]
    read: list[list[int]] = [[] for _ in manager.batch_processor.cache.cache_allocators]
    write: list[list[int]] = [[] for _ in read]
    manager.batch_processor.cache.extend_read_and_write_indices("r0", length - 1, 1, read, write)
    keys, _ = allocator._kv_token_views[1]
    return keys[torch.tensor(read[allocator.index])].clone()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.add_argument("--context", type=positive, default=1000, help="tokens before the decoded ones (default 1000)")
    parser.add_argument("--steps", type=positive, default=12, help="default: 12")
    parser.add_argument("--only-ours", action="store_true", help="leave Transformers' batching out")


def run(args: argparse.Namespace) -> Report:
    """Every way at every batch size, then the bits of Transformers' batching."""
    report = Report("decode_batch")
    with load_engine(args, dtype=args.dtype) as engine:
        model = engine.model
    prompt = [(i * 7919 + i * i) % min(model.config.vocab_size, 30_000) for i in range(args.context)]
    figures = {batch: ours(model, prompt, batch=batch, steps=args.steps) for batch in _BATCHES}
    for batch in () if args.only_ours else _BATCHES:
        prompts = [[*prompt[:-1], 11 + i] for i in range(batch)]
        figures[batch]["Transformers' continuous batching"] = theirs(model, prompts, steps=args.steps)
    report.raw = {str(batch): found for batch, found in figures.items()}
    table = report.table(
        f"CPU ms per decode step behind {args.context} tokens, median of {args.steps}",
        ["way", *(f"batch {batch}" for batch in _BATCHES)],
        dtype=args.dtype,
        model=args.model,
    )
    for way in figures[1]:
        table.add(way, *(f"{figures[batch][way]:.0f}" for batch in _BATCHES))
    if not args.only_ours:
        alone, among = (
            theirs(model, prompts, steps=2, look=lambda manager: kv_of_first(manager, args.context))
            for prompts in ([prompt], [prompt, prompt[: args.context // 2]])
        )
        table.notes.append(
            "Transformers' batching: layer 1's keys of a prompt computed alone and beside another: "
            f"{int((alone != among).sum()):,} of {alone.numel():,} numbers differ, by at most "
            f"{float((alone - among).abs().max()):.1e}."
        )
    return report
