"""Soak: mixed load on `kvboost serve` over all tiers, a Redis that fails, keys that change; nothing may grow.

A real server in a process of its own, over a tiny model, so that many requests pass in little time. Clients send
chats that go on, completions, streams, structured answers and broken requests, of the model or of an adapter of it,
and go away at random moments. Another key attacks all the time (`benchmarks/common/hostile.py`). The clients' key is
replaced by a new one every three quarters of a minute, and the server reads its keys again. KV is kept in memory, in a
directory and in a Redis. The Redis is killed, unreachable, silent, slow or talks nonsense every other quarter of a
minute. All capacities are small, so that they are full before the warm-up is over (the first
quarter). Then the load pauses, what is open is counted, and it goes on.

Passes if memory grows by at most 2 MB per hour over the last hour (a line through the samples), or by 20 MB after the
warm-up in a run of less than two hours (medians of the first and the last tenth of the samples), and if in the pause
at the end no lease, job or stream is left and no more threads and files are open than in the first one.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.flapping import FlappingRedis
from benchmarks.common.hostile import Seen, hostile
from benchmarks.common.measure import positive
from benchmarks.common.plot import Panel, Point, save
from benchmarks.common.report import Report
from kvboost.bench.report import say
from tests.helpers.serving import KeyFiles, ServeProcess, key_files, kvboost_serve, tiny_adapter, tiny_folder

QUICK = {"minutes": 0.4, "clients": 4, "hostile": 2, "every": 1.0}
_WARM_UP = 0.25
_MAX_GROWTH_MB = 20.0  # in less than two hours
_MAX_HOURLY_MB = 2.0  # over the last hour
_ROTATE_S = 45.0
_VALID_KEYS = 3  # of the clients: who has begun with one may still use it for a while
_MIN_MINUTES = 4.0  # in less, pools of threads and connections are still filling after the warm-up
_SETTLE_SECONDS = 5.0
_MODELS = ("model", "model", "model", "poet")
_CHARACTERS = 60_000  # of a prompt that this model's server tokenises before it refuses it
_WORDS = ("stone", "river", "seven", "green", "north", "paper", "cloud", "ninth", "glass", "amber", "quiet", "round")
_SETTINGS = {
    "cache_bytes": "4MiB",
    "workspace_bytes": "16MiB",
    "disk_cache_bytes": "8MiB",
    "serve_max_remembered_bytes": str(16 * 2**20),
}
_REDIS = ("--maxmemory", "32mb", "--maxmemory-policy", "allkeys-lru")
_BAD: tuple[tuple[str, bytes], ...] = (
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b'{"model": "model", "messages": [], "made_up": 1}'),
    ("/v1/completions", b'{"model": "another", "prompt": "x"}'),
    ("/v1/completions", b'{"model": "model", "prompt": "x", "max_tokens": 1000000}'),
    ("/v1/completions", b'{"model": "model", "prompt": "' + b"x" * 5000 + b'"}'),
    ("/nowhere", b"{}"),
)


@dataclass(frozen=True)
class Sample:
    """The server at one moment."""

    minutes: float
    rss: float
    anonymous: float
    threads: float
    files: float
    leases: int
    running: int
    kept: float
    """MB of KV in memory."""


class RotatingKeys:
    """The clients' keys: every so often there is a new one, and the oldest is no longer valid."""

    def __init__(self, keys: KeyFiles) -> None:
        self._keys, self._valid = keys, [keys.second]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._rotate)
        self._process: Any = None
        self.rotated = 0

    @property
    def newest(self) -> str:
        """What a client begins with."""
        return self._valid[-1]

    def start(self, server: ServeProcess) -> None:
        """From now on."""
        self._process = server.process
        self._thread.start()

    def end(self) -> None:
        """No more."""
        self._over.set()
        self._thread.join()

    def _rotate(self) -> None:
        while not self._over.wait(_ROTATE_S):
            valid = [*self._valid, secrets.token_hex(32)][-_VALID_KEYS:]
            self._keys.file.write_text("\n".join([self._keys.first, *valid]) + "\n")
            self._process.send_signal(signal.SIGHUP)
            self._over.wait(1.0)  # until it has read them
            self._valid = valid
            self.rotated += 1


