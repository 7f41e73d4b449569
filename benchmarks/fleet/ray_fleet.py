"""A real fleet: replicas under Ray Serve on one Redis, by router: what is found, what is loaded, first tokens.

Requests in the shape of two traces, made-up text by the traces' ids, lengths scaled down: conversations, reused as
prefixes only, and RAGPulse's, reused wherever the text stands. A few clients ask over HTTP in the trace's order for one
token each. Every router gets a Ray, a Redis and replicas of its own. "pooled" is one replica with the memory of all.
With ``--simulate`` the simulator runs the same requests, as they arrived, with the same memory.
"""

from __future__ import annotations

import argparse
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common.fleet_requests import FleetRequests, MadeUpText, scaled_requests, simulated_requests
from benchmarks.common.fleet_routers import expected_seconds, power_of_two, ray_affinity, round_robin
from benchmarks.common.fleet_sim import Fleet, Simulation, Strategy
from benchmarks.common.measure import DTYPES, positive, share
from benchmarks.common.ray_fleet import RayFleet, ray_python
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.common.servers import RedisServer, redis_server
from benchmarks.common.traces import BLOCK
from benchmarks.internals import ModelSource, light_tokenizer, model_on_disk
from kvboost.bench.report import say
from kvboost.fleet.route import RouteCosts

QUICK = {"requests": 12, "max_tokens": 200, "block_tokens": 40, "warm_up": 3, "simulate": True}
_OURS, _POOLED = "content", "pooled"
_PEERS = "prefix affinity", "balanced affinity"
ROUTERS = (_OURS, "round robin", "power of two", *_PEERS, _POOLED)
_PARTS = {"prefixes": "conversation", "content": "ragpulse"}
_TOLD_S = 2.0  # replicas tell what they hold this often
_QUEUE_SHARE = 4  # of cache_bytes, a quarter waits to be written to Redis; the rest is the memory
_REPAIR_FACTOR = 1.25  # what the simulator takes for recomputed tokens
_BARS = {"found": 0.97, "local": 1.1, "loaded": 2 / 3, "points": 3.0}


@dataclass(frozen=True)
class Answer:
    """One request, as its client saw it."""

    sent: float
    """Seconds since the first one."""
    seconds: float
    tokens: int
    memory: int
    """Tokens found in the replica's own memory."""
    redis: int
    server_seconds: float
    """To the first token, in the replica."""


@dataclass(frozen=True)
class Outcome:
    """One router's run."""

    answers: list[Answer]
    loaded_bytes: int
    """That Redis sent."""
    load_seconds: float
    declined: int
    """Chunks in Redis that were computed, as loading was expected to take longer."""
    per_replica: list[int]
    """Requests."""

    def part(self, *fields: str) -> float:
        """The share of all prompt tokens."""
        found = sum(getattr(answer, field) for answer in self.answers for field in fields)
        return float(found / sum(answer.tokens for answer in self.answers))

    @property
    def costs(self) -> tuple[float, float]:
        """Seconds for a token to compute, and to load."""
        plain = [a.server_seconds / a.tokens for a in self.answers if not a.memory and not a.redis]
        loaded = sum(answer.redis for answer in self.answers)
        return float(np.median(plain)) if plain else 1e-3, self.load_seconds / loaded if loaded else math.inf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="the traces of `eviction`")
    parser.add_argument("--ray-venv", type=Path, metavar="FOLDER", help="an environment with Ray and kvboost")
    parser.add_argument("--parts", nargs="+", choices=tuple(_PARTS), default=list(_PARTS))
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS), metavar="NAME")
    parser.add_argument("--replicas", type=positive, default=3)
    parser.add_argument("--requests", type=positive, default=400, help="of each trace (default 400)")
    parser.add_argument("--clients", type=positive, default=3, help="requests under way at a time (default 3)")
    parser.add_argument("--percent", type=float, default=1.0, help="a replica's memory, of the whole trace's footprint")
    parser.add_argument("--block-tokens", type=positive, default=16, help="for 512 tokens of a conversation (16)")
    parser.add_argument("--rag-scale", type=float, default=8.0, help="tokens of RAGPulse for one of ours (8)")
    parser.add_argument("--max-tokens", type=positive, default=600, help="of a prompt (default 600)")
    parser.add_argument("--chunk-size", type=positive, default=16, help="default 16")
    parser.add_argument("--recompute", type=share, default=0.15, help="of moved tokens (default 0.15)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--warm-up", type=positive, default=9, help="requests before (default 9), then all is cleared")
    parser.add_argument("--simulate", action="store_true", help="the simulator's shares beside the real ones")


