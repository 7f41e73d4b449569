"""Clients that go away at any moment: what they held comes back, and the others notice nothing.

Many clients at once, against `kvboost serve` in a process of its own. Each asks for a stream or a whole answer and
leaves at a random moment: while it still sends, while its prompt is read, between two tokens, or never. Passes if
every answer that was waited for is the one given to a single client, and leases, running jobs and their KV are back
at zero within one second after the last client has gone.

Beside others a request is computed in other shapes, whose sums round differently. The model is in float64, where that
is some 1e-15 of a logit: far less than what lies between two tokens here, so answers must be the same by default too.

usage: PYTHONPATH=. python proofs/http_disconnects.py [--deterministic] [--clients 64] [--disconnects 2000] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import torch

from kvboost.bench.report import describe_machine
from tests.helpers.serving import kvboost_serve, tiny_folder

_PROMPTS = [
    f"Prompt {number}: " + "something that several clients ask for at once. " * (2 + number) for number in range(8)
]


def request(prompt: str, *, stream: bool) -> bytes:
    body = json.dumps(
        {"model": "model", "prompt": prompt, "max_tokens": 32, "temperature": 0, "stream": stream}
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
    parser.add_argument("--deterministic", action="store_true", help="the server's mode; without it, the default")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--disconnects", type=int, default=2000)
    parser.add_argument("--log", type=Path, help="what the server says")
    parser.add_argument("--quick", action="store_true", help="300 disconnects")
    args = parser.parse_args()
    phases: Counter[str] = Counter()
    wrong, survivors = 0, 0
    lock = threading.Lock()
    options = ["--quality", "exact", *(["--deterministic"] if args.deterministic else [])]
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_folder(Path(scratch), dtype=torch.float64)
        with kvboost_serve(folder, options, settings={"chunk_size": "32"}, log=args.log) as server:

            def ask(prompt: str) -> str:
                body = {"model": "model", "prompt": prompt, "max_tokens": 32, "temperature": 0}
                while (answer := httpx.post(server.url + "/v1/completions", json=body, timeout=120)).status_code == 429:
                    time.sleep(0.1)
                return str(answer.json()["choices"][0]["text"])

            alone = {prompt: ask(prompt) for prompt in _PROMPTS}
            before = server.resources()
            left = 300 if args.quick else args.disconnects

            def client(number: int) -> None:
                nonlocal left, wrong, survivors
                rng = random.Random(number)
                while True:
                    with lock:
                        if left <= 0:
                            return
                        left -= 1
                    phase = leave(server.port, rng)
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
            gone = time.monotonic()
            taken = gone - began
            while not (idle := server.idle()) and time.monotonic() - gone < 30:
                time.sleep(0.02)
            seconds = time.monotonic() - gone
            time.sleep(0.5)
            after, leases = server.resources(), server.cache()["cache"]["leased_chunks"]
    mode = "deterministic" if args.deterministic else "default mode"
    print(describe_machine(dtype="float64", model="tiny-llama").line)
    print(f"{mode}: {args.clients} clients, {sum(phases.values()):,} disconnects in {taken:.0f} s: {dict(phases)}")
    print(f"answers waited for: {survivors}, other than alone: {wrong}")
    print(f"leases, jobs and KV back at zero {seconds:.2f} s after the last client; leases {leases}")
    print(f"before {before}\nafter  {after}\nexit code {server.code}")
    good = wrong == 0 and idle and seconds < 1.0 and leases == 0 and server.code == 0 and survivors > 0
    print("passed" if good else "NOT passed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
