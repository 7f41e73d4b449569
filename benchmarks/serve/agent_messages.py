"""An agent's loop over /v1/messages: first tokens of a server that keeps KV against one that is cleared each time.

Two `kvboost serve` processes on one machine take the same requests in turn. A request is the system prompt, the tools,
the task, and all calls with their results so far, in Anthropic's shape; calls and results are made up. The answer is
streamed, and a first token has come when the client has text or a call. Greedy answers of both servers must be equal.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common.measure import DTYPES, positive
from benchmarks.common.report import BenchError, Progress, Report
from kvboost.bench.workloads import Writer
from kvboost.hf.loading import ModelSource, load_tokenizer
from tests.helpers.serving import kvboost_serve

QUICK = {"tokens": 300, "calls": 2, "loops": 1, "new": 2}
_TOOLS = 6


@dataclass(frozen=True)
class Step:
    """One request to one server."""

    call: int
    seconds: float
    prompt: int
    cached: int
    said: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--tokens", type=positive, default=2000, help="of the longest prompt, about (default 2000)")
    parser.add_argument("--calls", type=positive, default=8, help="of tools in a loop (default 8)")
    parser.add_argument("--loops", type=positive, default=3, help="tasks behind the same system prompt (default 3)")
    parser.add_argument("--new", type=positive, default=16, help="tokens of an answer (default 16)")


def run(args: argparse.Namespace) -> Report:
    """Every loop on both servers, request by request."""
    if args.model is None:
        raise BenchError("this needs a model: give --model FOLDER")
    tokenizer = load_tokenizer(ModelSource(str(args.model)))
    takes_tools = "tools" in str(getattr(tokenizer, "chat_template", None) or "")
    requests = _requests(Writer(tokenizer, seed=1), args, takes_tools=takes_tools)
    told: dict[str, list[Step]] = {"keeps": [], "cleared": []}
    with ExitStack() as stack:
        servers = {}
        for name in told:
            server = stack.enter_context(kvboost_serve(args.model, ["--dtype", args.dtype]))
            servers[name] = stack.enter_context(httpx.Client(base_url=server.url, timeout=600))
            _ask(servers[name], 0, {**requests[0][1], "system": "Warm up.", "messages": requests[0][1]["messages"][:1]})
            _clear(servers[name])
        progress = Progress("requests", 2 * len(requests))
        for number, (call, body) in enumerate(requests):
            names = list(told) if number % 2 else list(told)[::-1]
            for name in names:
                if name == "cleared":
                    _clear(servers[name])
                told[name].append(_ask(servers[name], call, body))
                progress.step()
    return _report(args, told, takes_tools=takes_tools)


def _requests(writer: Writer, args: argparse.Namespace, *, takes_tools: bool) -> list[tuple[int, dict[str, Any]]]:
    """The bodies in the order they are sent, each with the number of calls behind it."""
    system = "You work in steps and call tools. " + writer.prose(round(0.2 * args.tokens))
    schema = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    tools = [
        {"name": f"tool_{number}", "description": writer.fact()[1], "input_schema": schema} for number in range(_TOOLS)
    ]
    fixed: dict[str, Any] = {"model": "model", "max_tokens": args.new, "temperature": 0, "stream": True}
    if takes_tools:
        fixed["tools"] = tools
    else:
        system += "\nTools: " + json.dumps(tools)
    requests: list[tuple[int, dict[str, Any]]] = []
    for _ in range(args.loops):
        messages: list[dict[str, Any]] = [{"role": "user", "content": writer.prose(40)}]
        for call in range(args.calls):
            requests.append((call, {**fixed, "system": system, "messages": list(messages)}))
            result = writer.prose(round(0.6 * args.tokens / args.calls))
            messages += _called(call, writer.fact()[1], result, takes_tools=takes_tools)
    return requests


def _called(number: int, query: str, result: str, *, takes_tools: bool) -> list[dict[str, Any]]:
    """A call and what came of it, in blocks where the model's template has them."""
    name, key = f"tool_{number % _TOOLS}", f"call_{number}"
    if not takes_tools:
        call, answer = f"{name}({query!r})", f"Result: {result}"
        return [{"role": "assistant", "content": call}, {"role": "user", "content": answer}]
    use = {"type": "tool_use", "id": key, "name": name, "input": {"query": query}}
    back = {"type": "tool_result", "tool_use_id": key, "content": result}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [back]}]


def _clear(client: httpx.Client) -> None:
    client.post("/v1/cache/clear").raise_for_status()


def _ask(client: httpx.Client, call: int, body: dict[str, Any]) -> Step:
    """Stream one answer. Raises BenchError for a request that the server refuses."""
    began, first = time.perf_counter(), None
    usage: dict[str, int] = {}
    said: list[str] = []
    with client.stream("POST", "/v1/messages", json=body) as reply:
        if reply.status_code != 200:
            raise BenchError(f"/v1/messages answered {reply.status_code}: {reply.read().decode()[:300]}")
        for line in reply.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "content_block_delta" or event.get("content_block", {}).get("type") == "tool_use":
                first = first if first is not None else time.perf_counter() - began
                said.append(json.dumps(event.get("delta") or event["content_block"]["name"]))
            usage |= (event.get("message") or event).get("usage") or {}
    whole = time.perf_counter() - began
    cached = usage.get("cache_read_input_tokens", 0)
    prompt = usage["input_tokens"] + cached + usage.get("cache_creation_input_tokens", 0)
    return Step(call, whole if first is None else first, prompt, cached, " ".join(said))


def _report(args: argparse.Namespace, told: dict[str, list[Step]], *, takes_tools: bool) -> Report:
    report = Report("agent_messages")
    table = report.table(
        f"/v1/messages, {args.loops} loops of {args.calls} requests: TTFT of a cleared server / of one that keeps",
        ["calls so far", "prompt tokens", "cached %", "cleared s", "keeps s", "ratio [spread]"],
        dtype=args.dtype,
        model=args.model,
    )
    pairs = list(zip(told["keeps"], told["cleared"], strict=True))
    for call in (*range(args.calls), None):
        # The first request of the first loop finds nothing on either server.
        some = [pair for pair in pairs[1:] if call is None or pair[0].call == call]
        if not some:
            continue
        ratios = [cleared.seconds / kept.seconds for kept, cleared in some]
        cached = sum(kept.cached for kept, _ in some) / sum(kept.prompt for kept, _ in some)
        table.add(
            "all" if call is None else call,
            f"{np.median([kept.prompt for kept, _ in some]):.0f}",
            f"{100 * cached:.0f}",
            f"{np.median([cleared.seconds for _, cleared in some]):.3f}",
            f"{np.median([kept.seconds for kept, _ in some]):.3f}",
            f"{np.median(ratios):.1f} [{min(ratios):.1f} {max(ratios):.1f}]",
        )
    same = sum(kept.said == cleared.said for kept, cleared in pairs)
    stale = sum(cleared.cached > 0 for _, cleared in pairs)
    report.failed |= same < len(pairs) or stale > 0
    table.notes.append(
        f"Equal answers: {same} of {len(pairs)}. First request of all, which nobody had seen: "
        f"{pairs[0][1].seconds / pairs[0][0].seconds:.2f}. "
        + ("Tools, calls and results as blocks." if takes_tools else "The template takes no tools: they are text.")
    )
    report.raw |= {name: [asdict(step) for step in steps] for name, steps in told.items()}
    return report
