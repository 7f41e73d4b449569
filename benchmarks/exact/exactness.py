"""Exactness: random requests to warm engines, each compared with a cold one to the last bit.

Small caches force evictions and refusals. How much of every prompt must come from the cache is predicted by a second,
plain description of the store (:class:`ReferenceStore`) that shares no code with it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.common.measure import TextSource, add_model_arguments, engine_beside, load_engine, positive
from benchmarks.common.report import Progress, Report
from benchmarks.internals import FixedChunker, step_grid, token_array
from kvboost.bench.report import Machine, Table, describe_machine, say
from kvboost.engine import KVBoost
from kvboost.store import LeafFirstLRU, MemoryStore

QUICK = {"requests": 40}

_SHORTEST = 40
_LONGEST = 400  # by default; the settings below are for it
_DOCUMENTS = 4
_OPERATIONS = ("prefill", "generate", "warm", "clear")
_WEIGHTS = (70, 15, 12, 3)
_KEPT_FAILURES = 20
_UNLIMITED = 2**31  # bytes
# Chunk size, max chunks, max tokens, workspaces. The longest prompt fills 25 chunks of 16 or 12 of 32.
_SETTINGS: tuple[tuple[int, int | None, int | None, bool], ...] = (
    (16, 60, None, True),
    (16, None, 900, False),
    (32, 10, None, True),
    (32, None, 1300, True),
)

_Key = tuple[tuple[int, ...], tuple[int, ...]]  # the cuts so far, the tokens so far


class ReferenceStore:
    """What a store should hold: whole prefixes by value, the longest unused leaf evicted first."""

    def __init__(self, *, size: int, grid: int | None, max_chunks: int | None, max_tokens: int | None) -> None:
        """``size`` is the longest chunk's, ``grid`` where steps begin; None if a prompt is resumed at any token."""
        self._size, self._grid = size, grid
        self._max_chunks, self._max_tokens = max_chunks, max_tokens
        self.held: dict[_Key, _Key | None] = {}  # prefix to the prefix before it; first: the next to go
        self.evictions = 0

    def request(self, tokens: Sequence[int], ends: Sequence[int], *, stored_to: int) -> int:
        """One request whose chunks up to ``stored_to`` are offered to the store. Returns the tokens it reuses."""
        last = len(tokens) - 1  # always computed: its logits are needed
        if self._grid is None and last + 1 not in ends:
            ends = [*ends, last + 1]  # what is behind the last cut is a chunk too
        keys: list[_Key] = [(tuple(ends[: i + 1]), tuple(tokens[:end])) for i, end in enumerate(ends)]
        hits = 0
        while hits < len(keys) and _start(keys[hits]) < last and keys[hits] in self.held:
            hits += 1
        self._used(keys[:hits])
        other = self._other_end(tokens, ends[:hits]) if self._grid is None else []
        self._used(other)
        found = [*keys[:hits], *other]
        leased = set(found)
        done = hits
        for key in keys[hits:]:
            parent = keys[done - 1] if done else None
            if key[0][-1] > stored_to or not (key in self.held or self._insert(key, parent, leased)):
                break
            done += 1
        self._used(keys[:done])
        reused = min(found[-1][0][-1], last) if found else 0
        return reused if self._grid is None else reused // self._grid * self._grid

    def _other_end(self, tokens: Sequence[int], cuts: Sequence[int]) -> list[_Key]:
        """The longest piece held behind these cuts, such as another prompt's end, that stops before the last token."""
        start = cuts[-1] if cuts else 0
        pieces = range(min(start + self._size, len(tokens) - 1), start, -1)
        keys: list[_Key] = [((*cuts, end), tuple(tokens[:end])) for end in pieces]
        return [key for key in keys if key in self.held][:1]

    def clear(self) -> None:
        """Forget everything."""
        self.held.clear()

    def _used(self, chain: Sequence[_Key]) -> None:
        for key in reversed(chain):
            self.held[key] = self.held.pop(key)

    def _insert(self, key: _Key, parent: _Key | None, leased: set[_Key]) -> bool:
        if parent is not None and parent not in self.held:
            return False
        if self._max_tokens is not None and _chunk_tokens(key) > self._max_tokens:
            return False
        while self._is_full(_chunk_tokens(key)):
            needed = leased | {parent} | set(self.held.values())
            victim = next((old for old in self.held if old not in needed), None)
            if victim is None:
                return False
            del self.held[victim]
            self.evictions += 1
        self.held[key] = parent
        return True

    def _is_full(self, more: int) -> bool:
        if self._max_chunks is not None and len(self.held) >= self._max_chunks:
            return True
        return self._max_tokens is not None and sum(map(_chunk_tokens, self.held)) + more > self._max_tokens


def _start(key: _Key) -> int:
    cuts = key[0]
    return cuts[-2] if len(cuts) > 1 else 0


