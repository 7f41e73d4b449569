"""Hit rate of a RAG trace: how much of it can be reused, as a prefix only and at any position.

The RAGPulse trace names the parts of 7,106 prompts by id and length, every id becomes made-up text of that length, and
the prompts go through :mod:`kvboost.core` as the engine's do. Invariant: a request finds nothing of itself: it looks
everything up before anything of it is stored.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import positive
from benchmarks.common.ragpulse import KINDS, by_kind, part_tokens, prompt_of, read_trace
from benchmarks.common.report import Progress, Report
from benchmarks.internals import ContentChunker, chunk_keys, reusable_chunks
from kvboost.bench.report import Table, describe_machine
from kvboost.types import Chunk

_ROOT = hashlib.sha256(b"benchmarks.approx.hit_rate").digest()
_BAR = 65
QUICK: dict[str, Any] = {}
_PREFIX, _STORE_ALL, _STORE_EXACT = "prefix only", "anywhere, rule (a)", "anywhere, rule (b)"


@dataclass
class Store:
    """Everything that one way of reusing has stored so far, without a limit.

    A chunk is stored under its prefix key only if nothing before it was a non-prefix hit (what is computed behind one
    is approximate and must never pass for exact), and under its content key by the rule that is counted.
    """

    anywhere: bool
    """Look up content keys too, behind the leading run of prefix keys."""
    keep_approximate: bool
    """Store chunks behind a non-prefix hit as well, under their content key."""
    _prefix_keys: set[bytes] = field(default_factory=set, repr=False)
    _content_keys: set[bytes] = field(default_factory=set, repr=False)

    def lookup(self, chunks: Sequence[Chunk]) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
        """The chunks found by prefix and those found by content alone; then stores what may be stored."""
        numbered = enumerate(chunks)
        leading = next((number for number, c in numbered if c.prefix_key not in self._prefix_keys), len(chunks))
        hits = [
            number
            for number in range(leading, len(chunks))
            if self.anywhere and chunks[number].content_key in self._content_keys
        ]
        exact = chunks[: hits[0]] if hits else chunks
        self._prefix_keys.update(c.prefix_key for c in exact)
        self._content_keys.update(c.content_key for c in (chunks if self.keep_approximate else exact))
        return chunks[:leading], [chunks[number] for number in hits]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="the folder of traces, with RAGPulse in ragpulse",
    )
    parser.add_argument("--requests", type=positive, help="how many requests, from the first on (default all)")
    parser.add_argument("--chunk-size", type=positive, default=128, help="tokens per chunk on average (default 128)")
    parser.add_argument(
        "--no-boundaries", action="store_true", help="do not tell the chunker where the parts of a prompt end"
    )


def run(args: argparse.Namespace) -> Report:
    """Replay the trace and count what each way of reusing finds."""
    requests = read_trace(args.traces, limit=args.requests)
    stores = {
        _PREFIX: Store(anywhere=False, keep_approximate=True),
        _STORE_ALL: Store(anywhere=True, keep_approximate=True),
        _STORE_EXACT: Store(anywhere=True, keep_approximate=False),
    }
    chunker = ContentChunker(args.chunk_size)
    total = np.zeros(len(KINDS), dtype=np.int64)
    found = {name: {"exact": total.copy(), "non-prefix": total.copy()} for name in stores}
    per_request: dict[str, list[int]] = {name: [] for name in stores}
    text = lru_cache(maxsize=None)(part_tokens)  # a popular passage is asked for thousands of times
    progress = Progress("requests", len(requests))
    for parts in requests:
        tokens, kinds, ends = prompt_of(parts, text)
        total += by_kind(kinds)
        chunks = chunk_keys(_ROOT, tokens, chunker.cut(tokens, () if args.no_boundaries else ends))
        # The step with the last token always runs and is not stored, as in the engine.
        usable = reusable_chunks(chunks, prompt_tokens=len(tokens))
        for name, store in stores.items():
            exact, approx = store.lookup(usable)
            for trust, reused in (("exact", exact), ("non-prefix", approx)):
                for chunk in reused:
                    found[name][trust] += by_kind(kinds[chunk.start : chunk.end])
            per_request[name].append(sum(c.end - c.start for c in (*exact, *approx)))
        progress.step()
    report = Report("hit_rate")
    report.raw = {
        "requests": len(requests),
        "tokens": _labelled(total),
        "found": {name: {trust: _labelled(counts) for trust, counts in both.items()} for name, both in found.items()},
        "reused_tokens_by_request": per_request,
    }
    report.tables.append(_table(report.raw, args))
    return report


def _labelled(counts: Any) -> dict[str, int]:
    return {kind.label: int(count) for kind, count in zip(KINDS, counts, strict=True)}


def _table(raw: dict[str, Any], args: argparse.Namespace) -> Table:
    total: dict[str, int] = raw["tokens"]
    labels = ["passages", *(label for label in total if label != "passages")]
    table = Table(
        "Hit rate: share of prompt tokens whose KV is stored, unlimited capacity",
        describe_machine(),
        ["reused, % of tokens", "all", *labels],
    )

    def shares(*counts: dict[str, int]) -> list[str]:
        reused = {label: sum(count[label] for count in counts) for label in total}
        cells = [(sum(reused.values()), sum(total.values())), *((reused[label], total[label]) for label in labels)]
        return [f"{100 * part / whole:.1f}" if whole else "-" for part, whole in cells]

    for name, both in raw["found"].items():
        table.add(name, *shares(both["exact"], both["non-prefix"]))
        if name != _PREFIX:
            table.add(f"{name}: exact part", *shares(both["exact"]))
    table.add("tokens in the trace", f"{sum(total.values()):,}", *(f"{total[label]:,}" for label in labels))
    cut = "by the chunker alone" if args.no_boundaries else "at the end of every part and by the chunker between"
    reached = shares(*raw["found"][_STORE_ALL].values())[0]
    table.notes.append(
        f"{raw['requests']:,} requests in the trace's order, made-up text, cut {cut} (content chunks of "
        f"{args.chunk_size}). The chunk with the last token is neither reused nor stored. Prefix only: the leading run "
        "of chunks seen behind the same chunks. Anywhere: that run, then every chunk seen before at any position. "
        "Rule (a) stores every chunk; rule (b) none behind a request's first non-prefix hit. In both, a "
        "prefix key is given only to chunks before it. Bar for the whole trace by rule (a): "
        f"{_BAR} % of all tokens; here {reached} %."
    )
    return table
