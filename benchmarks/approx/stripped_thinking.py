"""A chat with tools whose earlier thinking is stripped: non-prefix reuse against exact reuse only.

Within a turn the prompt holds what the model thought before it called its tool; from
the next user message on, all earlier thinking is gone and what stood behind it has other positions. Invariant:
both engines see the same requests, in the same order, each with a store of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common.measure import (
    TextSource,
    add_model_arguments,
    engine_beside,
    first_token,
    joined,
    load_engine,
    positive,
)
from benchmarks.common.report import Progress, Report
from kvboost.bench.report import Spread, Table, describe_machine, ratios
from kvboost.types import GenerationResult

QUICK = {"turns": 2, "chats": 1}

_SYSTEM, _USER, _THOUGHT, _CALL, _TOOL, _ANSWER = 150, 40, 120, 30, 400, 80  # tokens of each part
_EXACT, _APPROX = 'quality="exact"', 'quality="high"'


@dataclass(frozen=True)
class _Turn:
    user: list[int]
    thought: list[int]
    call: list[int]
    tool: list[int]
    answer: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.add_argument("--turns", type=positive, default=6, help="user messages (default 6)")
    parser.add_argument("--chats", type=positive, default=7, help="chats, each with text of its own (default 7)")


def run(args: argparse.Namespace) -> Report:
    """Both engines through the same chats, request by request."""
    report = Report("stripped_thinking", raw={"samples": []})
    engines = {_EXACT: load_engine(args, dtype=args.dtype)}
    engines[_APPROX] = engine_beside(engines[_EXACT], quality="high")
    source = TextSource(engines[_EXACT].tokenizer, args.text)
    progress = Progress("chats", args.chats)
    first: dict[str, dict[int, list[GenerationResult]]] = {
        name: {turn: [] for turn in range(1, args.turns + 1)} for name in engines
    }
    for chat in range(args.chats):
        for engine in engines.values():
            engine.clear()
        for turn, is_first, tokens, ends in _requests(source, chat, turns=args.turns):
            # The first to go changes from request to request.
            order = list(engines) if (turn + is_first) % 2 else list(reversed(engines))
            for name in order:
                result = first_token(engines[name], tokens, boundaries=ends[:-1])
                if is_first:
                    first[name][turn].append(result)
                    report.raw["samples"].append(_record(chat, turn, name, result))
        progress.step()
    report.tables.append(_table(first, args, describe_machine(dtype=args.dtype, model=str(args.model))))
    return report


def _requests(source: TextSource, chat: int, *, turns: int) -> Iterator[tuple[int, bool, list[int], list[int]]]:
    """Every request of a chat: its turn, whether it is the turn's first, tokens and the ends of its messages."""
    position = chat * (turns * (_USER + _THOUGHT + _CALL + _TOOL + _ANSWER) + _SYSTEM)

    def take(length: int) -> list[int]:
        nonlocal position
        position += length
        return source.window(position - length, length)

    stripped = [take(_SYSTEM)]
    for number in range(1, turns + 1):
        turn = _Turn(take(_USER), take(_THOUGHT), take(_CALL), take(_TOOL), take(_ANSWER))
        yield number, True, *joined([*stripped, turn.user])
        yield number, False, *joined([*stripped, turn.user, turn.thought, turn.call, turn.tool])
        stripped += [turn.user, turn.call, turn.tool, turn.answer]


def _record(chat: int, turn: int, name: str, result: GenerationResult) -> dict[str, Any]:
    reuse = result.reuse
    counts = {"exact": reuse.exact_tokens, "moved": reuse.moved_tokens, "recomputed": reuse.recomputed_tokens}
    return {"chat": chat, "turn": turn, "engine": name, "ttft_ms": result.ttft_ms, **counts}


def _table(first: dict[str, dict[int, list[GenerationResult]]], args: argparse.Namespace, machine: Any) -> Table:
    table = Table(
        f"Stripped thinking: the first request of each turn, {args.chats} chats",
        machine,
        ["turn", "prompt", "exact only: reused", "TTFT ms", "non-prefix too: reused", "TTFT ms", "exact / non-prefix"],
    )
    for turn in range(1, args.turns + 1):
        exact, approx = first[_EXACT][turn], first[_APPROX][turn]
        times = [[result.ttft_ms for result in results] for results in (exact, approx)]
        shares = [sum(r.kv_reuse_ratio for r in results) / len(results) for results in (exact, approx)]
        table.add(
            str(turn),
            str(exact[0].prompt_tokens),
            f"{shares[0]:.0%}",
            Spread.of(times[0]).text(1),
            f"{shares[1]:.0%}",
            Spread.of(times[1]).text(1),
            Spread.of(ratios(times[0], times[1])).text(),
        )
    table.notes.append(
        f"A turn: user {_USER} tokens, thinking {_THOUGHT}, tool call {_CALL}, tool result {_TOOL}, answer {_ANSWER}; "
        "the second request of a turn holds its thinking, later turns do not. Median [lowest highest] over chats."
    )
    return table
