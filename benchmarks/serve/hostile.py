"""One key attacks with 64 connections; another chats, and a third client asks /health: what they notice of it.

A real server in a process of its own, with two keys. Calm and hostile phases take turns. In all of them the second key
sends short streaming chats, one after the other, and /health is asked 20 times a second. In the hostile ones the first
key sends bodies of 4 MiB, deep JSON, chats of 1,000 messages, hostile tool outputs and large schemas, and goes away in
uploads and while its prompts are tokenised (`benchmarks/common/hostile.py`). None of that becomes a job of the model:
those would be the first key's right, and share the model with the second's.

Passes if /health has a 99th percentile under 100 ms, the other key's p95 time to first token is at most 1.5 times that
of the calm phases, no answer is a 5xx other than 503, and memory is bounded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.hostile import Seen, hostile
from benchmarks.common.measure import DTYPES, positive
from benchmarks.common.report import BenchError, Report
from kvboost.bench.report import ratios, say
from tests.helpers.serving import ServeProcess, key_files, kvboost_serve

QUICK = {"seconds": 6.0, "connections": 16, "dtype": "float32"}
_HEALTH_EVERY_S = 0.05
_MAX_HEALTH_MS = 100.0
_MAX_RATIO = 1.5
_MAX_MORE_MB = 1024.0  # bodies of all requests may take 256 MiB; parsed and tokenised they are several times as much
_MAX_GROWTH_MB = 64.0  # from the first hostile phase to the last
_CHARACTERS_PER_TOKEN = 32  # beyond it the server does not tokenise a prompt
_THINGS = ("rivers", "bridges", "violins", "comets", "bakeries", "clocks", "harbours", "maps", "glaciers", "trains")


@dataclass
class Phase:
    """What was seen in one phase."""

    hostile: bool
    ttft: list[float] = field(default_factory=list)
    """Of the second key's chats, in seconds."""
    health: list[float] = field(default_factory=list)
    """Of /health, in seconds."""
    rss: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the phase began, and MB."""
    server_cpu: float = 0.0
    """Seconds of a processor for each second."""
    client_cpu: float = 0.0
    """The same of the attacking client."""
    refused: int = 0
    """Chats of the second key that were not answered."""

    @property
    def peak(self) -> float:
        """Of RSS, in MB."""
        return max(mb for _, mb in self.rss)


class Watch:
    """Asks /health and looks at the server's memory until it is ended."""

    def __init__(self, server: ServeProcess, phase: Phase) -> None:
        self._server, self._phase = server, phase
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def end(self) -> None:
        """No more."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        began = time.monotonic()
        with httpx.Client(base_url=self._server.url, timeout=60, trust_env=False) as client:
            for number in itertools.count():
                if self._over.wait(max(0.0, began + number * _HEALTH_EVERY_S - time.monotonic())):
                    return
                asked = time.perf_counter()
                answer = client.get("/health")
                self._phase.health.append(time.perf_counter() - asked)
                if answer.status_code != 200:
                    raise BenchError(f"/health answered {answer.status_code}; give --log FILE to see why")
                if number % 10 == 0:
                    self._phase.rss.append((time.monotonic() - began, self._server.resources()["rss"]))


def chat(client: httpx.Client, number: int) -> float | None:
    """Seconds to the first token of a short chat; None if it was refused."""
    question = f"Tell me about {_THINGS[number % len(_THINGS)]} in the year {1000 + number}."
    messages = [{"role": "system", "content": "You answer in plain words."}, {"role": "user", "content": question}]
    body = {"model": "model", "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
    begin, first = time.perf_counter(), None
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            return None
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise BenchError(f"a chat failed: {line[:300]}")
                if first is None and _has_text(event):
                    first = time.perf_counter() - begin
    return first if first is not None else time.perf_counter() - begin


def _has_text(event: dict[str, Any]) -> bool:
    return any(choice["delta"].get("content") for choice in event["choices"])


def observe(server: ServeProcess, key: str, phase: Phase, seconds: float, numbers: itertools.count[int]) -> None:
    """Chats of the second key for so long, while /health is asked."""
    began, cpu = time.monotonic(), server.cpu_seconds()
    watch = Watch(server, phase)
    headers = {"Authorization": f"Bearer {key}"}
    try:
        with httpx.Client(base_url=server.url, headers=headers, timeout=120, trust_env=False) as client:
            while time.monotonic() - began < seconds:
                ttft = chat(client, next(numbers))
                if ttft is None:
                    phase.refused += 1
                    time.sleep(0.1)
                else:
                    phase.ttft.append(ttft)
    finally:
        watch.end()
    phase.server_cpu = (server.cpu_seconds() - cpu) / (time.monotonic() - began)


def characters_of(server: ServeProcess, key: str) -> int:
    """As many as the server tokenises before it knows that a prompt is too long."""
    headers = {"Authorization": f"Bearer {key}"}
    told = httpx.post(server.url + "/tokenize", json={"prompt": "x"}, headers=headers, timeout=60).json()
    return int(told["max_model_len"] or 8192) * _CHARACTERS_PER_TOKEN - 1000


def quantile(samples: Sequence[float], percent: int) -> float:
    """Of at least two samples."""
    if len(samples) < 2:
        raise BenchError("a phase had fewer than two answers; give more --seconds, on a machine that has time for them")
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, help="folder of a chat model (config.json and weights)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--connections", type=positive, default=64, help="of the attacking key (default 64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase (default 60)")
    parser.add_argument("--rounds", type=positive, default=2, help="of a calm and a hostile phase (default 2)")
    parser.add_argument("--log", type=Path, help="what the server says")


def run(args: argparse.Namespace) -> Report:
    """Phases in turn."""
    if args.model is None:
        raise BenchError("this benchmark needs a model; give its folder with --model FOLDER")
    phases: list[Phase] = []
    attacked: list[Seen] = []
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as scratch:
        keys = key_files(Path(scratch))
        options = [*keys.options, "--dtype", args.dtype]
        folder = args.model.expanduser().resolve()
        with kvboost_serve(folder, options, log=args.log, admin_key=keys.admin) as server:
            characters = characters_of(server, keys.first)
            observe(server, keys.second, Phase(hostile=False), min(5.0, args.seconds), numbers)  # the first ones load
            for _ in range(args.rounds):
                phases += [Phase(hostile=False), Phase(hostile=True)]
                observe(server, keys.second, phases[-2], args.seconds, numbers)
                mix = {"model": "model", "characters": characters, "connections": args.connections}
                with hostile(server.port, keys.first, seconds=args.seconds, **mix) as client:
                    observe(server, keys.second, phases[-1], args.seconds, numbers)
                    attacked.append(client.seen())
                phases[-1].client_cpu = attacked[-1].cpu_seconds / attacked[-1].seconds
                say(f"p95 of first tokens: {', '.join(f'{quantile(p.ttft, 95):.3f} s' for p in phases[-2:])}")
            idle = _is_idle_soon(server)
    return _report(args, phases, attacked, idle=idle and server.code == 0)


def _is_idle_soon(server: ServeProcess) -> bool:
    end = time.monotonic() + 30
    while not (idle := server.idle()) and time.monotonic() < end:
        time.sleep(0.1)
    return idle


def _report(args: argparse.Namespace, phases: Sequence[Phase], attacked: Sequence[Seen], *, idle: bool) -> Report:
    report = Report("hostile", raw={"phases": [asdict(p) for p in phases], "attacks": [s.statuses for s in attacked]})
    columns = [
        "phase",
        "/health p50, p99, max, ms",
        "first token p50, p95, ms",
        "chats",
        "RSS peak, MB",
        "server, cores",
        "attacker, cores",
    ]
    title = f"{args.connections} hostile connections of one key, {args.seconds:g} s a phase"
    table = report.table(title, columns, dtype=args.dtype, model=args.model)
    kinds = {kind: [phase for phase in phases if phase.hostile is kind] for kind in (False, True)}
    ttft = {kind: [t for phase in found for t in phase.ttft] for kind, found in kinds.items()}
    for number, phase in enumerate(phases):
        health = [quantile(phase.health, 50), quantile(phase.health, 99), max(phase.health)]
        table.add(
            f"{number + 1}, {'hostile' if phase.hostile else 'calm'}",
            " / ".join(f"{1000 * value:.1f}" for value in health),
            " / ".join(f"{1000 * quantile(phase.ttft, percent):.0f}" for percent in (50, 95)),
            f"{len(phase.ttft)} ({phase.refused} refused)",
            f"{phase.peak:.0f}",
            f"{phase.server_cpu:.2f}",
            f"{phase.client_cpu:.2f}",
        )
    health_ms = 1000 * quantile([t for phase in kinds[True] for t in phase.health], 99)
    ratio = quantile(ttft[True], 95) / quantile(ttft[False], 95)
    pairs = ratios(*([quantile(phase.ttft, 95) for phase in kinds[kind]] for kind in (True, False)))
    calm, first, last = (max(p.peak for p in kinds[False]), kinds[True][0].peak, kinds[True][-1].peak)
    statuses = sum((seen.by_status for seen in attacked), start=Counter[str]())
    failures = [seen.failures for seen in attacked if seen.failures]
    table.notes += [
        f"/health while attacked: p99 {health_ms:.1f} ms. First tokens, p95: {ratio:.2f} times the calm phases' "
        f"({', '.join(f'{pair:.2f}' for pair in pairs)} pair by pair).",
        f"Memory: {max(p.peak for p in kinds[True]) - calm:+.0f} MB while attacked; {last - first:+.0f} MB from the "
        "first hostile phase to the last.",
        f"{statuses.total():,} attacks: {dict(statuses.most_common())}; 5xx other than 503, or no answer: "
        f"{failures or 'none'}; {'idle' if idle else 'NOT idle'} at the end.",
        "The attacking client runs beside the server at nice 10: what it takes of the cores is in the last column, and "
        "is part of what the others notice where both cores are busy.",
    ]
    report.failed = not (
        health_ms < _MAX_HEALTH_MS
        and ratio <= _MAX_RATIO
        and max(p.peak for p in kinds[True]) - calm <= _MAX_MORE_MB
        and last - first <= _MAX_GROWTH_MB
        and not failures
        and sum(phase.refused for phase in phases) == 0
        and idle
    )
    return report