def run(args: argparse.Namespace) -> Report:
    """Every router on the requests of each trace."""
    if args.traces is None or args.model is None:
        raise BenchError("this needs a model and traces: give --model FOLDER and --traces FOLDER")
    python, model = ray_python(args.ray_venv), args.model.expanduser().resolve()
    tokenizer = light_tokenizer(str(model))
    token_bytes = model_on_disk(ModelSource(str(model), dtype=args.dtype, device="cpu")).layout.bytes_per_token
    report, text = Report("ray_fleet"), MadeUpText(tokenizer)
    for part in args.parts:
        scale = args.rag_scale if part == "content" else BLOCK / args.block_tokens
        requests = scaled_requests(
            args.traces.expanduser(), _PARTS[part], text=text, count=args.requests, scale=scale, longest=args.max_tokens
        )
        capacity = max(int(requests.footprint * args.percent / 100), 2 * args.max_tokens)
        outcomes = {
            router: _measure(args, python, model, requests, router, memory=capacity * token_bytes, text=text)
            for router in args.routers
        }
        _tell(report, args, part, requests, outcomes, capacity=capacity, token_bytes=token_bytes)
        if args.simulate:
            _simulate(report, args, requests, outcomes, capacity=capacity, tokenizer=tokenizer)
    return report


def _engine(args: argparse.Namespace, redis: RedisServer, *, chained: bool, memory: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "dtype": args.dtype,
        "device": "cpu",
        "chunk_size": args.chunk_size,
        "cache_bytes": memory * _QUEUE_SHARE // (_QUEUE_SHARE - 1),
        "workspace_bytes": 0,  # so that all that is found locally is in the store
        "remote_url": redis.url,
    }
    if not chained:  # whatever it costs: this is about where text is found
        settings |= {"quality": "fast", "force_approx": True, "recompute_ratio": args.recompute}
    return settings