class Load:
    """Clients that can be told to pause."""

    def __init__(self, server: ServeProcess, clients: int, keys: RotatingKeys) -> None:
        self._server, self._keys = server, keys
        self._over = threading.Event()
        self._go = threading.Event()
        self._lock = threading.Lock()
        self._busy = 0
        self.counts: Counter[str] = Counter()
        self.adapted = 0
        """Answers of the adapter."""
        self.unexpected: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def resume(self) -> None:
        """Everybody asks."""
        self._go.set()

    def pause(self) -> None:
        """Nobody asks, and everything that was asked is answered."""
        self._go.clear()
        while True:
            with self._lock:
                if not self._busy:
                    return
            time.sleep(0.05)

    def end(self) -> None:
        """No more."""
        self._over.set()
        self._go.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        kinds = (self._chat, self._chat, self._completion, self._stream, self._structured, self._leave, self._bad)
        while True:
            self._go.wait()
            if self._over.is_set():
                return
            with self._lock:
                self._busy += 1
            kind = rng.choice(kinds)
            try:
                headers = {"Authorization": f"Bearer {self._keys.newest}"}  # connections come and go as well
                with httpx.Client(base_url=self._server.url, headers=headers, timeout=120) as client:
                    for _ in range(rng.randint(1, 4)):
                        kind(client, rng)
                        with self._lock:
                            self.counts[kind.__name__.strip("_")] += 1
            except httpx.HTTPError as error:
                self._strange(repr(error))
            finally:
                with self._lock:
                    self._busy -= 1

    def _strange(self, what: str) -> None:
        with self._lock:
            self.unexpected[what[:120]] += 1

    def _post(self, client: httpx.Client, path: str, body: dict[str, Any], model: str = "model") -> httpx.Response:
        answer = client.post(path, json={"model": model, **body})
        if model != "model":
            with self._lock:
                self.adapted += 1
        if answer.status_code not in (200, 429):
            self._strange(f"{path}: {answer.status_code} {answer.text[:80]}")
        return answer

    def _chat(self, client: httpx.Client, rng: random.Random) -> None:
        """A chat of up to three turns whose replies come back."""
        messages, model = [{"role": "system", "content": _text(rng, shared=True)}], rng.choice(_MODELS)
        for _ in range(rng.randint(1, 3)):
            messages.append({"role": "user", "content": _text(rng)})
            body = {"messages": messages, "max_tokens": rng.randint(1, 16), "temperature": 0.8}
            answer = self._post(client, "/v1/chat/completions", body, model)
            if answer.status_code == 200:
                messages.append(answer.json()["choices"][0]["message"])
                messages[-1].pop("refusal", None)

    def _completion(self, client: httpx.Client, rng: random.Random) -> None:
        body = {"prompt": _text(rng, shared=True), "max_tokens": 8, "n": rng.randint(1, 2), "logprobs": 2}
        self._post(client, "/v1/completions", body, rng.choice(_MODELS))

    def _stream(self, client: httpx.Client, rng: random.Random) -> None:
        body = {"prompt": _text(rng, shared=True) + _text(rng), "max_tokens": 16, "stream": True, "stop": ["zz"]}
        self._post(client, "/v1/completions", body, rng.choice(_MODELS))

    def _structured(self, client: httpx.Client, rng: random.Random) -> None:
        names = rng.sample(_WORDS, 2)  # a schema is seldom the same twice
        fields = {name: {"type": "boolean"} for name in names}
        schema = {"type": "object", "properties": fields, "required": names, "additionalProperties": False}
        shape = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema, "strict": True}}
        messages = [{"role": "user", "content": _text(rng)}]
        self._post(client, "/v1/chat/completions", {"messages": messages, "response_format": shape, "max_tokens": 48})

    def _leave(self, client: httpx.Client, rng: random.Random) -> None:
        """Ask and go away: while sending, during prefill, or within the answer."""
        asked = {"model": "model", "prompt": _text(rng, shared=True), "max_tokens": 32, "stream": rng.random() < 0.7}
        body = json.dumps(asked).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {self._keys.newest}\r\n"
        sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=60) as connection:
            phase = rng.random()
            if phase < 0.2:
                connection.sendall(sent[: rng.randrange(len(sent))])
                return
            connection.sendall(sent)
            if phase < 0.6:
                time.sleep(rng.random() * 0.1)
                return
            connection.recv(rng.randint(1, 2000))

    def _bad(self, client: httpx.Client, rng: random.Random) -> None:
        path, body = rng.choice(_BAD)
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        if not 400 <= answer.status_code < 500:
            self._strange(f"{path} with a broken body: {answer.status_code}")


