"""Clients that go away at any moment: what they held comes back, and the others notice nothing.

Many clients at once, against `kvboost serve` in a process of its own. Each asks for a stream or a whole answer and
leaves at a random moment: while it still sends, during prefill, between two tokens, or never. Passes if
every answer that was waited for is the one given to a single client, and leases, running jobs and their KV are back
at zero within one second after the last client has gone.

Beside others a request is computed in other shapes, whose sums round differently. The model is in float64, where that
is some 1e-15 of a logit: far less than what lies between two tokens here, so answers must be the same by default too.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import torch

from benchmarks.common.measure import positive
from benchmarks.common.report import Report
from tests.helpers.serving import ServeProcess, kvboost_serve, tiny_folder

QUICK = {"clients": 8, "disconnects": 60}
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--deterministic", action="store_true", help="the server's mode; without it, the default")
    parser.add_argument("--clients", type=positive, default=64, help="default: 64")
    parser.add_argument("--disconnects", type=positive, default=2000, help="default: 2000")
    parser.add_argument("--log", type=Path, help="what the server says")


class Clients:
    """Clients that leave, and now and then wait for an answer."""

    def __init__(self, server: ServeProcess, disconnects: int) -> None:
        self._server, self._left = server, disconnects
        self._lock = threading.Lock()
        self.phases: Counter[str] = Counter()
        self.answers = self.wrong = 0
        self._alone = {prompt: self._ask(prompt) for prompt in _PROMPTS}

    def run(self, count: int) -> float:
        """All of them until no disconnect is left; the seconds it took."""
        began = time.monotonic()
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - began

    def _ask(self, prompt: str) -> str:
        body = {"model": "model", "prompt": prompt, "max_tokens": 32, "temperature": 0}
        url = self._server.url + "/v1/completions"
        while (answer := httpx.post(url, json=body, timeout=120)).status_code == 429:
            time.sleep(0.1)
        return str(answer.json()["choices"][0]["text"])

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        while True:
            with self._lock:
                if self._left <= 0:
                    return
                self._left -= 1
            phase = leave(self._server.port, rng)
            with self._lock:
                self.phases[phase] += 1
            if rng.random() < 0.1:
                prompt = rng.choice(_PROMPTS)
                same = self._ask(prompt) == self._alone[prompt]
                with self._lock:
                    self.answers += 1
                    self.wrong += not same


def run(args: argparse.Namespace) -> Report:
    """Let them leave, then wait until nothing is held."""
    options = ["--quality", "exact", *(["--deterministic"] if args.deterministic else [])]
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_folder(Path(scratch) / "tiny-llama", dtype=torch.float64)
        with kvboost_serve(folder, options, settings={"chunk_size": "32"}, log=args.log) as server:
            clients = Clients(server, args.disconnects)
            before = server.resources()
            taken = clients.run(args.clients)
            gone = time.monotonic()
            while not (idle := server.idle()) and time.monotonic() - gone < 30:
                time.sleep(0.02)
            seconds = time.monotonic() - gone
            time.sleep(0.5)
            after, leases = server.resources(), server.cache()["cache"]["leased_chunks"]
    report = Report("http_disconnects", raw=dict(clients.phases))
    held = idle and seconds < 1.0 and leases == 0 and server.code == 0
    report.failed = not (held and clients.wrong == 0 and clients.answers > 0)
    mode = "deterministic" if args.deterministic else "default mode"
    table = report.table(f"{mode}: {args.clients} clients", ["what", "measured"], dtype="float64", model="tiny-llama")
    table.add("disconnects", f"{sum(clients.phases.values()):,} in {taken:.0f} s")
    for phase, count in clients.phases.items():
        table.add(f"of them {phase}", count)
    table.add("answers waited for, and other than alone", f"{clients.answers}, {clients.wrong}")
    table.add("leases, jobs and KV back at zero after the last client, s", f"{seconds:.2f}")
    table.notes.append(f"Before {before}; after {after}; {leases} leases; exit code {server.code}.")
    return report
