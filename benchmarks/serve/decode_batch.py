"""What one decode step of several sequences takes, and what Transformers' own batching does to their bits.

Single decodes one after another, a joint step over each sequence's own cache (ours), the same with a shared beginning
attended to once, one padded dense batch, and Transformers' continuous batching. Medians of a few steps, in CPU time, so
that others on the machine count less; run it with OMP_NUM_THREADS=1.

usage: python proofs/decode_batch.py --model FOLDER [--rows 1000] [--steps 12]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import model_runner as their_runner

from kvboost.bench.report import describe_machine
from kvboost.hf.cache import SlabCache
from kvboost.hf.probe import probe_model
from kvboost.hf.ragged import RaggedRunner, SharedStart
from kvboost.hf.runner import ModelRunner

_BATCHES = (1, 4, 16)


def median_ms(step: Callable[[], Any], *, steps: int) -> float:
    step()
    samples = []
    for _ in range(steps):
        begin = time.process_time()
        step()
        samples.append((time.process_time() - begin) * 1000.0)
    return statistics.median(samples)


def ours(model: Any, prompt: list[int], *, batch: int, steps: int) -> dict[str, float]:
    runner, layout = ModelRunner(model), probe_model(model).layout
    ragged = RaggedRunner(runner)
    rows, shared = len(prompt), len(prompt) - 32
    first = SlabCache(layout, capacity=rows + steps + 2)
    runner.append(prompt, first, logits=False)
    caches = [first]
    for _ in range(batch - 1):
        cache = SlabCache(layout, capacity=rows + steps + 2)
        cache.place(0, first.rows(0, rows))
        cache.set_length(rows)
        caches.append(cache)
    together = [SharedStart(tuple(range(batch)), shared)] if batch > 1 else []

    def back() -> None:
        for cache in caches:
            cache.set_length(rows)

    def timed(step: Callable[[], Any]) -> float:
        back()
        return median_ms(step, steps=steps)

    taken = {
        "one after another": timed(lambda: [runner.append([7], cache, logits=True) for cache in caches]),
        "joint, own rows": timed(lambda: ragged.decode([7] * batch, caches)),
        "joint, shared beginning": timed(lambda: ragged.decode([7] * batch, caches, shared=together)),
    }
    dense = SlabCache(layout, capacity=rows + steps + 2, batch=batch)
    for row in range(batch):
        dense.place(0, first.rows(0, rows), row=row)
    dense.set_length(rows)
    ids = torch.full((batch, 1), 7)

    def padded() -> None:
        mask = torch.ones(batch, dense.get_seq_length() + 1, dtype=torch.long)
        mask[: batch // 2, :3] = 0  # half of them are shorter
        runner.run_batch(ids, dense, attention_mask=mask)

    with torch.no_grad():
        taken["padded dense batch"] = median_ms(padded, steps=steps)
    return taken


def theirs(model: Any, prompts: list[list[int]], *, steps: int, look: Callable[[Any], Any] | None = None) -> Any:
    """Median ms of their pure decode steps, or what ``look`` sees of their manager when the first prompt is read."""
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
                raise SystemExit("Transformers' manager gave nothing for ten minutes")
            if output.error:
                raise SystemExit(output.error)
            if look is not None and seen is None and output.request_id == "r0":
                seen = look(manager)
            ended += output.is_finished()
        manager.stop(block=True)
    finally:
        their_runner.ModelRunner.compute_batch = compute
    return seen if look is not None else statistics.median(taken[1:] or [float("nan")])


def kv_of_first(manager: Any, rows: int) -> torch.Tensor:
    """Layer 1's keys of request r0, copied out of its pages."""
    allocator = manager.batch_processor.cache.layer_to_allocator[1]
    read: list[list[int]] = [[] for _ in manager.batch_processor.cache.cache_allocators]
    write: list[list[int]] = [[] for _ in read]
    manager.batch_processor.cache.extend_read_and_write_indices("r0", rows - 1, 1, read, write)
    keys, _ = allocator._kv_token_views[1]
    return keys[torch.tensor(read[allocator.index])].clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only-ours", action="store_true", help="leave Transformers' batching out")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    vocab = model.config.vocab_size
    prompt = [(i * 7919 + i * i) % min(vocab, 30_000) for i in range(arguments.rows)]
    print(describe_machine(dtype="float32", model=arguments.model))
    print(f"\nCPU ms per decode step behind {arguments.rows} rows, median of {arguments.steps}\n")
    table = {batch: ours(model, prompt, batch=batch, steps=arguments.steps) for batch in _BATCHES}
    for batch in () if arguments.only_ours else _BATCHES:
        prompts = [[*prompt[:-1], 11 + i] for i in range(batch)]
        table[batch]["Transformers' continuous batching"] = theirs(model, prompts, steps=arguments.steps)
    print("| way | " + " | ".join(f"batch {b}" for b in _BATCHES) + " |\n|---|" + "---:|" * len(_BATCHES))
    for way in table[1]:
        print(f"| {way} | " + " | ".join(f"{table[b][way]:.0f}" for b in _BATCHES) + " |")

    if arguments.only_ours:
        return

    def look(manager: Any) -> torch.Tensor:
        return kv_of_first(manager, arguments.rows)

    alone = theirs(model, [prompt], steps=2, look=look)
    among = theirs(model, [prompt, prompt[: arguments.rows // 2]], steps=2, look=look)
    apart = int((alone != among).sum())
    print(f"\nTransformers' batching: layer 1's keys of a prompt read alone and beside another: {apart:,} of")
    print(f"{alone.numel():,} numbers differ, by at most {float((alone - among).abs().max()):.1e}")


if __name__ == "__main__":
    main()