def _text(rng: random.Random, *, shared: bool = False) -> str:
    """Some words; with ``shared``, behind one of a few beginnings."""
    own = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(3, 20)))
    if not shared:
        return own
    chosen = rng.randrange(12)
    return (
        f"Beginning {chosen}. " + " ".join(_WORDS[(chosen + i) % len(_WORDS)] for i in range(40 + chosen)) + " " + own
    )


def sample(server: ServeProcess, began: float) -> Sample:
    """Look at the server."""
    told, found = server.cache(), server.resources()
    return Sample(
        minutes=(time.monotonic() - began) / 60,
        leases=told["cache"]["leased_chunks"],
        running=told["load"]["running"],
        kept=told["cache"]["bytes_by_tier"]["memory"] / 1e6,
        **found,
    )


def at_rest(server: ServeProcess, load: Load, redis: FlappingRedis, began: float) -> tuple[Sample, bool]:
    """The server with nothing to do, a few seconds after the last request; and whether it was idle within one."""
    redis.steady(True)
    load.pause()
    paused = time.monotonic()
    idle = False
    while not idle and time.monotonic() - paused < 1.0:
        idle = server.idle()
    time.sleep(_SETTLE_SECONDS)
    found = sample(server, began)
    redis.steady(False)
    return found, idle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--minutes", type=float, default=30.0, help="default: 30")
    parser.add_argument("--clients", type=positive, default=12, help="default: 12")
    parser.add_argument("--hostile", type=positive, default=8, help="connections of the hostile key (default 8)")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between samples (default 3)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the curves to FILE")
    parser.add_argument("--log", type=Path, help="what the server says")


