"""Clients that go away at any moment: what they held comes back, and the others notice nothing.

Many clients at once, against a real server in a process of its own. Each asks for a stream or a whole answer and
leaves at a random moment: while it still sends, while its prompt is read, between two tokens, or never. Passes if
every answer that was waited for is the one given to a single client, and leases, running jobs and their KV are back
at zero within one second after the last client has gone.

usage: python proofs/http_disconnects.py [--clients 64] [--disconnects 2000]
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import httpx

from kvboost.bench.report import describe_machine

_SERVER = """
import sys, threading, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from kvboost import KVBoost
from kvboost.engine.batching import BatchRunner
from kvboost.serve import Limits, serve
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

engine = KVBoost(tiny_model("llama", vocab_size=260, max_position_embeddings=2048), byte_tokenizer(), chunk_size=32,
                 quality="exact")

def tell():  # the server's own leases and threads, which HTTP does not show
    for line in sys.stdin:
        print(sum(view._store.stats().leased for view in engine.views()), threading.active_count(), flush=True)

threading.Thread(target=tell, daemon=True).start()
with BatchRunner(engine, deterministic=True) as runner:
    serve(engine, runner, model_name="tiny", port=0, limits=Limits(new_tokens=64),
          ready=lambda host, port: print(port, flush=True))
"""
_PROMPTS = [
    f"Prompt {number}: " + "something that several clients ask for at once. " * (2 + number) for number in range(8)
]


def request(prompt: str, *, stream: bool) -> bytes:
    body = json.dumps(
        {"model": "tiny", "prompt": prompt, "max_tokens": 32, "temperature": 0, "stream": stream}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def leave(port: int, rng: random.Random) -> str:
    """Ask and go away. Returns the phase."""
    sent = request(rng.choice(_PROMPTS), stream=rng.random() < 0.7)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        if rng.random() < 0.15:
            connection.sendall(sent[: rng.randrange(len(sent))])
            return "while sending"
        connection.sendall(sent)
        if rng.random() < 0.4:
            time.sleep(rng.random() * 0.05)
            return "before the answer"
        connection.settimeout(60)
        for _ in range(rng.randint(1, 6)):
            if not connection.recv(400):
                return "after the answer"
        return "within the answer"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--disconnects", type=int, default=2000)
    args = parser.parse_args()
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    phases: Counter[str] = Counter()
    wrong, survivors = 0, 0
    lock = threading.Lock()
    try:
        port = int(process.stdout.readline())
        url = f"http://127.0.0.1:{port}"

        def ask(prompt: str) -> str:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 32, "temperature": 0}
            while (answer := httpx.post(url + "/v1/completions", json=body, timeout=120)).status_code == 429:
                time.sleep(0.1)
            return str(answer.json()["choices"][0]["text"])

        def told() -> tuple[int, int]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("?\n")
            process.stdin.flush()
            leases, threads = process.stdout.readline().split()
            return int(leases), int(threads)

        alone = {prompt: ask(prompt) for prompt in _PROMPTS}
        before = told()
        left = args.disconnects

        def client(number: int) -> None:
            nonlocal left, wrong, survivors
            rng = random.Random(number)
            while True:
                with lock:
                    if left <= 0:
                        return
                    left -= 1
                phase = leave(port, rng)
                with lock:
                    phases[phase] += 1
                if rng.random() < 0.1:
                    prompt = rng.choice(_PROMPTS)
                    same = ask(prompt) == alone[prompt]
                    with lock:
                        survivors += 1
                        wrong += not same

        began = time.monotonic()
        threads = [threading.Thread(target=client, args=(number,)) for number in range(args.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = time.monotonic() - began
        gone = time.monotonic()
        while True:
            load = httpx.get(url + "/v1/cache").json()
            after = told()
            idle = load["load"] == {"running": 0, "waiting": 0, "kv_bytes": 0} and load["streams"] == 0
            seconds = time.monotonic() - gone
            if (idle and after[0] == 0) or seconds > 30:
                break
            time.sleep(0.02)
        time.sleep(0.5)
        after = told()
    finally:
        process.terminate()
        code = process.wait(timeout=60)
    print(describe_machine(dtype="float32", model="tiny-llama").line)
    print(f"{args.clients} clients, {sum(phases.values()):,} disconnects in {taken:.0f} s: {dict(phases)}")
    print(f"answers waited for: {survivors}, other than alone: {wrong}")
    print(f"leases, jobs and KV back at zero {seconds:.2f} s after the last client; leases {after[0]}")
    print(f"threads before {before[1]}, after {after[1]}; exit code {code}")
    good = wrong == 0 and seconds < 1.0 and after[0] == 0 and code == 0 and survivors > 0
    print("passed" if good else "NOT passed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
