"""Router time: what choosing a replica takes for a long prompt, and what other summaries of keys would take and weigh.

Needs no model. Every replica holds documents of 16 chunks, a tenth of which all replicas hold. The prompt is made of
documents that somebody holds; its keys are real, over random tokens. Invariant: all summaries give the same answer
(the Bloom filters up to their false positives), which the benchmark checks before it times them.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from benchmarks.common.key_summary import keys_of
from benchmarks.common.measure import positive
from benchmarks.common.report import BenchError, Report
from benchmarks.internals import FixedChunker, chunk_keys, token_array
from kvboost.bench.report import Spread
from kvboost.fleet.index import FleetIndex, ShortKeys, keys_of_blocks, pack_keys, short_keys
from kvboost.fleet.route import RouteCosts, RoutePrompt, Router
from kvboost.types import Chunk

_T = TypeVar("_T")
QUICK = {"chunks": 400, "replicas": 8, "held": 1000, "repeat": 5}
_DOCUMENT = 16  # chunks
_CHUNK = 32  # tokens
_VOCAB = 49152
_ROOT = hashlib.sha256(b"benchmarks.fleet.router_time").digest()
_BAR_MS = 2.0
_STEPS = ("cut and key the prompt", "choose")
_BLOOM_BITS, _BLOOM_HASHES = 10, 7  # per key: one in a hundred false positives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--chunks", type=positive, default=4000, help="of the prompt (default 4000)")
    parser.add_argument("--replicas", type=positive, default=32, help="default 32")
    parser.add_argument("--held", type=positive, default=25_000, help="chunks in each replica's memory (default 25000)")
    parser.add_argument("--repeat", type=positive, default=101, help="default 101")
    parser.add_argument("--no-summaries", action="store_true", help="the router only, for an index of any size")


def run(args: argparse.Namespace) -> Report:
    """Fill the summaries, route prompts, time both."""
    if args.replicas > 64 and not args.no_summaries:
        raise BenchError("the other summaries are written for 64 replicas at most; give --replicas 64 or fewer")
    rng = np.random.default_rng(0)
    random_keys = lambda count: np.maximum(rng.integers(0, 2**64, count, dtype=np.uint64), np.uint64(1))  # noqa: E731
    prompts = [_prompt(rng, args.chunks) for _ in range(8)]
    held = [random_keys(2 * args.held) for _ in range(args.replicas)]
    for chunks in prompts:
        for first in range(0, args.chunks, _DOCUMENT):
            document = chunks[first : first + _DOCUMENT]
            keys = short_keys([key for c in document for key in (c.prefix_key, c.content_key)])
            everybody = rng.random() < 0.1
            for number in range(args.replicas) if everybody else [int(rng.integers(args.replicas))]:
                held[number] = np.concatenate((held[number], keys))
    index = FleetIndex()
    updates = [
        _timed(functools.partial(index.replace, f"replica-{number}", keys))[1] for number, keys in enumerate(held)
    ]
    again = [_timed(functools.partial(index.replace, f"replica-{number}", keys))[1] for number, keys in enumerate(held)]
    report = Report("router_time")
    report.raw["whole updates"], report.raw["whole updates again"] = updates, again
    _time_routing(report, index, prompts, args)
    if not args.no_summaries:
        _compare(report, index, held, prompts, args)
    return report


def _prompt(rng: np.random.Generator, count: int) -> list[Chunk]:
    tokens = rng.integers(0, _VOCAB, count * _CHUNK, dtype=np.uint32)
    return chunk_keys(_ROOT, tokens, FixedChunker(_CHUNK).cut(tokens))


def _time_routing(report: Report, index: FleetIndex, prompts: list[list[Chunk]], args: argparse.Namespace) -> None:
    router = Router(index, RouteCosts(compute=50e-6, move=10e-6, load=20e-6))
    queues = dict.fromkeys((f"replica-{number}" for number in range(args.replicas)), 0.0)
    texts = [[int(t) for c in chunks for t in np.frombuffer(c.tokens, dtype="<u4")] for chunks in prompts]
    steps: dict[str, list[float]] = {name: [] for name in _STEPS}
    for turn in range(args.repeat):
        prompt, keyed = _timed(functools.partial(_key, texts[turn % len(texts)]))
        _, chosen = _timed(functools.partial(router.choose, prompt, queues=queues))
        for name, took in zip(_STEPS, (keyed, chosen), strict=True):
            steps[name].append(took)
    table = report.table(
        f"Router time, {args.chunks:,} chunks, {args.replicas} replicas with {args.held:,} chunks each",
        ["step", "ms, median [min max]"],
    )
    for name, samples in steps.items():
        report.raw[name] = samples
        table.add(name, Spread.of(samples).text(3))
    report.failed |= Spread.of(steps[_STEPS[-1]]).median > _BAR_MS
    updates, again = (Spread.of(report.raw[f"whole updates{which}"]).text(1) for which in ("", " again"))
    table.notes.append(
        f"The index: {keys_of(index):,} keys in {index._table.nbytes / 1e6:,.0f} MB. One replica's whole update: "
        f"{updates} ms; the longest ones make the table again. The same keys again: {again} ms."
    )
    table.notes.append(
        f"The bar: the choice in less than {_BAR_MS:.0f} ms, median. The prompt is tokenised (not timed here), cut and "
        "keyed before, in another thread. CPU time of one thread, which does nothing but this."
    )


def _key(tokens: list[int]) -> RoutePrompt:
    ids = token_array(tokens)
    return RoutePrompt.of(_ROOT, ids, FixedChunker(_CHUNK).cut(ids))


def _timed(call: Callable[[], _T]) -> tuple[_T, float]:
    """What it returns, and milliseconds of this thread's CPU time: other work on the machine does not count."""
    start = time.thread_time()
    result = call()
    return result, 1000.0 * (time.thread_time() - start)


