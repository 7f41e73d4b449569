"""A real fleet under `kill -9`: replicas, the front with its router, and Redis in turn, while clients ask.

Three replicas under Ray Serve on one Redis. The first answers are compared with those of a plain engine; each later
one must have the same text and log-probabilities. Redis loses all it had and is started again after a second. Counted:
wrong answers, requests that failed and whether they were under way at the kill, and the seconds until answers are found
in a cache again. The next kill waits until everything runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.fleet_requests import MadeUpText
from benchmarks.common.measure import positive
from benchmarks.common.ray_fleet import RayFleet, ray_python
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.common.servers import redis_server
from benchmarks.internals import light_tokenizer
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode

QUICK = {"kills": 3, "clients": 2, "documents": 3}
_VICTIMS = ("replica", "front", "redis")
_BAR_S = 10.0
_NEW = 8  # tokens of an answer
_QUESTIONS = 4  # of each document
_IN_A_ROW = 10  # answers that are found, until hits are back
_BACK_S, _SETTLED_S = 60.0, 300.0
_REDIS_AWAY_S = 1.0


@dataclass(frozen=True)
class Asked:
    """One request."""

    began: float
    ended: float
    failure: str | None
    wrong: bool
    found: bool
    """At least half of the prompt came from a cache."""


@dataclass
class Load:
    """Clients that ask until they are told to stop."""

    fleet: RayFleet
    prompts: list[list[int]]
    expected: list[tuple[Any, ...]]
    asked: list[Asked] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, clients: int) -> Iterator[None]:
        """Ask for one ``with`` block."""
        with ThreadPoolExecutor(clients) as pool:
            working = [pool.submit(self._work, number) for number in range(clients)]
            try:
                yield
            finally:
                self._over.set()
            for each in working:
                each.result()

    def _work(self, seed: int) -> None:
        draw = random.Random(seed)
        with ExitStack() as stack:
            client = stack.enter_context(httpx.Client(timeout=60))
            while not self._over.is_set():
                number = draw.randrange(len(self.prompts))
                began, failure, told = time.monotonic(), None, None
                try:
                    told = self.fleet.complete(client, self.prompts[number], new=_NEW, logprobs=0)
                except httpx.HTTPError as error:
                    failure = _reason(error)
                    client = stack.enter_context(httpx.Client(timeout=60))  # its connection may be broken
                wrong = told is not None and said(told) != self.expected[number]
                found = told is not None and 2 * _cached(told) >= len(self.prompts[number])
                self.asked.append(Asked(began, time.monotonic(), failure, wrong, found))

    def hits_back(self, since: float) -> float | None:
        """When the first of some answers in a row that were found ended; None if that has not come yet."""
        row: list[Asked] = []
        for one in sorted((a for a in list(self.asked) if a.ended > since), key=lambda a: a.ended):
            row = [*row, one] if one.found and one.failure is None else []
            if len(row) == _IN_A_ROW:
                return row[0].ended
        return None


@dataclass(frozen=True)
class Kill:
    """One kill and what followed."""

    victim: str
    at: float
    hits_back: float | None
    """Seconds."""
    settled: float
    """Seconds until all replicas and the front ran."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="default: a tiny one, made on the spot")
    parser.add_argument("--ray-venv", type=Path, metavar="FOLDER", help="an environment with Ray and kvboost")
    parser.add_argument("--kills", type=positive, default=50, help="default 50, of each kind in turn")
    parser.add_argument("--replicas", type=positive, default=3)
    parser.add_argument("--clients", type=positive, default=3)
    parser.add_argument("--documents", type=positive, default=12, help=f"with {_QUESTIONS} questions each (default 12)")
    parser.add_argument("--tokens", type=positive, default=300, help="of a document (default 300)")


def run(args: argparse.Namespace) -> Report:
    """Kill in turn, and count."""
    python = ray_python(args.ray_venv)
    with ExitStack() as stack:
        model = args.model
        if model is None:
            from tests.helpers.serving import tiny_folder

            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = tiny_folder(scratch / "tiny-llama", num_hidden_layers=4)
        model = model.expanduser().resolve()
        text = MadeUpText(light_tokenizer(str(model)))
        prompts = [
            [*text.of(b"document" + bytes([d]), args.tokens), *text.of(b"question" + bytes([d, q]), 12)]
            for d in range(args.documents)
            for q in range(_QUESTIONS)
        ]
        plain = _plain_answers(model, prompts)
        server = stack.enter_context(redis_server())
        engine = {"dtype": "float32", "device": "cpu", "remote_url": server.url, "cache_bytes": 2**28}
        fleet = stack.enter_context(
            RayFleet(
                python,
                model,
                router="content",
                replicas=args.replicas,
                engine=engine,
                runner={"deterministic": True},
            )
        )
        with httpx.Client(timeout=300) as client:
            first = [said(fleet.complete(client, prompt, new=_NEW, logprobs=0)) for prompt in prompts]
        load = Load(fleet, prompts, first)

        def kill_redis() -> None:
            nonlocal server
            server.process.kill()
            server.process.wait()
            time.sleep(_REDIS_AWAY_S)
            server = stack.enter_context(redis_server(port=server.port))

        with load.running(args.clients):
            _until(lambda: load.hits_back(0.0), seconds=_BACK_S)
            kills = _kill_in_turn(args, fleet, load, kill_redis)
    report = Report("ray_faults")
    _tell(report, args, kills, load, different=sum(a[0] != b for a, b in zip(first, plain, strict=True)), model=model)
    return report


