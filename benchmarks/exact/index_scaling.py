"""Index scaling: what planning, lookup and storing cost with a thousand to ten million stored chunks.

Needs no model. Documents are chains of 16 chunks. Those that are looked up have real keys over real token
bytes, made anew for every lookup so that no comparison is short-cut by object identity; the filler around
them has random keys and shares one token record.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.common.measure import positive
from benchmarks.common.process import memory_status
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.internals import (
    ContentChunker,
    FixedChunker,
    GuardedStore,
    NaturalChunker,
    PromptKeys,
    chunk_keys,
    loads_of,
    plan_reuse,
    reusable_chunks,
    token_array,
    tokens_by_tier,
)
from kvboost.bench.report import Spread, Table, describe_machine
from kvboost.extend import Chunker
from kvboost.store import MemoryStore
from kvboost.types import Break, Chunk, KVBlock, PutOutcome

QUICK = {"max": 10000, "repeat": 3, "batch": 20}

_CHAIN = 16
_CHUNK = 128
_PROMPT = 4000
_VOCAB = 49152
_REAL_DOCUMENTS = 2000
_ROOT = hashlib.sha256(b"benchmarks.exact.index_scaling").digest()
_UNLIMITED = 2**62
_RSS_FROM = 100_000  # below, page granularity and Python's own arenas drown the answer
_LONG, _LONG_CHUNK, _NEW = 131_072, 32, 1000  # tokens of a long prompt, of its chunks, and of its end, which is new
_LINE_ENDS = 1 / 40  # of the vocabulary
_STAGES = ("keys", "lease", "tail", "plan")
_MEASURES = ("plan_ns", "hit_us", "bare_us", "release_us", "miss_us", "put_us")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--max", type=positive, default=10_000_000, help="max chunks stored (default 10000000)")
    parser.add_argument("--repeat", type=positive, default=9, help="batches measured per size (default 9)")
    parser.add_argument("--batch", type=positive, default=100, help="prompts per batch (default 100)")
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> Report:
    """Measure at every power of ten from 1,000 chunks on."""
    if args.max < 1000:
        raise BenchError(f"--max {args.max} is less than the smallest size; give 1000 or more")
    sizes = [10**power for power in range(3, 20) if 10**power <= args.max]
    idle = memory_status("VmRSS")
    results = [_measure(size, idle, args) for size in sizes]
    long = _long_prompt(args)
    report = Report("index_scaling", raw={"sizes": results, "long_prompt": long})
    report.tables += [_table(results), _long_table(long)]
    return report


def _measure(size: int, idle: int, args: argparse.Namespace) -> dict[str, Any]:
    store = MemoryStore(_UNLIMITED, max_chunks=size)
    rng = random.Random(args.seed)
    gc.collect()
    real = _fill(store, size)
    token_bytes = len(real) * _CHAIN * sys.getsizeof(bytes(_CHUNK * 4))
    per_chunk = (memory_status("VmRSS") - idle - token_bytes) / size
    progress = Progress(f"{size} chunks, batches", 5 * args.repeat)

    def batches(prepare: Callable[[int], Any], *timed: Callable[[Any], Any]) -> list[list[float]]:
        """Seconds per prompt for each of ``timed``, which get each other's results: a mean per batch.

        ``prepare(number)`` is not timed; the collector stays on.
        """
        means: list[list[float]] = [[] for _ in timed]
        for batch in range(args.repeat):
            spent = [0.0] * len(timed)
            for number in range(batch * args.batch, (batch + 1) * args.batch):
                value = prepare(number)
                for index, step in enumerate(timed):
                    start = time.perf_counter()
                    value = step(value)
                    spent[index] += time.perf_counter() - start
            for mean, seconds in zip(means, spent, strict=True):
                mean.append(seconds / args.batch)
            progress.step()
        return means

    # Each document once per round, in random order: one looked up before is as far from the CPU as any other.
    needed = args.repeat * args.batch
    order = [doc for _ in range(-(-needed // len(real))) for doc in rng.sample(real, len(real))]
    before = store.stats()
    hit, release = batches(lambda number: _document(order[number]), store.lease, lambda lease: lease.release())
    middle = store.stats()
    [miss] = batches(lambda number: _document(-1 - number), lambda chunks: store.lease(chunks).release())
    after = store.stats()
    if middle.misses != before.misses or after.hits != middle.hits or after.rejected:
        raise BenchError("lookups that should hit missed, or the other way round: a defect of the store or this file")
    content = ContentChunker(_CHUNK)
    [plan] = batches(lambda number: _tokens(-1 - number, _PROMPT).tolist(), lambda ids: _plan(content, ids))
    [put] = batches(lambda number: _filler(10**12 + number), lambda blocks: _put(store, blocks))
    full = store.stats()
    if full.chunks != size:
        raise BenchError(f"the store holds {full.chunks} chunks instead of {size}: a defect of the store or this file")
    known = {_key(number): number for number in range(size)}
    [bare] = batches(
        lambda number: [_key(rng.randrange(size)) for _ in range(_CHAIN)], lambda keys: [known[key] for key in keys]
    )
    return {
        "chunks": size,
        "documents_looked_up": len(real),
        "plan_ns": [seconds * 1e9 / _PROMPT for seconds in plan],
        "hit_us": [seconds * 1e6 / _CHAIN for seconds in hit],
        "release_us": [seconds * 1e6 / _CHAIN for seconds in release],
        "bare_us": [seconds * 1e6 / _CHAIN for seconds in bare],
        "miss_us": [seconds * 1e6 for seconds in miss],
        "put_us": [seconds * 1e6 / _CHAIN for seconds in put],
        "evictions": full.evictions,
        "index_bytes_per_chunk": per_chunk if size >= _RSS_FROM else None,
    }


def _long_prompt(args: argparse.Namespace) -> dict[str, Any]:
    """What a long prompt takes before its first forward, all but its end stored: wall and CPU ms of every stage."""
    rng = np.random.default_rng(args.seed)
    breaks = np.where(rng.random(_VOCAB) < _LINE_ENDS, int(Break.LINE), int(Break.NONE)).astype(np.uint8)
    chunker = NaturalChunker(_LONG_CHUNK, breaks)
    # Chunks and their keys follow from the root that is given with each prompt, not from a model.
    identity: Any = None
    keys = PromptKeys(identity=identity, chunker=chunker, tenant="", codec="raw", keeps_decoded=False)
    ids = _tokens(-1 - args.seed, _LONG).tolist()
    memory = MemoryStore(_UNLIMITED)
    known, tail = keys.chunks_and_tail(_ROOT, ids[: _LONG - _NEW], ())
    known += [tail] if tail is not None else []
    _put(memory, [_block(c.prefix_key, c.parent_key, c.content_key, c.tokens) for c in known])
    store = GuardedStore(memory)
    found: dict[str, Any] = {"chunks": len(known), "wall_ms": [], "cpu_ms": []}
    progress = Progress("long prompts", args.repeat)
    for _ in range(args.repeat):
        prompt = list(ids)
        times = [(time.perf_counter(), time.process_time())]

        def lap(times: list[tuple[float, float]] = times) -> None:
            times.append((time.perf_counter(), time.process_time()))

        chunks, tail = keys.chunks_and_tail(_ROOT, prompt, ())
        lookup = [*chunks, tail] if tail is not None else chunks
        lap()
        lease = store.lease(lookup)
        blocks = lease.blocks
        lap()
        end = lookup[len(blocks) - 1]
        store.first_stored(keys.tails(_ROOT, prompt, behind=end))
        lap()
        tokens_by_tier(blocks, loads_of(lease), limit=end.end)
        plan_reuse((), prompt_tokens=len(prompt), exact_tokens=end.end)
        lap()
        lease.release()
        if end.end < _LONG - _NEW - 2 * _LONG_CHUNK:
            raise BenchError("a stored prompt was not found: a defect of the store or this file")
        for clock, name in enumerate(("wall_ms", "cpu_ms")):
            laps = [1000.0 * (b[clock] - a[clock]) for a, b in itertools.pairwise(times)]
            found[name].append(dict(zip(_STAGES, laps, strict=True)))
        progress.step()
    return found


def _long_table(found: dict[str, Any]) -> Table:
    table = Table(
        f"A prompt of {_LONG:,} tokens, {found['chunks']:,} chunks of it stored: ms before its first forward",
        describe_machine(),
        ["clock", *_STAGES, "all"],
    )
    for name in ("wall_ms", "cpu_ms"):
        laps = found[name]
        cells = [Spread.of([lap[stage] for lap in laps]).text(1) for stage in _STAGES]
        table.add(name.removesuffix("_ms"), *cells, Spread.of([sum(lap.values()) for lap in laps]).text(1))
    table.notes.append(
        f"Median [min max]. Natural chunks of {_LONG_CHUNK}, all but the last {_NEW:,} tokens stored. keys: ids to "
        "chunks with their keys. lease: lookup. tail: the end of an earlier prompt behind the last chunk that was "
        "found. plan: tokens by tier, and the plan."
    )
    return table


def _plan(chunker: Chunker, ids: list[int]) -> None:
    """What the engine does between the token ids and the first lookup, and after it."""
    tokens = token_array(ids)
    chunks = chunk_keys(_ROOT, tokens, chunker.cut(tokens))
    reusable = reusable_chunks(chunks, prompt_tokens=len(ids))
    plan_reuse(chunks, prompt_tokens=len(ids), exact_tokens=reusable[-1].end if reusable else 0)


def _put(store: MemoryStore, blocks: Sequence[KVBlock]) -> None:
    """Store one document as the engine does: its chunks in order, then the note that they were used together."""
    for block in blocks:
        if store.put(block) is not PutOutcome.STORED:
            raise BenchError("the store refused a chunk: a defect of the store or this file")
    store.used([block.key for block in blocks])


def _fill(store: MemoryStore, size: int) -> list[int]:
    """Fill the store to ``size`` chunks; returns the numbers of the documents that can be looked up."""
    documents = size // _CHAIN
    every = max(1, documents // _REAL_DOCUMENTS)  # spread over the whole fill, so also over its memory
    progress = Progress(f"storing {size} chunks", size)
    real = []
    for number in range(documents):
        if number % every == 0:
            real.append(number)
            _put(store, [_block(c.prefix_key, c.parent_key, c.content_key, c.tokens) for c in _document(number)])
        else:
            _put(store, _filler(number))
        progress.step(_CHAIN)
    rest = size - documents * _CHAIN
    if rest:
        _put(store, _filler(documents)[:rest])
    return real


def _tokens(number: int, length: int) -> Any:
    seed = number if number >= 0 else 10**9 - number
    return np.random.default_rng(seed).integers(0, _VOCAB, length, dtype=np.uint32)


def _document(number: int) -> list[Chunk]:
    """The chunks of a document, with real keys: equal numbers give equal keys in new objects."""
    tokens = _tokens(number, _CHAIN * _CHUNK)
    return chunk_keys(_ROOT, tokens, FixedChunker(_CHUNK).cut(tokens))


_SHARED_TOKENS = bytes(_CHUNK * 4)


def _filler(number: int) -> list[KVBlock]:
    blocks = []
    parent = None
    for index in range(_CHAIN):
        digest = hashlib.sha512(b"%d.%d" % (number, index)).digest()
        key = digest[:32]
        blocks.append(_block(key, parent, digest[32:], _SHARED_TOKENS))
        parent = key
    return blocks


def _key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def _block(key: bytes, parent: bytes | None, content: bytes, tokens: bytes) -> KVBlock:
    return KVBlock(key=key, parent_key=parent, content_key=content, tokens=tokens, tensors=(), nbytes=1, bitwise=True)


def _table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "Index scaling: cost per request by stored chunks",
        describe_machine(),
        [
            "stored chunks",
            "plan ns/prompt token",
            "hit us/chunk",
            "bare dict us/key",
            "release us/chunk",
            "miss us/prompt",
            "put+evict us/chunk",
            "index bytes/chunk",
        ],
    )
    for result in results:
        resident = result["index_bytes_per_chunk"]
        table.add(
            f"{result['chunks']:,}",
            *(Spread.of(result[name]).text(2) for name in _MEASURES),
            "-" if resident is None else f"{resident:.0f}",
        )
    first, last = results[0], results[-1]
    flat = [Spread.of(last[name]).median / Spread.of(first[name]).median for name in _MEASURES]
    table.add("largest / smallest", *(f"{value:.2f}" for value in flat), "-")
    table.notes.append(
        f"Cells are median [min max] of batch means. plan: token ids to chunks, keys and plan, prompts of {_PROMPT:,} "
        f"tokens, content chunks of {_CHUNK}. hit: lookup of {_CHAIN}-chunk documents in random order, keys made "
        "anew. bare dict: as many lookups in a Python dict of as many keys, which shows what memory alone costs. "
        "release: their end, behind the answer, with what the eviction policy learns from them. miss: lease of a "
        "document that is not there; it ends at the first chunk. put+evict: at a full "
        "store, one chunk in, one out. index bytes: growth of the process' resident memory per chunk, without the "
        "512 bytes of token ids, which belong to the stored record (the filler shares one), and without KV."
    )
    return table
