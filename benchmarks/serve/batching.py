"""Jobs that share a system prompt, all there at once: side by side against one after another. No network.

The end of what is shared is a boundary, as the ends of a chat's messages are. Each way starts with an empty cache.
Times to the first token count from the moment all jobs were there. CPU time is what others on the machine hardly
change; run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

from benchmarks.common.measure import TextSource, add_model_arguments, load_engine, positive
from benchmarks.common.report import Report
from benchmarks.internals import BatchRunner, Job, NewToken
from kvboost.engine import KVBoost

QUICK = {"jobs": 4, "shared": 200, "new": 4, "rounds": 1}


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.add_argument("--jobs", type=positive, default=16, help="default: 16")
    parser.add_argument("--shared", type=positive, default=1000, help="tokens of the system prompt (default 1000)")
    parser.add_argument("--own", type=positive, default=30, help="tokens of each job's own (default 30)")
    parser.add_argument("--new", type=positive, default=32, help="tokens to decode (default 32)")
    parser.add_argument("--rounds", type=positive, default=2, help="default: 2")


def run(args: argparse.Namespace) -> Report:
    """All ways, in turns: a busy machine is busy for all."""
    with load_engine(args, dtype=args.dtype) as loaded:
        model, tokenizer = loaded.model, loaded.tokenizer
    source = TextSource(tokenizer, args.text)
    ways: dict[str, Callable[..., tuple[list[float], float]]] = {
        "one after another (engine.generate)": one_after_another,
        "side by side": partial(side_by_side, deterministic=False),
        "side by side, deterministic": partial(side_by_side, deterministic=True),
    }
    taken: dict[str, list[tuple[list[float], float]]] = {way: [] for way in ways}
    worked = dict.fromkeys(ways, 0.0)
    for number in range(args.rounds):
        shared = source.window(number * args.shared, args.shared)
        rest = args.rounds * args.shared + number * args.jobs * args.own
        prompts = [[*shared, *source.window(rest + job * args.own, args.own)] for job in range(args.jobs)]
        for way, answer in ways.items():
            with KVBoost(model, tokenizer, quality="exact") as engine:
                begin = time.process_time()
                taken[way].append(answer(engine, prompts, len(shared), args.new))
                worked[way] += (time.process_time() - begin) / len(prompts) / args.rounds
    report = Report("batching", raw=taken)
    columns = ["way", "requests/s", "CPU s/request", "TTFT p50, s", "TTFT p95, s"]
    table = report.table(f"{args.jobs} jobs behind one system prompt", columns, dtype=args.dtype, model=args.model)
    for way, runs in taken.items():
        rate = args.jobs * len(runs) / sum(total for _, total in runs)
        cuts = statistics.quantiles([ttft for first, _ in runs for ttft in first], n=20)
        table.add(way, *(f"{figure:.2f}" for figure in (rate, worked[way], cuts[9], cuts[18])))
    return report
