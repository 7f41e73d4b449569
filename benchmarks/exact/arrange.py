"""Exact reuse of a RAG trace by the order of its parts: as sent, volatile text last, passages arranged.

RAGPulse names the parts of 7,106 prompts by id and length. Every id becomes made-up tokens of that length, and the
prompts go through the engine's chunking and keys with a store that keeps everything. A part of the system prompt is
volatile if it stands in fewer than one in a hundred requests, as one with a date or an id does: its author knows it.
With ``--model`` the first prompts also run on that model, as sent and arranged in turn, each with a cache of its own.
Invariant: a request finds nothing of itself, and an order depends on earlier requests alone.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.approx.hit_rate import Store
from benchmarks.common.measure import DTYPES, add_engine_arguments, first_token, load_engine, positive
from benchmarks.common.ragpulse import KINDS, Part, by_kind, part_tokens, prompt_of, read_trace
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.internals import ContentChunker, ServedPaths, chunk_keys, reusable_chunks
from kvboost.bench.report import Spread, ratios
from kvboost.engine import KVBoost
from kvboost.types import Chunk

_ROOT = hashlib.sha256(b"benchmarks.exact.arrange").digest()
_BAR = 42.0
_VOLATILE = 0.01
_SYSTEM, _PASSAGE = 0, 1
_SENT, _LAST, _ARRANGED, _ANYWHERE = "as sent", "volatile last", "arranged", "as sent, anywhere"
QUICK = {"measured": 6}

Parts = Sequence[Part]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="the folder of traces, with RAGPulse in ragpulse")
    parser.add_argument("--requests", type=positive, help="how many requests, from the first on (default all)")
    parser.add_argument("--chunk-size", type=positive, default=128, help="tokens per chunk on average (default 128)")
    add_engine_arguments(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of that model (default float32)")
    parser.add_argument(
        "--measured", type=positive, default=60, help="how many prompts with passages run on the model (default 60)"
    )


def run(args: argparse.Namespace) -> Report:
    """Replay the trace in every order; then on a model, if there is one."""
    requests = read_trace(args.traces, limit=args.requests)
    report = Report("arrange")
    _replay(report, requests, args)
    if args.model is not None:
        _measure(report, requests, args)
    return report


class Orders:
    """Every request in its three orders; fed in the order of the trace."""

    def __init__(self, requests: Sequence[Parts]) -> None:
        counts = Counter(part.id for parts in requests for part in parts if part.kind == _SYSTEM)
        self._rare = {part_id for part_id, count in counts.items() if count < _VOLATILE * len(requests)}
        self._paths = ServedPaths()

    def of(self, parts: Parts) -> dict[str, list[Part]]:
        """The same parts: as sent, volatile ones behind the passages, and the passages arranged."""
        head = [part for part in parts if part.kind == _SYSTEM and part.id not in self._rare]
        volatile = [part for part in parts if part.kind == _SYSTEM and part.id in self._rare]
        passages = [part for part in parts if part.kind == _PASSAGE]
        others = [part for part in parts if part.kind not in (_SYSTEM, _PASSAGE)]
        order = self._paths.arrange(
            repr([part.id for part in head]).encode(),
            [str(part.id).encode() for part in passages],
            tokens=lambda index: passages[index].tokens,
        )
        arranged = [passages[index] for index in order.indexes]
        return {
            _SENT: list(parts),
            _LAST: [*head, *passages, *volatile, *others],
            _ARRANGED: [*head, *arranged, *volatile, *others],
        }


def _replay(report: Report, requests: Sequence[Parts], args: argparse.Namespace) -> None:
    orders = Orders(requests)
    stores = {name: Store(anywhere=False, keep_approximate=True) for name in (_SENT, _LAST, _ARRANGED)}
    anywhere = Store(anywhere=True, keep_approximate=True)
    chunker = ContentChunker(args.chunk_size)
    total = np.zeros(len(KINDS), dtype=np.int64)
    found = {name: total.copy() for name in (*stores, _ANYWHERE)}
    text = lru_cache(maxsize=None)(part_tokens)
    progress = Progress("requests", len(requests))

    def count(name: str, store: Store, usable: Sequence[Chunk], kinds: Any) -> None:
        for chunk in (chunk for chunks in store.lookup(usable) for chunk in chunks):
            found[name] += by_kind(kinds[chunk.start : chunk.end])

    for parts in requests:
        for name, ordered in orders.of(parts).items():
            tokens, kinds, ends = prompt_of(ordered, text)
            chunks = chunk_keys(_ROOT, tokens, chunker.cut(tokens, ends))
            usable = reusable_chunks(chunks, prompt_tokens=len(tokens))
            count(name, stores[name], usable, kinds)
            if name == _SENT:
                count(_ANYWHERE, anywhere, usable, kinds)
                total += by_kind(kinds)
        progress.step()
    labels = [kind.label for kind in KINDS]
    report.raw["tokens"] = dict(zip(labels, map(int, total), strict=True))
    report.raw["reused"] = {name: dict(zip(labels, map(int, counts), strict=True)) for name, counts in found.items()}
    title = "Reused, % of tokens, unlimited capacity"
    table = report.table(title, ["order of the parts", "all", *labels])
    for name, counts in found.items():
        shares = [f"{100 * part / whole:.1f}" if whole else "-" for part, whole in zip(counts, total, strict=True)]
        table.add(name, f"{100 * counts.sum() / total.sum():.1f}", *shares)
    table.add("tokens in the trace", f"{total.sum():,}", *(f"{count:,}" for count in total))
    table.notes.append(
        f"{len(requests):,} requests in the trace's order, cut at the ends of their parts and into chunks of "
        f"{args.chunk_size}. The first three rows are exact reuse; the last adds chunks known from other positions. "
        f"Bar for the whole trace: arranged {_BAR:.0f} % of all tokens."
    )
    if args.requests is None and len(requests) > 7000:
        report.failed = 100 * found[_ARRANGED].sum() < _BAR * total.sum()


def _measure(report: Report, requests: Sequence[Parts], args: argparse.Namespace) -> None:
    """Time to the first token of the first prompts with passages, as sent and arranged, in turn."""
    with load_engine(args, dtype=args.dtype) as engine:
        longest = engine.model.config.max_position_embeddings
        fitting = [
            parts
            for parts in requests
            if any(part.kind == _PASSAGE for part in parts) and 1 < sum(part.tokens for part in parts) < longest
        ][: args.measured]
        if not fitting:
            raise BenchError(
                f"no prompt of the trace fits the model's {longest} tokens; give a model with a longer context"
            )
        vocabulary = engine.model.get_input_embeddings().weight.shape[0]

        def text(part: Part) -> Any:
            return part_tokens(part) % vocabulary

        orders = Orders(requests)
        views = {name: engine.for_tenant(name) for name in (_SENT, _ARRANGED)}
        for view in views.values():
            _warm_up(view, vocabulary)
        samples: dict[str, list[Any]] = {name: [] for name in views}
        progress = Progress("prompts", len(fitting))
        for number, parts in enumerate(fitting):
            both = orders.of(parts)
            for name in (_SENT, _ARRANGED) if number % 2 else (_ARRANGED, _SENT):  # neither is always the first
                samples[name].append(_first_token(views[name], both[name], text))
            progress.step()
    times = {name: [result.ttft_ms for result in results] for name, results in samples.items()}
    tokens = sum(result.prompt_tokens for result in samples[_SENT])
    report.raw["ttft_ms"] = times
    report.raw["exact_tokens"] = {name: [r.reuse.exact_tokens for r in results] for name, results in samples.items()}
    columns = ["order of the parts", "reused exactly, %", "TTFT, ms", "all together, s", "as sent / this, by prompt"]
    title = f"Time to the first token, {len(fitting)} prompts of {tokens / len(fitting):.0f} tokens on average"
    table = report.table(title, columns, dtype=args.dtype, model=args.model)
    for name, took in times.items():
        table.add(
            name,
            f"{100 * sum(report.raw['exact_tokens'][name]) / tokens:.1f}",
            Spread.of(took).text(0),
            f"{sum(took) / 1000:.1f}",
            Spread.of(ratios(times[_SENT], took)).text(),
        )
    table.notes.append(
        "The first prompts with passages that fit the model, one after the other, from empty caches, as sent and "
        "arranged in turn. The later a prompt comes, the more it finds; a longer run finds more."
    )


def _warm_up(view: KVBoost, vocabulary: int) -> None:
    """The first forward of a process is slow."""
    first_token(view, [number % vocabulary for number in range(200)])


def _first_token(view: KVBoost, parts: Parts, text: Callable[[Part], Any]) -> Any:
    tokens, _, ends = prompt_of(parts, text)
    return first_token(view, tokens.tolist(), boundaries=ends[:-1])