def _chunk_tokens(key: _Key) -> int:
    return key[0][-1] - _start(key)


@dataclass
class _Subject:
    """A warm engine, the cold one of the same grid, and what the warm one should hold."""

    name: str
    size: int
    grid: int | None
    engine: KVBoost
    cold: KVBoost
    reference: ReferenceStore
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, more: int = 1) -> None:
        """Add to a counter."""
        self.counts[name] = self.counts.get(name, 0) + more


class _Prompts:
    """Prompts with shared beginnings, of every length next to a chunk's end."""

    def __init__(self, source: TextSource, rng: random.Random, *, longest: int) -> None:
        self._rng, self._longest = rng, longest
        self._documents = [source.window(rng.randrange(len(source.ids)), longest) for _ in range(_DOCUMENTS)]
        self._recent: dict[str, list[list[int]]] = {}
        self._lengths: dict[int, list[int]] = {}

    def length(self, size: int) -> int:
        """From a shuffled deck: all ``k * size - 1 .. k * size + 1``, and as many random lengths."""
        deck = self._lengths.setdefault(size, [])
        if not deck:
            edges = edge_lengths(size, longest=self._longest)
            deck += [*edges, *(self._rng.randint(_SHORTEST, self._longest) for _ in edges)]
            self._rng.shuffle(deck)
        return deck.pop()

    def prompt(self, reader: str, length: int) -> list[int]:
        """A document or one of the reader's recent prompts, whole or cut, continued with other documents."""
        rng = self._rng
        recent = self._recent.get(reader, [])
        head = rng.choice(recent if recent and rng.random() < 0.6 else self._documents)
        if rng.random() < 0.4:
            head = head[: rng.randint(1, len(head))]
        tokens = (head + rng.choice(self._documents) + rng.choice(self._documents))[:length]
        self._recent[reader] = [*recent[-3:], tokens]
        return tokens


