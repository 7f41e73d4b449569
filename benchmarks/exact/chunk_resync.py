"""How much of a document is found again behind preambles of 50 different lengths, by chunking rule."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.common.measure import positive
from benchmarks.common.report import Report
from benchmarks.internals import ContentChunker, FixedChunker, chunk_keys
from kvboost.extend import Chunker, TokenArray

QUICK = {"documents": 3}
_LENGTH, _QUESTION = 2000, 300
_PREAMBLE_LENGTHS = range(1, 351, 7)  # 50 of them


def chunks_inside(chunker: Chunker, parts: Sequence[TokenArray], *, boundary: bool) -> dict[bytes, int]:
    """Content keys and lengths of the chunks that lie whole in the middle part (preamble, document, question)."""
    start, stop = len(parts[0]), len(parts[0]) + len(parts[1])
    tokens = np.concatenate(parts)
    chunks = chunk_keys(b"", tokens, chunker.cut(tokens, [start] if boundary else []))
    return {c.content_key: c.end - c.start for c in chunks if c.start >= start and c.end <= stop}


def share_found_again(chunker: Chunker, seed: int, *, boundary: bool) -> float:
    """For one document, the mean over the preambles of its own chunks' tokens that are found again."""
    random = np.random.default_rng(seed)

    def text(length: int) -> TokenArray:
        return random.integers(0, 50_000, length, dtype=np.uint32)

    document, question = text(_LENGTH), text(_QUESTION)
    alone = chunks_inside(chunker, [text(0), document, question], boundary=boundary)
    found = []
    for length in _PREAMBLE_LENGTHS:
        again = chunks_inside(chunker, [text(length), document, question], boundary=boundary)
        found.append(sum(size for key, size in alone.items() if key in again))
    return float(np.mean(found) / sum(alone.values()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--documents", type=positive, default=60, help="default: 60")


def run(args: argparse.Namespace) -> Report:
    """Every chunking rule, with and without a boundary."""
    report = Report("chunk_resync")
    columns = ["chunking", "boundary at the document's start", "mean share", "lowest document", "highest"]
    table = report.table("Resynchronisation: share of a document's tokens found again behind a preamble", columns)
    for chunker in (FixedChunker(128), ContentChunker(128), ContentChunker(64), ContentChunker(256)):
        for boundary in (False, True):
            shares = [share_found_again(chunker, seed, boundary=boundary) for seed in range(args.documents)]
            numbers = (f"{np.mean(shares):.3f}", f"{min(shares):.3f}", f"{max(shares):.3f}")
            table.add(f"`{chunker.spec}`", "yes" if boundary else "no", *numbers)
    return report