def _plain_answers(model: Path, prompts: list[list[int]]) -> list[str]:
    """Without any reuse."""
    with KVBoost.from_pretrained(str(model), dtype="float32", device="cpu") as engine:
        plain: dict[str, Any] = {"mode": GenerationMode.BASELINE, "max_new_tokens": _NEW, "temperature": 0.0}
        return [engine.generate(ids, **plain).output_text for ids in prompts]


def said(told: dict[str, Any]) -> tuple[Any, ...]:
    """An answer's text and log-probabilities."""
    (choice,) = told["choices"]
    return choice["text"], *choice["logprobs"]["token_logprobs"]


def _cached(told: dict[str, Any]) -> int:
    return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])


def _reason(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    return type(error).__name__


def _kill_in_turn(args: argparse.Namespace, fleet: RayFleet, load: Load, kill_redis: Callable[[], None]) -> list[Kill]:
    draw, kills = random.Random(0), []
    progress = Progress("kills", args.kills)
    for victim, _ in zip(itertools.cycle(_VICTIMS), range(args.kills), strict=False):
        before = fleet.processes()
        at = time.monotonic()
        gone: set[int] = set()
        if victim == "redis":
            kill_redis()
        else:
            gone = {draw.choice(sorted(before[victim].values()))}
            os.kill(*gone, signal.SIGKILL)

        def settled(gone: set[int] = gone) -> bool:
            now = fleet.processes()
            whole = len(now["replica"]) == args.replicas and len(now["front"]) == 1
            return whole and not gone & {pid for each in now.values() for pid in each.values()}

        back = _until(lambda at=at: load.hits_back(at), seconds=_BACK_S)
        if not _until(settled, seconds=_SETTLED_S):
            raise BenchError(f"the fleet was not whole again {_SETTLED_S:g} s after the kill of {victim}")
        kills.append(Kill(victim, at, back - at if back is not None else None, time.monotonic() - at))
        progress.step()
    return kills


def _until(true: Callable[[], Any], *, seconds: float) -> Any:
    """What it gives as soon as that is true; None if it does not become so in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := true():
            return value
        time.sleep(0.1)
    return None


def _tell(
    report: Report, args: argparse.Namespace, kills: list[Kill], load: Load, *, different: int, model: Path
) -> None:
    columns = ["killed", "times", "failed: under way", "begun later", "hits back s: median", "longest", "all back s"]
    table = report.table(
        f"kill -9 under load, {args.replicas} replicas, {args.clients} clients", columns, dtype="float32", model=model
    )
    ends = [kill.at for kill in kills[1:]] + [float("inf")]
    failures: dict[str, int] = {}
    for victim in _VICTIMS:
        own = [(kill, end) for kill, end in zip(kills, ends, strict=True) if kill.victim == victim]
        if not own:
            continue
        lost = [a for kill, end in own for a in load.asked if a.failure and kill.at < a.ended <= end]
        starts = [kill.at for kill, _ in own]
        under_way = [a for a in lost if any(a.began <= at < a.ended for at in starts)]
        seconds = sorted(_BACK_S if kill.hits_back is None else kill.hits_back for kill, _ in own)
        table.add(
            victim,
            len(own),
            len(under_way),
            len(lost) - len(under_way),
            f"{statistics.median(seconds):.2f}",
            f"{seconds[-1]:.2f}",
            f"{max(kill.settled for kill, _ in own):.1f}",
        )
        for one in lost:
            failures[f"{victim}: {one.failure}"] = failures.get(f"{victim}: {one.failure}", 0) + 1
        # A front takes the requests along that it is handling; nothing else may be lost.
        report.failed |= seconds[-1] > _BAR_S or len(lost) > (len(under_way) if victim == "front" else 0)
    wrong = sum(asked.wrong for asked in load.asked)
    found = sum(asked.found for asked in load.asked)
    report.failed |= wrong > 0 or different > 0
    table.notes.append(
        f"{len(load.asked):,} requests, {found:,} found in a cache, {wrong} wrong; {different} of {len(load.expected)} "
        f"first answers differ from a plain engine's; they have {len({e[0] for e in load.expected})} different texts. "
        f"Hits are back with the first of {_IN_A_ROW} answers in a row of which at least half was found; the bar is "
        f"{_BAR_S:g} s. Failures: {', '.join(f'{name} x{count}' for name, count in failures.items()) or 'none'}."
    )
    report.raw |= {"kills": [asdict(kill) for kill in kills], "asked": [asdict(asked) for asked in load.asked]}
