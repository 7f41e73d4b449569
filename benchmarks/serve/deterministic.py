"""`kvboost serve --deterministic`: a request gives the same bytes alone and among fifteen others.

A real server in a process of its own. A few requests (greedy and sampled with a seed, with log-probabilities, whole
and streamed) are first asked alone, then again and again while fifteen other clients ask for other things; every
answer must be the same to the last digit of its log-probabilities. Among the others are requests that begin alike,
so the cache is warm, cold or being filled as it happens.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.measure import positive
from benchmarks.common.report import BenchError, Report
from tests.helpers.serving import kvboost_serve, tiny_folder

QUICK = {"times": 5, "others": 4}
_BEGINNING = "A long beginning that many clients share, so that its KV is computed once and used by all of them. "


def asked() -> list[dict[str, Any]]:
    """The requests whose answers must not change."""
    common: dict[str, Any] = {"model": "model", "max_tokens": 24, "logprobs": True, "top_logprobs": 2}
    first = [{"role": "system", "content": _BEGINNING * 3}, {"role": "user", "content": "Which way is north?"}]
    second = [{"role": "user", "content": "Name a colour, and another one."}]
    return [
        {**common, "messages": first, "temperature": 0},
        {**common, "messages": second, "temperature": 0.9, "seed": 11},
        {**common, "messages": first, "temperature": 1.3, "top_p": 0.8, "seed": 5, "stream": True},
    ]


def other(rng: random.Random) -> dict[str, Any]:
    """What somebody else asks for meanwhile."""
    words = " ".join(rng.choice(("red", "blue", "north", "south", "one", "two")) for _ in range(rng.randint(1, 40)))
    system = [{"role": "system", "content": _BEGINNING * rng.randint(1, 4)}] if rng.random() < 0.6 else []
    messages = [*system, {"role": "user", "content": words}]
    return {"model": "model", "messages": messages, "max_tokens": rng.randint(1, 32), "temperature": rng.random()}


def answer(client: httpx.Client, body: dict[str, Any]) -> str:
    """All of an answer that may not change: its choices, without times and names."""
    reply = client.post("/v1/chat/completions", json=body)
    if reply.status_code != 200:
        raise BenchError(f"{reply.status_code}: {reply.text[:500]}")
    if not body.get("stream"):
        return json.dumps(reply.json()["choices"])
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    return json.dumps([json.loads(line)["choices"] for line in lines])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--trained", type=Path, metavar="FOLDER", help="a trained model instead of a tiny one")
    parser.add_argument("--times", type=positive, default=200, help="of each request (default 200)")
    parser.add_argument("--others", type=positive, default=15, help="clients beside them (default 15)")
    parser.add_argument("--default-mode", action="store_true", help="without --deterministic, to see that it shows")


def run(args: argparse.Namespace) -> Report:
    """Ask alone, then among others."""
    differing: Counter[int] = Counter()
    running: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.trained or tiny_folder(Path(scratch) / "tiny-llama")
        options = [] if args.default_mode else ["--deterministic"]
        options += ["--cache-bytes", "64MiB", "--max-running", str(args.others + 1)]
        with kvboost_serve(folder, options) as server, httpx.Client(base_url=server.url, timeout=600) as client:
            alone = [answer(client, body) for body in asked()]
            over = threading.Event()

            def keep_asking(number: int) -> None:
                rng = random.Random(number)
                with httpx.Client(base_url=server.url, timeout=600) as own:
                    while not over.is_set():
                        own.post("/v1/chat/completions", json=other(rng))

            clients = [threading.Thread(target=keep_asking, args=(number,)) for number in range(args.others)]
            for thread in clients:
                thread.start()
            began = time.monotonic()
            try:
                for _ in range(args.times):
                    for index, body in enumerate(asked()):
                        differing[index] += answer(client, body) != alone[index]
                    running.append(server.cache()["load"]["running"])
            finally:
                over.set()
                for thread in clients:
                    thread.join()
            taken = time.monotonic() - began
    report = Report("deterministic", failed=any(differing.values()) or any(len(text) <= 50 for text in alone))
    mode = "default mode" if args.default_mode else "deterministic"
    table = report.table(
        f"{mode}: each request {args.times} times among {args.others} others",
        ["request", "answers other than alone"],
        dtype="auto" if args.trained else "float32",
        model=folder,
    )
    for index, body in enumerate(asked()):
        seed, stream = body.get("seed", "none"), ", streamed" if body.get("stream") else ""
        table.add(f"temperature {body['temperature']}, seed {seed}{stream}", differing[index])
    table.notes.append(f"{taken:.0f} s; requests running beside them, median: {sorted(running)[len(running) // 2]}.")
    return report
