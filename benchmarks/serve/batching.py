"""Jobs that share a system prompt, all there at once: side by side against one after another. No network.

The end of what is shared is a boundary, as the ends of a chat's messages are. Each way starts with an empty cache.
Times to the first token count from the moment all jobs were there. CPU time is what others on the machine hardly
change; run it with OMP_NUM_THREADS=1.

usage: python proofs/batch_load.py --model FOLDER [--jobs 16] [--shared 1000] [--own 30] [--new 32] [--rounds 2]
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from kvboost import KVBoost
from kvboost.bench.report import describe_machine
from kvboost.hf.loading import load_model
from kvboost.scheduler.jobs import Job, NewToken
from kvboost.scheduler.runner import BatchRunner


def one_after_another(engine: KVBoost, prompts: list[list[int]], shared: int, new: int) -> tuple[list[float], float]:
    """Seconds to each first token, and in all."""
    begin, first = time.perf_counter(), []
    for prompt in prompts:
        waited = time.perf_counter() - begin
        settings = {"temperature": 0, "eos_token_id": None, "pad_token_id": 0}
        result = engine.generate(prompt, boundaries=(shared,), max_new_tokens=new, **settings)
        first.append(waited + result.ttft_ms / 1000.0)
    return first, time.perf_counter() - begin


def side_by_side(
    engine: KVBoost, prompts: list[list[int]], shared: int, new: int, *, deterministic: bool
) -> tuple[list[float], float]:
    """The same through a runner, with a thread per job as a server has it."""
    first = [0.0] * len(prompts)
    with BatchRunner(engine, deterministic=deterministic) as runner:
        begin = time.perf_counter()

        def client(index: int) -> None:
            job = Job(token_ids=tuple(prompts[index]), boundaries=(shared,), max_new_tokens=new)
            ticket = runner.submit(job)
            for event in ticket.events():
                if isinstance(event, NewToken):
                    first[index] = first[index] or time.perf_counter() - begin

        clients = [threading.Thread(target=client, args=(index,)) for index in range(len(prompts))]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        return first, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--shared", type=int, default=1000)
    parser.add_argument("--own", type=int, default=30)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model, dtype=torch.float32, device="cpu", model_kwargs={})
    chance = torch.Generator().manual_seed(0)

    def text(count: int) -> list[int]:
        return torch.randint(100, 30_000, (count,), generator=chance).tolist()

    ways: dict[str, Callable[..., Any]] = {
        "one after another (engine.generate)": one_after_another,
        "side by side": lambda *a: side_by_side(*a, deterministic=False),
        "side by side, deterministic": lambda *a: side_by_side(*a, deterministic=True),
    }
    print(describe_machine(dtype="float32", model=arguments.model))
    print("\n| way | requests/s | CPU s/request | TTFT p50, s | TTFT p95, s |\n|---|---:|---:|---:|---:|")
    taken: dict[str, list[tuple[list[float], float]]] = {way: [] for way in ways}
    worked = dict.fromkeys(ways, 0.0)
    for _ in range(arguments.rounds):  # taking turns: a busy machine is busy for all
        shared = text(arguments.shared)
        prompts = [[*shared, *text(arguments.own)] for _ in range(arguments.jobs)]
        for way, run in ways.items():
            with KVBoost(model, tokenizer, quality="exact") as engine:
                begin = time.process_time()
                taken[way].append(run(engine, prompts, len(shared), arguments.new))
                worked[way] += (time.process_time() - begin) / len(prompts) / arguments.rounds
    for way, runs in taken.items():
        rate = arguments.jobs * len(runs) / sum(total for _, total in runs)
        cuts = statistics.quantiles([ttft for first, _ in runs for ttft in first], n=20)
        print(f"| {way} | {rate:.2f} | {worked[way]:.2f} | {cuts[9]:.2f} | {cuts[18]:.2f} |")


if __name__ == "__main__":
    main()
