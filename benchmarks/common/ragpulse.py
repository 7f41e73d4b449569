"""The RAGPulse trace: prompts as parts with an id and a length, and made-up text for each part.

Used by the benchmarks of hit rates and of eviction. Invariant: equal ids of a kind are equal text, wherever they occur.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import BenchError
from kvboost.extend import TokenArray

_VOCAB = 49152


@dataclass(frozen=True)
class Kind:
    """One kind of part: what the table calls it, what the trace calls it, and where its lengths stand."""

    label: str
    field: str
    file: str
    id_field: str


KINDS = (
    Kind("system prompt", "sys_prompt", "1_sys_prompt.jsonl", "sys_prompt_id"),
    Kind("passages", "passages_ids", "2_passages.jsonl", "passage_id"),
    Kind("history", "history", "3_history.jsonl", "history_id"),
    Kind("web search", "web_search", "5_web_search.jsonl", "web_search_id"),
    Kind("user input", "user_input", "4_user_input.jsonl", "user_input_id"),
)
_KIND_BY_FIELD = {kind.field: number for number, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class Part:
    """One piece of a prompt. ``kind`` counts in the order of ``KINDS``."""

    kind: int
    id: int
    tokens: int


def read_trace(traces: Path | None, *, limit: int | None = None) -> list[list[Part]]:
    """The parts of every prompt in ``traces/ragpulse``, in the trace's own order; the first ``limit`` prompts only."""
    if traces is None:
        raise BenchError("this benchmark needs the RAGPulse trace; give the folder that holds it with --traces FOLDER")
    folder = traces.expanduser() / "ragpulse"
    lengths: list[dict[int, int]] = []
    for kind in KINDS:
        lengths.append({})
        for place, record in _records(folder / kind.file):
            part_id, length = record.get(kind.id_field), record.get("token_length")
            if not isinstance(part_id, int) or not isinstance(length, int) or length < 0 or part_id < 0:
                raise BenchError(f"{place} must have whole numbers {kind.id_field} and token_length; repair that line")
            lengths[-1][part_id] = length
    requests: list[list[Part]] = []
    for place, record in _records(folder / "0_trace.jsonl"):
        if limit is not None and len(requests) == limit:
            break
        parts = []
        try:
            for name, ids in record["hash_ids"].items():
                kind_number = _KIND_BY_FIELD[name]
                parts += [Part(kind_number, part_id, lengths[kind_number][part_id]) for part_id in ids]
        except (KeyError, TypeError, AttributeError) as error:
            raise BenchError(
                f"{place} must have hash_ids with ids from the files of lengths, trouble at {error}; repair that line"
            ) from error
        requests.append(parts)
    if not requests:
        raise BenchError("0_trace.jsonl holds no requests; give the folder of the whole trace")
    return requests


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in a file of JSON lines, each with its place. Blank lines occur and are passed over."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(
            f"there is no RAGPulse trace in {file.parent} ({file.name} cannot be read); get flashserve/RAGPulse from "
            "GitHub, put 0_trace.jsonl to 5_web_search.jsonl into FOLDER/ragpulse, and give --traces FOLDER"
        ) from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{file.name} line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BenchError(f"{place} is not JSON ({error}); repair that line") from error
        if not isinstance(record, dict):
            raise BenchError(f"{place} is not a JSON object; repair that line")
        yield place, record


def part_tokens(part: Part) -> TokenArray:
    """The made-up text of a part: the same for the same kind and id, whatever its place."""
    return np.random.default_rng([part.kind, part.id]).integers(0, _VOCAB, part.tokens, dtype=np.uint32)


def prompt_of(parts: Sequence[Part], text: Callable[[Part], TokenArray]) -> tuple[TokenArray, Any, list[int]]:
    """A prompt's tokens, the kind of each token, and the ends of its parts."""
    sizes = [part.tokens for part in parts]
    tokens = np.concatenate([np.empty(0, dtype=np.uint32), *(text(part) for part in parts)])
    return tokens, np.repeat([part.kind for part in parts], sizes), [int(end) for end in np.cumsum(sizes)]


def by_kind(kinds: Any) -> Any:
    """How many tokens there are of each kind."""
    return np.bincount(kinds, minlength=len(KINDS))
