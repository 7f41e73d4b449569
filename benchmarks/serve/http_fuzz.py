"""Broken requests, by schemathesis and by random bytes, against a real server: no 5xx, and /health stays fast.

Cases made from the server's own OpenAPI description, valid and invalid, then raw sockets with mutated requests. All the
while /health is asked ten times a second. Passes if no response is a 5xx and no /health took 100 ms.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.measure import positive
from benchmarks.common.report import Report
from kvboost.bench.report import say

QUICK = {"cases": 20, "connections": 50}
_MAX_HEALTH_S = 0.1

_SERVER = """
import warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from kvboost import KVBoost
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve import Limits, ServerConfig, serve
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

engine = KVBoost(tiny_model("llama", vocab_size=260, max_position_embeddings=2048), byte_tokenizer(), chunk_size=32)
with BatchRunner(engine) as runner:
    limits = Limits(max_new_tokens=8, header_seconds=2, body_seconds=2)
    serve(engine, runner, ServerConfig(served_model_name="tiny", port=0), limits=limits,
          ready=lambda host, port: print(port, flush=True))
"""


class HealthWatch(threading.Thread):
    """Asks /health ten times a second and keeps how long each answer took."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._over = url, threading.Event()
        self.seconds: list[float] = []
        self.failures = 0

    def run(self) -> None:
        with httpx.Client(timeout=10) as client:
            while not self._over.wait(0.1):
                began = time.perf_counter()
                try:
                    self.failures += client.get(self._url + "/health").status_code != 200
                except httpx.TransportError:
                    self.failures += 1
                self.seconds.append(time.perf_counter() - began)

    def stop(self) -> None:
        self._over.set()
        self.join()


def responses_by_status(url: str) -> dict[str, int]:
    text = httpx.get(url + "/metrics").text
    found = re.findall(r'kvboost_http_responses_total\{status="(\d+)"\} (\S+)', text)
    return {status: int(float(count)) for status, count in found}


def aimed_description(url: str) -> dict[str, Any]:
    """The server's description with the model's name filled in: a wrong one would be refused before anything else."""
    description: dict[str, Any] = httpx.get(url + "/openapi.json").json()
    for schema in description["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": ["tiny"]}
    return description


def from_description(url: str, *, cases: int) -> None:
    """Let schemathesis send ``cases`` requests or more."""
    description = aimed_description(url)
    operations = sum(len(methods) for methods in description["paths"].values())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(description))
        sent, seed = 0, 1
        before = sum(responses_by_status(url).values())
        while sent < cases:
            options = f"--checks not_a_server_error --phases coverage,fuzzing --continue-on-failure --seed {seed} "
            options += f"--max-examples {max(2, (cases - sent) // operations)} --workers 2 --warnings off --no-color "
            options += "--no-shrink --suppress-health-check all --generation-database none"
            subprocess.run(
                [sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", url, *options.split()],
                cwd=folder,
                capture_output=True,
                check=False,  # what it found is counted by the server itself
            )
            sent = sum(responses_by_status(url).values()) - before
            seed += 1
            say(f"{sent} requests from the description")


def mutated(request: bytes, rng: random.Random) -> bytes:
    sent = bytearray(request)
    for _ in range(rng.randint(1, 12)):
        kind, at = rng.randrange(4), rng.randrange(max(1, len(sent)))
        if kind == 0:
            sent[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del sent[at : at + rng.randint(1, 20)]
        elif kind == 2:
            sent[at:at] = rng.randbytes(rng.randint(1, 20))
        else:
            sent[at:at] = sent[at : at + 30]
    return bytes(sent)


def raw_sockets(port: int, *, connections: int) -> dict[str, int]:
    """Send mutated requests; what came back, by status, or "silent" or "closed"."""
    rng = random.Random(11)
    bodies = [
        b'{"model": "tiny", "prompt": "hello", "max_tokens": 2, "stream": true}',
        b'{"model": "tiny", "prompt": ["a", "b"], "n": 2, "logprobs": 2}',
    ]
    found: dict[str, int] = {}
    for number in range(connections):
        body = bodies[number % 2]
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(0.1)
            try:
                connection.sendall(mutated(request, rng))
                answer = connection.recv(200)
                status = answer[9:12].decode(errors="replace") if answer else "closed"
            except TimeoutError:
                status = "silent"
            except (ConnectionResetError, BrokenPipeError):
                status = "closed"
        found[status] = found.get(status, 0) + 1
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--cases", type=positive, default=10_000, help="default: 10000")
    parser.add_argument("--connections", type=positive, default=3_000, help="default: 3000")


def run(args: argparse.Namespace) -> Report:
    """All cases and connections against one server, while /health is asked."""
    process = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        watch = HealthWatch(url)
        watch.start()
        began = time.monotonic()
        from_description(url, cases=args.cases)
        outcomes = raw_sockets(port, connections=args.connections)
        taken = time.monotonic() - began
        watch.stop()
        statuses = responses_by_status(url)
        load = httpx.get(url + "/v1/cache").json()["load"]
    finally:
        process.terminate()
        code = process.wait(timeout=60)
    failed = sum(count for status, count in statuses.items() if status.startswith("5"))
    seconds = sorted(watch.seconds)
    report = Report("http_fuzz", raw={"statuses": statuses, "raw_sockets": outcomes})
    report.failed = bool(failed or code or watch.failures or seconds[-1] >= _MAX_HEALTH_S)
    table = report.table("Broken requests", ["what", "measured"], dtype="float32", model="tiny-llama")
    table.add(f"responses in {taken:.0f} s, by status", f"{sum(statuses.values()):,}: {dict(sorted(statuses.items()))}")
    table.add(f"raw sockets, {args.connections:,} connections", dict(sorted(outcomes.items())))
    table.add("5xx", failed)
    table.add("exit code after SIGTERM; jobs left", f"{code}; {load['running'] + load['waiting']}")
    middle, late, last = (seconds[int(len(seconds) * part)] * 1000 for part in (0.5, 0.99, 0.999999))
    table.add("/health: requests, failures", f"{len(seconds):,}, {watch.failures}")
    table.add("/health, ms: median, 99th percentile, slowest", f"{middle:.1f}, {late:.1f}, {last:.1f}")
    return report