def edge_lengths(size: int, *, longest: int = _LONGEST) -> list[int]:
    """Every length next to a multiple of ``size`` in the range tested."""
    near = {k * size + d for k in range(1, longest // size + 1) for d in (-1, 0, 1)}
    return sorted(n for n in near if _SHORTEST <= n <= longest)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.add_argument("--requests", type=positive, default=500, help="random requests (default 500)")
    parser.add_argument(
        "--longest", type=positive, default=_LONGEST, help=f"tokens of a prompt, at most (default {_LONGEST})"
    )
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> Report:
    """Ask, compare, count."""
    rng = random.Random(args.seed)
    loaded = load_engine(args, dtype=args.dtype)
    source = TextSource(loaded.tokenizer, args.text)
    prompts = _Prompts(source, rng, longest=args.longest)
    subjects = _subjects(loaded, source, longest=args.longest)
    covered: dict[int, set[int]] = {subject.size: set() for subject in subjects}
    failures: list[dict[str, Any]] = []
    say("the first request of each engine digests the weights")
    progress = Progress("requests", args.requests)
    for number in range(args.requests):
        subject = rng.choice(subjects)
        operation = rng.choices(_OPERATIONS, _WEIGHTS)[0]
        tokens = prompts.prompt(subject.name, prompts.length(subject.size))
        boundaries = [rng.randint(1, len(tokens))] if rng.random() < 0.2 else []
        wrong = _request(subject, operation, tokens, boundaries, new_tokens=rng.randint(1, 4))
        if operation == "prefill":
            covered[subject.size].add(len(tokens))
        if wrong and len(failures) < _KEPT_FAILURES:
            failures.append(
                {"request": number, "engine": subject.name, "operation": operation, "wrong": wrong}
                | {"tokens": tokens, "boundaries": boundaries}
            )
        progress.step()
    failed = any(subject.counts.get(name) for subject in subjects for name in ("differences", "mispredicted"))
    report = Report("exactness", failed=failed)
    report.raw = {"seed": args.seed, "engines": {s.name: s.counts for s in subjects}, "failures": failures}
    machine = describe_machine(dtype=args.dtype, model=str(args.model))
    report.tables.append(_table(subjects, machine, covered, args.seed, longest=args.longest))
    return report


def _subjects(loaded: KVBoost, source: TextSource, *, longest: int) -> list[_Subject]:
    per_token = loaded.prefill(source.window(0, _SHORTEST)).cache.layout.bytes_per_token
    cold: dict[int, KVBoost] = {}
    subjects = []
    for size, chunks, tokens, workspaces in _SETTINGS:
        max_chunks, max_tokens = (limit and limit * longest // _LONGEST for limit in (chunks, tokens))
        cuts: dict[str, Any] = {"chunking": "fixed", "chunk_size": size, "quality": "exact"}
        if size not in cold:
            cold[size] = engine_beside(loaded, **cuts)
        memory: dict[str, Any] = {} if workspaces else {"workspace_bytes": 0}
        capacity = _UNLIMITED if max_tokens is None else max_tokens * per_token
        # What another order of eviction would keep, the reference could not tell.
        store = MemoryStore(capacity, max_chunks=max_chunks, policy=LeafFirstLRU())
        engine = engine_beside(loaded, store=store, **cuts, **memory)
        grid = step_grid(engine)
        reference = ReferenceStore(size=size, grid=grid, max_chunks=max_chunks, max_tokens=max_tokens)
        limit = f"{max_chunks} chunks" if max_chunks is not None else f"{max_tokens} tokens"
        name = f"chunks of {size}, at most {limit}" + ("" if workspaces else ", no workspace")
        subjects.append(_Subject(name, size, grid, engine, cold[size], reference))
    return subjects


def _request(
    subject: _Subject, operation: str, tokens: list[int], boundaries: list[int], *, new_tokens: int
) -> list[str]:
    """Run one request on both engines; returns what was wrong."""
    engine, cold, reference = subject.engine, subject.cold, subject.reference
    subject.count("requests")
    subject.count(operation)
    if operation == "clear":
        engine.clear()
        reference.clear()
        return []
    steps = range(subject.grid, len(tokens) + 1, subject.grid) if subject.grid is not None else ()
    ends = FixedChunker(subject.size).cut(token_array(tokens), [*boundaries, *steps])
    stored_to = len(tokens)
    if subject.grid is not None:
        stored_to -= len(tokens) % subject.grid  # only whole steps
    expected = reference.request(tokens, ends, stored_to=stored_to)
    wrong: list[str] = []
    cold.clear()
    if operation == "warm":
        engine.warm(tokens, boundaries=boundaries)
    elif operation == "generate":
        arguments: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0, "boundaries": boundaries}
        ours, theirs = engine.generate(tokens, **arguments), cold.generate(tokens, **arguments)
        wrong += [] if ours.token_ids == theirs.token_ids else ["other tokens"]
        wrong += _reuse_errors(ours.reuse.exact_tokens, expected, theirs.reuse.exact_tokens)
    else:
        warm, plain = (e.prefill(tokens, boundaries=boundaries) for e in (engine, cold))
        wrong += [] if _same_bits(warm.logits, plain.logits) else ["other logits"]
        states = [result.cache.extract(0, len(tokens)) for result in (warm, plain)]
        wrong += [] if all(map(_same_bits, *states)) else ["other KV"]
        wrong += _reuse_errors(warm.reuse.exact_tokens, expected, plain.reuse.exact_tokens)
        wrong += [] if warm.reuse.bitwise else ["not reported as bitwise"]
        subject.count("hits", expected > 0)
        subject.count("reused_tokens", expected)
        subject.count("prefill_tokens", len(tokens))
    stats = engine.cache_stats()
    held = (stats["hot_chunks"], stats["evictions"])
    if held != (len(reference.held), reference.evictions):
        wrong.append(f"chunks and evictions {held}, predicted {(len(reference.held), reference.evictions)}")
    subject.counts["evictions"] = stats["evictions"]
    subject.count("differences", any(error.startswith("other") for error in wrong))
    subject.count("mispredicted", any(not error.startswith("other") for error in wrong))
    return wrong


def _reuse_errors(reused: int, expected: int, reused_cold: int) -> list[str]:
    errors = [] if reused == expected else [f"reused {reused} tokens, predicted {expected}"]
    return errors if reused_cold == 0 else [*errors, f"the cold engine reused {reused_cold} tokens"]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit: unlike ``torch.equal`` alone, tells 0.0 from -0.0."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _table(
    subjects: Sequence[_Subject], machine: Machine, covered: dict[int, set[int]], seed: int, *, longest: int
) -> Table:
    names = ("requests", "prefill", "generate", "warm", "clear", "hits", "evictions", "differences", "mispredicted")
    table = Table("Exactness: warm against cold, to the bit", machine, ["engine", *names, "reused"])
    total: dict[str, int] = {}
    for subject in subjects:
        for name, value in subject.counts.items():
            total[name] = total.get(name, 0) + value
    for label, counts in [*((s.name, s.counts) for s in subjects), ("all", total)]:
        share = counts.get("reused_tokens", 0) / max(1, counts.get("prefill_tokens", 0))
        table.add(label, *(counts.get(name, 0) for name in names), f"{share:.0%}")
    table.notes.append(
        "Every prefill: logits and KV of every position, warm against a cold engine over the same model object; "
        "every generate: greedy tokens. `differences`: requests where any bit or token differed. `mispredicted`: "
        "tokens reused, chunks held or evictions other than predicted. `reused`: share of prefilled tokens."
    )
    for size, lengths in covered.items():
        edges = edge_lengths(size, longest=longest)
        hit = len(lengths.intersection(edges))
        table.notes.append(f"Chunks of {size}: {hit} of the {len(edges)} lengths next to a chunk's end. Seed {seed}.")
    return table