def run(args: argparse.Namespace) -> Report:
    """Warm up, rest, load, rest."""
    samples: list[Sample] = []
    attacked: list[Seen] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder, keys = tiny_folder(scratch / "tiny-llama"), key_files(scratch)
        redis = FlappingRedis(stack, _REDIS)
        stack.callback(redis.end)
        options = [*keys.options, "--remote-url", redis.url, "--adapter", f"poet={tiny_adapter(scratch / 'poet')}"]
        settings = {**_SETTINGS, "disk_cache_dir": str(scratch / "disk")}
        server = stack.enter_context(
            kvboost_serve(folder, options, settings=settings, log=args.log, admin_key=keys.admin)
        )
        rotating = RotatingKeys(keys)
        rotating.start(server)
        stack.callback(rotating.end)
        load = Load(server, args.clients, rotating)
        stack.callback(load.end)
        began = time.monotonic()

        def run_until(minute: float) -> None:
            load.resume()
            seconds = began + minute * 60 - time.monotonic()
            mix = {"model": "model", "characters": _CHARACTERS, "connections": args.hostile, "seconds": seconds}
            with hostile(server.port, keys.first, **mix) as attacker:
                while time.monotonic() - began < minute * 60:
                    samples.append(sample(server, began))
                    time.sleep(args.every)
                attacked.append(attacker.seen())

        run_until(args.minutes * _WARM_UP)
        first, _ = at_rest(server, load, redis, began)
        say(f"warmed up after {first.minutes:.1f} minutes: {first}")
        after = len(samples)
        run_until(args.minutes)
        last, idle = at_rest(server, load, redis, began)
        say(f"at the end: {last}")
    tenth = max(1, (len(samples) - after) // 10)
    beginning = statistics.median(s.anonymous for s in samples[after : after + tenth])
    under_load = statistics.median(s.anonymous for s in samples[-tenth:]) - beginning
    resting = last.anonymous - first.anonymous
    hours = (last.minutes - first.minutes) / 60
    last_hour = [s for s in samples[after:] if s.minutes > last.minutes - 60]
    slope = 60 * statistics.linear_regression([s.minutes for s in last_hour], [s.anonymous for s in last_hour]).slope
    steady = slope <= _MAX_HOURLY_MB if args.minutes >= 120 else max(under_load, resting) <= _MAX_GROWTH_MB
    failures = [seen.failures for seen in attacked if seen.failures]
    report = Report("soak", raw={"samples": [asdict(s) for s in samples]})
    names = ("minutes", "rss", "anonymous", "kept", "threads", "files", "leases", "running")
    columns = ("minute", "RSS, MB", "anonymous, MB", "KV kept, MB", "threads", "files", "leases", "jobs")
    table = report.table(f"Soak: {args.minutes:g} minutes", columns, dtype="float32", model="tiny-llama")
    part = max(1, len(samples) // 12)
    for at in range(0, len(samples), part):  # medians: one sample says more of the moment than of the hour
        values = ([getattr(s, name) for s in samples[at : at + part]] for name in names)
        table.add(*(f"{statistics.median(of):.1f}" for of in values))
    rest = [f"{s.anonymous:.1f} MB, {s.threads:g} threads, {s.files:g} files, {s.leases} leases" for s in (first, last)]
    table.notes += [
        f"{sum(load.counts.values()):,} requests: {dict(load.counts)}; {load.adapted:,} answers of the adapter; "
        f"keys replaced: {rotating.rotated}; faults of Redis: {dict(redis.faults)}; "
        f"unexpected answers: {dict(load.unexpected) or 'none'}.",
        f"At rest after the warm-up: {rest[0]}; at the end: {rest[1]}.",
        f"Growth after the warm-up: {under_load:+.1f} MB under load, {resting:+.1f} MB at rest, in {hours:.2f} hours: "
        f"{under_load / hours:+.1f} and {resting / hours:+.1f} MB per hour; over the last hour {slope:+.1f}.",
        f"The hostile key: {dict(sum((seen.by_status for seen in attacked), start=Counter[str]()))}; 5xx other than "
        f"503, or no answer: {failures or 'none'}.",
    ]
    report.failed = not (
        steady
        and idle
        and last.leases == 0
        and (args.minutes < _MIN_MINUTES or (last.threads <= first.threads and last.files <= first.files))
        and not load.unexpected
        and not failures
        and server.code == 0
    )
    if args.plot is not None:
        save(_panels(samples), args.plot.expanduser())
    return report


def _panels(samples: Sequence[Sample]) -> list[Panel]:
    shown = samples[:: max(1, len(samples) // 100)]

    def panel(title: str, unit: str, names: Sequence[str]) -> Panel:
        lines = {name: [Point(s.minutes, *[getattr(s, name)] * 3) for s in shown] for name in names}
        return Panel(title, "minutes", unit, lines)

    return [
        panel("Memory of the server", "MB", ("rss", "anonymous")),
        panel("KV kept in memory", "MB", ("kept",)),
        panel("Threads and open files", "count", ("threads", "files")),
        panel("Leased chunks and running jobs", "count", ("leases", "running")),
    ]