def _measure(
    args: argparse.Namespace,
    python: Path,
    model: Path,
    requests: FleetRequests,
    router: str,
    *,
    memory: int,
    text: MadeUpText,
) -> Outcome:
    """One router, from an empty fleet on."""
    pooled = router == _POOLED
    say(f"{requests.name}, {router}: starting")
    with redis_server() as redis:
        engine = _engine(args, redis, chained=requests.chained, memory=memory * (args.replicas if pooled else 1))
        replicas, named = (1, _OURS) if pooled else (args.replicas, router)
        with RayFleet(python, model, router=named, replicas=replicas, engine=engine) as fleet:
            others = [text.of(b"warm-up" + bytes([number]), args.max_tokens // 2) for number in range(args.warm_up)]
            _ask(fleet, others, clients=args.clients, label="warm-up")
            fleet.clear()
            time.sleep(2 * _TOLD_S)  # until the router knows that nobody holds anything
            counters = "kvboost_requests_total", "kvboost_tier_load_seconds_total", "kvboost_tier_loads_declined_total"
            before, sent = [fleet.metric(name) for name in counters], _bytes_sent(redis)
            answers = _ask(fleet, requests.prompts, clients=args.clients, label=f"{requests.name}, {router}")
            sent = _bytes_sent(redis) - sent
            served, load, declined = (
                {name: value - old.get(name, 0.0) for name, value in fleet.metric(counter).items()}
                for counter, old in zip(counters, before, strict=True)
            )
    per_replica = [int(served[name]) for name in sorted(served)]
    return Outcome(answers, sent, sum(load.values()), int(sum(declined.values())), per_replica)


def _ask(fleet: RayFleet, prompts: Any, *, clients: int, label: str) -> list[Answer]:
    """Every prompt once, in order, so many at a time."""
    turn, waiting = threading.Lock(), iter(enumerate(prompts))
    answers: dict[int, Answer] = {}
    progress = Progress(label, len(prompts))
    begin = time.perf_counter()

    def client() -> None:
        with httpx.Client(timeout=300) as http:
            while True:
                with turn:
                    number, prompt = next(waiting, (-1, []))
                    sent = time.perf_counter()
                if number < 0:
                    return
                told = fleet.complete(http, prompt)["usage"]
                took, reuse = time.perf_counter() - sent, told["kvboost"]
                tiers = reuse["tiers"]
                answers[number] = Answer(
                    sent=sent - begin,
                    seconds=took,
                    tokens=told["prompt_tokens"],
                    memory=tiers.get("memory", 0),
                    redis=sum(tokens for tier, tokens in tiers.items() if tier != "memory"),
                    server_seconds=reuse["ttft_ms"] / 1000,
                )
                with turn:
                    progress.step()

    with ThreadPoolExecutor(clients) as pool:
        for asking in [pool.submit(client) for _ in range(clients)]:
            try:
                asking.result()
            except httpx.HTTPError as error:
                raise BenchError(f"a request failed: {error!r}; run it again with fewer --clients") from error
    return [answers[number] for number in range(len(prompts))]


def _bytes_sent(redis: RedisServer) -> int:
    from redis import Redis

    with closing(Redis.from_url(redis.url)) as client:
        told: dict[str, Any] = client.info("stats")
    return int(told["total_net_output_bytes"])


def _tell(
    report: Report,
    args: argparse.Namespace,
    part: str,
    requests: FleetRequests,
    outcomes: dict[str, Outcome],
    *,
    capacity: int,
    token_bytes: int,
) -> None:
    columns = ["router", "own memory %", "Redis %", "loaded MB", "TTFT p50 s", "p99 s", "requests by replica"]
    table = report.table(
        f"Ray Serve, {args.replicas} replicas, {requests.name}: {len(requests.prompts)} requests",
        columns,
        dtype=args.dtype,
        model=args.model,
    )
    for router, out in outcomes.items():
        p50, p99 = np.percentile([answer.seconds for answer in out.answers], (50, 99))
        table.add(
            router,
            f"{100 * out.part('memory'):.1f}",
            f"{100 * out.part('redis'):.1f}",
            f"{out.loaded_bytes / 1e6:,.0f}",
            f"{p50:.3f}",
            f"{p99:.3f}",
            " ".join(map(str, out.per_replica)),
        )
        report.raw[f"{part} {router}"] = {**asdict(out), "costs": out.costs}
    own, lengths = 100 * capacity / requests.own_footprint, [len(prompt) for prompt in requests.prompts]
    where = (
        "as prefixes" if requests.chained else f"wherever it stands, {args.recompute:.0%} of moved tokens recomputed"
    )
    table.notes.append(
        f"Memory of a replica: {capacity:,} tokens ({capacity * token_bytes / 1e6:,.0f} MB), {args.percent:g} % of the "
        f"trace's footprint and {own:.0f} % of that of these requests. Prompts of {np.mean(lengths):.0f} tokens, at "
        f"most {max(lengths)}; text is reused {where}. {args.clients} clients. Loaded: bytes that Redis sent. Times "
        "are the clients'; all replicas share this machine's cores. Chunks in Redis that were computed, as loading was "
        f"expected to take longer: {', '.join(f'{router} {out.declined}' for router, out in outcomes.items())}."
    )
    _judge(report, part, outcomes)


def _judge(report: Report, part: str, outcomes: dict[str, Outcome]) -> None:
    """The bars of this part, where their routers were run."""
    table = report.table(f"Bars, {part}", ["what", "measured", "bar", "held"])

    def bar(what: str, value: float, limit: float, *, most: bool = False) -> None:
        held = value <= limit if most else value >= limit
        report.failed |= not held
        table.add(what, f"{value:.3f}", f"{'at most' if most else 'at least'} {limit:.3g}", "yes" if held else "no")

    def ratio(upper: float, lower: float) -> float:
        return upper / lower if lower else math.nan  # which holds no bar

    ours, pooled = outcomes.get(_OURS), outcomes.get(_POOLED)
    peers = {name: outcomes[name] for name in _PEERS if name in outcomes}
    if part == "prefixes" and ours and pooled:
        found = [out.part("memory", "redis") for out in (ours, pooled)]
        bar("found in memory or Redis, ours / pooled", ratio(*found), _BARS["found"])
        table.notes.append(f"In own memory alone: {ratio(ours.part('memory'), pooled.part('memory')):.3f}.")
    if part == "content" and ours and peers:
        most = max(peer.part("memory") for peer in peers.values())
        least = min(peer.loaded_bytes for peer in peers.values())
        bar("found in own memory, ours / best affinity", ratio(ours.part("memory"), most), _BARS["local"])
        bar("bytes from Redis, ours / best affinity", ratio(ours.loaded_bytes, least), _BARS["loaded"], most=True)
    if not table.rows:
        report.tables.remove(table)


def _simulate(
    report: Report,
    args: argparse.Namespace,
    requests: FleetRequests,
    outcomes: dict[str, Outcome],
    *,
    capacity: int,
    tokenizer: Any,
) -> None:
    """The simulator on the same requests, at the times at which they were really sent, with the costs they had."""
    strategies: dict[str, Strategy] = {
        _OURS: expected_seconds(shared=True),
        "round robin": round_robin(),
        "power of two": power_of_two(),
        "prefix affinity": ray_affinity(),
        _POOLED: round_robin(),
    }
    columns = ["router", "own memory, real %", "simulated %", "points apart", "Redis, real %", "simulated %"]
    table = report.table(f"Simulated, {requests.name}", columns)
    for router, out in outcomes.items():
        if router not in strategies:
            continue
        pooled = router == _POOLED
        compute, load = out.costs
        fleet = Fleet(
            1 if pooled else args.replicas,
            capacity * (args.replicas if pooled else 1),
            RouteCosts(compute, args.recompute * _REPAIR_FACTOR * compute, load),
            requests.chained,
            event_delay=_TOLD_S / 2,
        )
        arrivals = [answer.sent for answer in out.answers]
        again = simulated_requests(requests, tokenizer, chunk_size=args.chunk_size, arrivals=arrivals)
        found = Simulation(fleet, strategies[router], count=len(again), shared=True).run(again)
        real, simulated = 100 * out.part("memory"), 100 * found.local / found.tokens
        table.add(
            router,
            f"{real:.1f}",
            f"{simulated:.1f}",
            f"{simulated - real:+.1f}",
            f"{100 * out.part('redis'):.1f}",
            f"{100 * found.shared / found.tokens:.1f}",
        )
        report.raw[f"simulated {requests.name} {router}"] = {"local": simulated, "arrivals": arrivals}
        report.failed |= abs(simulated - real) > _BARS["points"]
    table.notes.append(
        f"Bar: own memory at most {_BARS['points']:g} points apart. Seconds per token are those measured."
    )