def _compare(
    report: Report, index: FleetIndex, held: list[ShortKeys], prompts: list[list[Chunk]], args: argparse.Namespace
) -> None:
    """Who holds each key of a prompt, by four kinds of summary."""
    asked = [short_keys([key for c in chunks for key in (c.prefix_key, c.content_key)]) for chunks in prompts]
    keys = sum(len(own) for own in held)
    sets = [set(own.tolist()) for own in held]
    masks: dict[int, int] = {}
    for number, own in enumerate(held):
        for key in own.tolist():
            masks[key] = masks.get(key, 0) | 1 << number
    ordered = [np.sort(own) for own in held]
    bits = 1 << (_BLOOM_BITS * max(len(own) for own in held)).bit_length()
    blooms = np.zeros((len(held), bits), dtype=bool)
    for number, own in enumerate(held):
        blooms[number, _bloom_places(own, bits).ravel()] = True
    integers = 32 + 32  # a Python integer for the key, and a mask
    ways: dict[str, tuple[float, Callable[[ShortKeys], Any]]] = {
        "one table (FleetIndex)": (index._table.nbytes, lambda keys: index.holders(keys)[:, 0]),
        "dict from key to mask": (
            sys.getsizeof(masks) + integers * len(masks),
            lambda keys: np.array([masks.get(key, 0) for key in keys.tolist()], dtype=np.uint64),
        ),
        "a set for each replica": (
            sum(sys.getsizeof(own) + 32 * len(own) for own in sets),
            lambda keys: _packed([[key in own for key in keys.tolist()] for own in sets]),
        ),
        "a sorted array for each replica": (8 * keys, lambda keys: _packed([_among(own, keys) for own in ordered])),
        "a Bloom filter for each replica": (
            blooms.size / 8,
            lambda keys: _packed(blooms[:, _bloom_places(keys, bits)].all(axis=1)),
        ),
    }
    table = report.table(
        f"Summaries of {keys:,} keys of {args.replicas} replicas, asked for {2 * args.chunks:,} keys",
        ["summary", "bytes per key held", "ms, median [min max]", "false answers"],
    )
    truth = ways["dict from key to mask"][1]
    for name, (nbytes, ask) in ways.items():
        wrong = sum(int((ask(keys) != truth(keys)).sum()) for keys in asked[:2]) / sum(len(keys) for keys in asked[:2])
        turns = range(max(3, args.repeat // 5))
        samples = [_timed(functools.partial(ask, asked[turn % len(asked)]))[1] for turn in turns]
        report.raw[name] = {"bytes": nbytes, "ms": samples, "wrong": wrong}
        table.add(name, f"{nbytes / keys:.1f}", Spread.of(samples).text(3), f"{100 * wrong:.2f} %")
        report.failed |= wrong > 0 and "Bloom" not in name
    sent = pack_keys(keys_of_blocks([(chunk.prefix_key, chunk.content_key) for chunk in prompts[0]]))
    table.notes.append(
        "The Bloom filters take a byte for each bit here; the table counts bits. They forget nothing without counters. "
        f"A whole update is {len(sent) / len(prompts[0]):.1f} bytes per chunk sent."
    )


def _bloom_places(keys: ShortKeys, bits: int) -> Any:
    """Where a key's bits are: [hashes, keys]."""
    step = (keys >> np.uint64(32)) | np.uint64(1)
    turns = np.arange(_BLOOM_HASHES, dtype=np.uint64)[:, None]
    return ((keys + turns * step) & np.uint64(bits - 1)).astype(np.int64)


def _among(ordered: ShortKeys, keys: ShortKeys) -> Any:
    places = np.minimum(np.searchsorted(ordered, keys), len(ordered) - 1)
    return ordered[places] == keys


def _packed(held: Any) -> Any:
    """Masks out of [replicas, keys] booleans."""
    weights = np.uint64(1) << np.arange(len(held), dtype=np.uint64)
    return (np.asarray(held, dtype=np.uint64) * weights[:, None]).sum(axis=0, dtype=np.uint64)
