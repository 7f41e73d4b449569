"""Tokens per second of many requests decoded together, against Transformers' generate over one padded batch.

Both decode greedily behind prompts that are in place: ours stored, as after an earlier request, theirs in a cache that
was filled before. In turns, from the caller's side. Two rates: while all requests are decoding, and over the whole
call, which for us is everything from submit on. A single request is held against generate in the same way. Run it alone
on the machine.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common.measure import TextSource, add_model_arguments, load_engine, positive
from benchmarks.common.report import Report
from benchmarks.internals import BatchRunner, Job, NewToken, stock_cache
from kvboost.bench.report import Spread, ratios, say
from kvboost.engine import KVBoost

QUICK = {"jobs": 3, "context": 100, "spread": 20, "new": 6, "rounds": 1, "dtype": "float32", "bar": 0.0}

_GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
_BATCH_BAR, _SINGLE_BAR = 0.9, 0.98


class Stamps:
    """When each step of a generate ended: a stopping criterion that never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def rate(self, sequences: int) -> float:
        """Tokens per second behind the first one."""
        return sequences * (len(self.times) - 1) / (self.times[-1] - self.times[0])


class PaddedBatch:
    """Plain Transformers: left-padded prompts whose KV is in place, all but the last token."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._model, longest = model, max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._ids, self._mask = (torch.tensor(rows, device=model.device) for rows in (padded, seen))
        self._cache = stock_cache()
        mask = self._mask[:, :-1]
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            model(
                input_ids=self._ids[:, :-1],
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._cache,
                logits_to_keep=1,
            )

    def generate(self, new: int) -> tuple[float, float]:
        """Tokens per second behind the first token, and over the whole call."""
        stamps, begin = Stamps(), time.perf_counter()
        self._model.generate(
            self._ids,
            attention_mask=self._mask,
            past_key_values=self._cache,
            max_new_tokens=new,
            stopping_criteria=[stamps],
            **_GREEDY,
        )
        took = time.perf_counter() - begin
        self._cache.crop(-new)
        return stamps.rate(len(self._ids)), len(self._ids) * new / took


def batched(engine: KVBoost, prompts: Sequence[Sequence[int]], new: int) -> tuple[float, float]:
    """The same of ours: tokens per second while all are decoding, and from submit to the last token."""
    times: list[list[float]] = [[] for _ in prompts]
    with BatchRunner(engine, max_running=len(prompts)) as runner:
        begin = time.perf_counter()

        def client(index: int) -> None:
            for event in runner.submit(Job(token_ids=tuple(prompts[index]), max_new_tokens=new)).events():
                if isinstance(event, NewToken):
                    times[index].append(time.perf_counter())

        clients = [threading.Thread(target=client, args=(index,)) for index in range(len(prompts))]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
    start, end = max(own[0] for own in times), min(own[-1] for own in times)
    during = sum(start < at <= end for own in times for at in own)
    return during / (end - start), len(prompts) * new / (max(own[-1] for own in times) - begin)


def single(engine: KVBoost, prompt: Sequence[int], new: int) -> tuple[float, float]:
    """One request through engine.generate."""
    stamps, begin = Stamps(), time.perf_counter()
    engine.generate(list(prompt), max_new_tokens=new, stopping_criteria=[stamps], **_GREEDY)
    return stamps.rate(1), new / (time.perf_counter() - begin)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--jobs", type=positive, default=16, help="default: 16")
    parser.add_argument("--context", type=positive, default=1000, help="tokens of the longest prompt (default 1000)")
    parser.add_argument(
        "--spread",
        type=int,
        default=0,
        help="how much shorter the shortest is; at 0 (the default) plain Transformers needs no mask, which it is "
        "much faster without",
    )
    parser.add_argument("--new", type=positive, default=48, help="tokens to decode (default 48)")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument(
        "--bar", type=float, default=1.0, help="share of the bars (0.9 and 0.98 of plain) to pass at (default 1)"
    )


def run(args: argparse.Namespace) -> Report:
    """Plain and ours in turns, for the batch and for a single request."""
    report = Report("batched_decoding")
    with load_engine(args, dtype=args.dtype) as engine:
        source = TextSource(engine.tokenizer, args.text)
        lengths = [args.context - args.spread * job // max(args.jobs - 1, 1) for job in range(args.jobs)]
        prompts = [source.window(job * args.context, length) for job, length in enumerate(lengths)]
        say("reading the prompts")
        padded, one = PaddedBatch(engine.model, prompts), PaddedBatch(engine.model, prompts[:1])
        for prompt in prompts:
            engine.warm(prompt)
        contests = {
            f"{args.jobs} requests": (
                lambda: padded.generate(args.new),
                lambda: batched(engine, prompts, args.new),
                _BATCH_BAR,
            ),
            "one request": (lambda: one.generate(args.new), lambda: single(engine, prompts[0], args.new), _SINGLE_BAR),
        }
        table = report.table(
            f"Tokens/s behind {min(lengths)} to {max(lengths)} tokens, median [min max] of {args.rounds} rounds",
            ["what", "plain", "KVBoost", "ratio", "whole call: plain", "KVBoost", "ratio"],
            dtype=args.dtype,
            model=args.model,
        )
        for what, (theirs, ours, bar) in contests.items():
            theirs(), ours()  # not counted
            pairs = []
            for number in range(args.rounds):
                say(f"{what}, round {number + 1}")
                if number % 2:
                    mine = ours()
                    pairs.append((theirs(), mine))
                else:
                    pairs.append((theirs(), ours()))
            report.raw = {**(report.raw or {}), what: pairs}
            cells = []
            for kind in range(2):
                plain, mine_all = [pair[0][kind] for pair in pairs], [pair[1][kind] for pair in pairs]
                share = Spread.of(ratios(mine_all, plain))
                cells += [Spread.of(plain).text(1), Spread.of(mine_all).text(1), share.text()]
                if kind == 0 and share.median < args.bar * bar:
                    report.failed = True
            table.add(what, *cells)
    return report
