"""Traces of requests as the eviction benchmark reads them: keys and token counts, in the order of arrival.

Used by :mod:`benchmarks.store.eviction`. Invariant: nothing of a trace is kept but keys and sizes, and a chunk of a
chained trace always stands behind the same chunk.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.ragpulse import read_trace as read_ragpulse
from benchmarks.common.report import BenchError

BLOCK = 512
_FILES = {
    "conversation": "mooncake_conversation.jsonl",
    "synthetic": "mooncake_synthetic.jsonl",
    "agentic": "agentic_sessions.jsonl.gz",
}
_RAGPULSE = "ragpulse"
NAMES = (*_FILES, _RAGPULSE)


@dataclass(frozen=True)
class Prompt:
    """One request: its chunks' keys and how many of its tokens each holds."""

    keys: tuple[bytes, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Requests of one kind of service."""

    name: str
    prompts: tuple[Prompt, ...]
    chained: bool
    """Chunks are reused as a prefix and a block is a block; else wherever they stand, and sizes are tokens."""

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(sum(prompt.tokens) for prompt in self.prompts)

    @property
    def footprint(self) -> int:
        """What a store without limit would hold at the end, in its own unit: blocks or tokens."""
        sizes = {key: size for prompt in self.prompts for key, size in zip(prompt.keys, prompt.tokens, strict=True)}
        return len(sizes) if self.chained else sum(sizes.values())


def read(folder: Path, name: str, *, limit: int | None = None) -> Trace:
    """The trace ``name`` out of ``folder``; the first ``limit`` requests only."""
    if name == _RAGPULSE:
        parts = read_ragpulse(folder, limit=limit)
        prompts = [
            Prompt(tuple(_key(p.id, kind=p.kind) for p in prompt), tuple(p.tokens for p in prompt)) for prompt in parts
        ]
        return Trace(name, tuple(prompts), chained=False)
    return Trace(name, tuple(_blocks(folder / _FILES[name], limit=limit)), chained=True)


def _key(number: int, *, kind: int = 0) -> bytes:
    return bytes([kind]) + number.to_bytes(8, "big")


def _blocks(file: Path, *, limit: int | None) -> Iterator[Prompt]:
    keys: dict[int, bytes] = {}  # one object per key, however often it occurs
    parents: dict[int, int | None] = {}
    for count, (place, record) in enumerate(_records(file)):
        if count == limit:
            return
        length, ids = record.get("input_length"), record.get("hash_ids")
        if not isinstance(length, int) or not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise BenchError(f"{place} must have input_length and hash_ids, whole numbers; repair that line")
        for parent, block in zip([None, *ids], ids, strict=False):
            if parents.setdefault(block, parent) != parent:
                raise BenchError(f"{place}: block {block} stands behind another block than before; repair that line")
        sizes = tuple(max(0, min(BLOCK, length - BLOCK * number)) for number in range(len(ids)))
        yield Prompt(tuple(keys.setdefault(i, _key(i)) for i in ids), sizes)


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{file.name} line {number}"
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise BenchError(f"{place} is not a JSON object; repair that line")
                    yield place, record
    except OSError as error:
        raise BenchError(f"there is no {file.name} in the folder of traces; give the folder that holds it") from error
    except json.JSONDecodeError as error:
        raise BenchError(f"{file.name} holds a line that is not JSON ({error}); repair it") from error
