"""vLLM's HTTP server with our connector against the same server without: after a restart, and on prompts never seen.

Two servers, asked in turn by streaming clients; vLLM's own prefix cache is on in both. TTFT is from the call to the
first token on the socket. After a restart: the server with the connector is started anew for every pair, the other
one's prefix cache is emptied. Never seen: random tokens, 16 clients, the connector with a disk or a Redis behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.common.measure import positive
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.common.vllm_engine import lasting_tiers, random_prompt, vllm_python
from benchmarks.common.vllm_server import MODEL_NAME, vllm_server
from kvboost.bench.report import Spread, ratios

QUICK = {"repeat": 1, "clients": 2, "tokens": 200}
_SHORT, _NEW = 200, 32
_TIMEOUT_S = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--vllm-venv", type=Path, metavar="FOLDER", help="an environment with vLLM and kvboost")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=positive, default=2000, help="of a prompt that was read before")
    parser.add_argument("--clients", type=positive, default=16, help="at once, for prompts never seen (default 16)")
    parser.add_argument("--repeat", type=positive, default=3, help="pairs (default 3)")
    parser.add_argument("--parts", nargs="+", default=["restart", "new"], choices=("restart", "new"))


def run(args: argparse.Namespace) -> Report:
    """Every part in turn."""
    if args.model is None:
        raise BenchError("give --model FOLDER")
    vllm_python(args.vllm_venv)
    report = Report("vllm_http")
    parts = {"restart": _restart, "new": _new}
    for part in args.parts:
        parts[part](args, report)
    return report


@dataclass(frozen=True)
class _Answer:
    ttft_s: float
    cached: int


async def _ask(client: httpx.AsyncClient, url: str, tokens: Sequence[int], *, new: int) -> _Answer:
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": new, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    began, first, cached = time.perf_counter(), None, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise BenchError(f"the server answered {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line.removeprefix("data: "))
            if part["choices"] and first is None:
                first = time.perf_counter() - began
            if usage := part.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if first is None:
        raise BenchError("the server sent no token")
    return _Answer(first, cached)


async def _together(url: str, prompts: Sequence[Sequence[int]], *, new: int) -> list[_Answer]:
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits, trust_env=False) as client:
        return list(await asyncio.gather(*(_ask(client, url, prompt, new=new) for prompt in prompts)))


def _answers(url: str, *prompts: Sequence[int], new: int = 1) -> list[_Answer]:
    return asyncio.run(_together(url, prompts, new=new))


def _server(args: argparse.Namespace, connector: dict[str, Any] | None) -> AbstractContextManager[str]:
    options = ["--dtype", args.dtype, "--max-model-len", "4096", "--max-num-batched-tokens", "4096"]
    return vllm_server(vllm_python(args.vllm_venv), args.model.expanduser(), *options, connector=connector)


def _restart(args: argparse.Namespace, report: Report) -> None:
    table = report.table(
        f"After a restart of the server: {args.tokens} tokens read before, first token",
        ["KV from", "reused", "vLLM alone s", "with the connector s", "alone / with"],
        dtype=args.dtype,
        model=args.model,
    )
    prompt = random_prompt(0, args.tokens)
    with lasting_tiers() as places, _server(args, None) as alone:
        _answers(alone, random_prompt(2, args.tokens))  # its kernels' first use
        for name, connector in places.items():
            with _server(args, connector) as first:
                _answers(first, prompt)
            progress = Progress(f"restart, {name}", args.repeat)
            plain, ours, reused = [], [], []
            for number in range(args.repeat):
                with _server(args, connector) as again:
                    _answers(again, random_prompt(1, 200))  # its kernels' first use
                    httpx.post(f"{alone}/reset_prefix_cache", timeout=60, trust_env=False).raise_for_status()
                    pair = [alone, again] if number % 2 else [again, alone]
                    times = {url: _answers(url, prompt)[0] for url in pair}
                    if times[alone].cached:
                        raise BenchError("vLLM's own prefix cache was not emptied")
                    plain.append(times[alone].ttft_s)
                    ours.append(times[again].ttft_s)
                    reused.append(times[again].cached)
                    progress.step()
            table.add(
                name,
                Spread.of(reused).text(0),
                Spread.of(plain).text(),
                Spread.of(ours).text(),
                Spread.of(ratios(plain, ours)).text(1),
            )


def _new(args: argparse.Namespace, report: Report) -> None:
    table = report.table(
        f"Never seen before: {args.clients} clients, {_SHORT} tokens, {_NEW} new, the connector on against off",
        [
            "KV goes to",
            "off: TTFT s",
            "on: TTFT s",
            "TTFT off / on",
            "off: tokens/s",
            "on: tokens/s",
            "tokens/s on / off",
        ],
        dtype=args.dtype,
        model=args.model,
    )
    seed = 100
    with lasting_tiers() as places, _server(args, None) as off:
        for name, connector in {"memory": {}, **places}.items():
            with _server(args, connector) as on:
                first: dict[str, list[float]] = {off: [], on: []}
                rates: dict[str, list[float]] = {off: [], on: []}
                progress = Progress(f"new prompts, {name}", args.repeat + 1)
                for number in range(args.repeat + 1):
                    prompts = [random_prompt(seed + i, _SHORT) for i in range(args.clients)]
                    seed += args.clients
                    for url in (off, on) if number % 2 else (on, off):
                        began = time.perf_counter()
                        answers = _answers(url, *prompts, new=_NEW)
                        rate = args.clients * _NEW / (time.perf_counter() - began)
                        if number:  # the first pair warms both up
                            first[url].append(median(answer.ttft_s for answer in answers))
                            rates[url].append(rate)
                    progress.step()
            table.add(
                name,
                Spread.of(first[off]).text(),
                Spread.of(first[on]).text(),
                Spread.of(ratios(first[off], first[on])).text(),
                Spread.of(rates[off]).text(1),
                Spread.of(rates[on]).text(1),
                Spread.of(ratios(rates[on], rates[off])).text(),
            )
    table.notes.append("TTFT: the median over the clients of a round; median [min max] over rounds.")
