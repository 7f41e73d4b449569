"""A chat of several turns against a ``DynamicCache`` kept by hand, and against plain Transformers.

A hand-kept cache is the least anybody can do: each turn computes the new message alone. The engine is given the whole
conversation as tokens, finds what it has read, and reads the last answer once more, because the KV of decoded tokens
rounds otherwise. All three see the same tokens, and answer each turn next to each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.measure import TextSource, add_model_arguments, load_engine, positive, wall_ms
from benchmarks.common.report import Progress, Report
from benchmarks.internals import stock_cache
from kvboost.bench.report import Machine, Spread, Table, describe_machine, ratios
from kvboost.engine import KVBoost

QUICK = {"turns": 2, "repeat": 1, "system": 100, "message": 30, "answer": 4, "dtype": ["float32"]}

Times = dict[str, list[list[float]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser, dtypes=("float32", "bfloat16"))
    parser.add_argument("--turns", type=positive, default=8, help="turns of a chat (default 8)")
    parser.add_argument("--system", type=positive, default=300, help="tokens before the first message (default 300)")
    parser.add_argument("--message", type=positive, default=150, help="tokens of a message (default 150)")
    parser.add_argument("--answer", type=positive, default=24, help="tokens of an answer (default 24)")
    parser.add_argument("--repeat", type=positive, default=5, help="chats measured (default 5)")


def run(args: argparse.Namespace) -> Report:
    """Measure every dtype."""
    report = Report("chat_turns")
    for dtype in args.dtype:
        engine = load_engine(args, dtype=dtype, cache_bytes="4GiB")
        source = TextSource(engine.tokenizer, args.text)
        times: Times = {name: [[] for _ in range(args.turns)] for name in ("ours", "by hand", "plain")}
        lengths: list[int] = []
        progress = Progress(f"chats, {dtype}", total=(args.repeat + 1) * args.turns)
        for chat in range(args.repeat + 1):  # the first one warms up
            lengths = _chat(engine, source, args, times, first=chat % 3, progress=progress)
        for turns in times.values():
            for samples in turns:
                del samples[0]
        report.tables.append(_table(times, lengths, describe_machine(dtype=dtype, model=str(args.model))))
        report.raw[dtype] = {"prompt": lengths, **times}
    return report


def _chat(
    engine: KVBoost, source: TextSource, args: argparse.Namespace, times: Times, *, first: int, progress: Progress
) -> list[int]:
    """One chat. Returns the length of each turn's prompt."""
    engine.clear()
    tokens = source.window(0, args.system)
    cache = stock_cache()
    lengths = []
    for turn in range(args.turns):
        tokens = tokens + source.window(1 + turn, args.message)
        lengths.append(len(tokens))
        ids = torch.tensor([tokens])
        callers: list[tuple[str, Callable[[], Any]]] = [
            ("ours", lambda tokens=tokens: engine.generate(tokens, max_new_tokens=1, temperature=0)),
            ("by hand", lambda ids=ids: _generate(engine, ids, 1, past_key_values=cache)),
            ("plain", lambda ids=ids: _generate(engine, ids, 1)),
        ]
        for name, call in callers[first:] + callers[:first]:
            times[name][turn].append(wall_ms(call))
        # The answer, untimed, on the cache kept by hand: it holds all but the newest token of it then.
        answered = _generate(engine, ids, args.answer, min_new_tokens=args.answer, past_key_values=cache)
        tokens = answered[0].tolist()
        progress.step()
    return lengths


def _generate(engine: KVBoost, ids: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    """Plain Transformers."""
    cache = options.get("past_key_values")
    if cache is not None and (behind := cache.get_seq_length() - ids.shape[1] + 1) > 0:
        cache.crop(-behind)  # the last token is computed again, for its logits
    wanted = {"max_new_tokens": count, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    result: torch.Tensor = engine.model.generate(ids, **wanted)
    return result


def _table(times: Times, lengths: list[int], machine: Machine) -> Table:
    columns = ["turn", "prompt", "plain ms", "by hand ms", "kvboost ms", "kvboost / by hand", "plain / kvboost"]
    table = Table("A chat", machine, columns)
    for turn, length in enumerate(lengths):
        ours, by_hand, plain = (times[name][turn] for name in ("ours", "by hand", "plain"))
        table.add(
            turn + 1,
            length,
            Spread.of(plain).text(0),
            Spread.of(by_hand).text(0),
            Spread.of(ours).text(0),
            Spread.of(ratios(ours, by_hand)).text(3),
            Spread.of(ratios(plain, ours)).text(1),
        )
    table.notes.append(
        "Whole calls for one new token, storing included; cells are median [min max]. The cache kept by hand holds the "
        "answers as they were decoded; the engine reads each answer once more."
    )
    return table
