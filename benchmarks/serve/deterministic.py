"""`kvboost serve --deterministic`: the same request gives the same bytes alone and among fifteen others.

A real server in a process of its own. A few requests (greedy and sampled with a seed, with log-probabilities, whole
and streamed) are first asked alone, then again and again while fifteen other clients ask for other things; every
answer must be the same to the last digit of its log-probabilities. Among the others are requests that begin alike,
so the cache is warm, cold or being filled as it happens.

usage: PYTHONPATH=. python proofs/deterministic.py [--model FOLDER] [--times 200] [--others 15] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from kvboost.bench.report import describe_machine
from tests.helpers.serving import kvboost_serve, tiny_folder

_BEGINNING = "A long beginning that many clients share, so that its KV is read once and used by all of them. "


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
        raise SystemExit(f"{reply.status_code}: {reply.text[:500]}")
    if not body.get("stream"):
        return json.dumps(reply.json()["choices"])
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    return json.dumps([json.loads(line)["choices"] for line in lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a trained model instead of a tiny one")
    parser.add_argument("--times", type=int, default=200, help="of each request")
    parser.add_argument("--others", type=int, default=15)
    parser.add_argument("--default-mode", action="store_true", help="without --deterministic, to see that it shows")
    parser.add_argument("--quick", action="store_true", help="20 times")
    args = parser.parse_args()
    times = 20 if args.quick else args.times
    differing: Counter[int] = Counter()
    company: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or tiny_folder(Path(scratch))
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
                for _ in range(times):
                    for index, body in enumerate(asked()):
                        differing[index] += answer(client, body) != alone[index]
                    company.append(server.cache()["load"]["running"])
            finally:
                over.set()
                for thread in clients:
                    thread.join()
            taken = time.monotonic() - began
    name = args.model.resolve().name if args.model else "tiny-llama"
    print(describe_machine(dtype="auto" if args.model else "float32", model=name).line)
    mode = "default mode" if args.default_mode else "deterministic"
    print(f"{mode}: {len(alone)} requests, each {times} times among {args.others} others, {taken:.0f} s")
    print(f"others running beside them, median: {sorted(company)[len(company) // 2]}")
    print(f"answers other than alone: {dict(differing)}")
    good = not any(differing.values()) and all(len(text) > 50 for text in alone)
    print("passed" if good else "NOT passed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
