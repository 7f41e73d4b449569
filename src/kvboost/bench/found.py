"""Found: how much of a RAG trace is reused, by prefix only and wherever the text stands.

Called by the command line. Needs no model: the RAGPulse trace names the parts of 7,106 prompts by id and
length, every id becomes made-up text of that length, and the prompts go through :mod:`kvboost.core` as the
engine's do. Invariant: equal ids of a kind are equal text, so what is found depends on ids, lengths and order only,
and a request finds nothing of itself: it looks everything up before anything of it is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvboost.bench.measure import positive
from kvboost.bench.report import BenchError, Progress, Report, Table, describe_machine
from kvboost.core.chunking import ContentChunker
from kvboost.core.keys import chunk_keys
from kvboost.core.plan import reusable_chunks
from kvboost.extend import TokenArray
from kvboost.types import Chunk

_ROOT = hashlib.sha256(b"kvboost.bench.found").digest()
_VOCAB = 49152
_BAR = 65
_PREFIX, _KEEP_ALL, _KEEP_UNTAINTED = "prefix only", "anywhere, rule (a)", "anywhere, rule (b)"


@dataclass(frozen=True)
class _Kind:
    """One kind of part: what the table calls it, what the trace calls it, and where its lengths stand."""

    label: str
    field: str
    file: str
    id_field: str


_KINDS = (
    _Kind("system prompt", "sys_prompt", "1_sys_prompt.jsonl", "sys_prompt_id"),
    _Kind("passages", "passages_ids", "2_passages.jsonl", "passage_id"),
    _Kind("history", "history", "3_history.jsonl", "history_id"),
    _Kind("web search", "web_search", "5_web_search.jsonl", "web_search_id"),
    _Kind("user input", "user_input", "4_user_input.jsonl", "user_input_id"),
)
_KIND_BY_FIELD = {kind.field: number for number, kind in enumerate(_KINDS)}


@dataclass(frozen=True)
class Part:
    """One piece of a prompt. ``kind`` counts in the order of ``_KINDS``."""

    kind: int
    id: int
    tokens: int


@dataclass
class Keeper:
    """Everything that one way of reusing has kept so far, without a limit.

    A chunk is kept under its prefix key only if nothing before it was moved (what is computed behind moved KV
    is approximate and must never pass for exact), and under its content key by the rule that is counted.
    """

    anywhere: bool
    """Look up content keys too, behind the leading run of prefix keys."""
    keep_tainted: bool
    """Keep chunks that stand behind a moved one, under their content key."""
    _prefix_keys: set[bytes] = field(default_factory=set, repr=False)
    _content_keys: set[bytes] = field(default_factory=set, repr=False)

    def read(self, chunks: Sequence[Chunk]) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
        """The chunks found by prefix and those found by content alone; then keeps what may be kept."""
        numbered = enumerate(chunks)
        leading = next((number for number, c in numbered if c.prefix_key not in self._prefix_keys), len(chunks))
        moved = [
            number
            for number in range(leading, len(chunks))
            if self.anywhere and chunks[number].content_key in self._content_keys
        ]
        untainted = chunks[: moved[0]] if moved else chunks
        self._prefix_keys.update(c.prefix_key for c in untainted)
        self._content_keys.update(c.content_key for c in (chunks if self.keep_tainted else untainted))
        return chunks[:leading], [chunks[number] for number in moved]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    parser.add_argument(
        "--trace",
        type=Path,
        default=Path("../shared/traces/ragpulse"),
        metavar="FOLDER",
        help="the RAGPulse trace (default ../shared/traces/ragpulse)",
    )
    parser.add_argument("--requests", type=positive, help="how many requests, from the first on (default all)")
    parser.add_argument("--chunk-size", type=positive, default=128, help="tokens per chunk on average (default 128)")
    parser.add_argument(
        "--no-boundaries", action="store_true", help="do not tell the chunker where the parts of a prompt end"
    )


def run(args: argparse.Namespace) -> Report:
    """Replay the trace and count what each way of reusing finds."""
    requests = read_trace(args.trace.expanduser(), limit=args.requests)
    keepers = {
        _PREFIX: Keeper(anywhere=False, keep_tainted=True),
        _KEEP_ALL: Keeper(anywhere=True, keep_tainted=True),
        _KEEP_UNTAINTED: Keeper(anywhere=True, keep_tainted=False),
    }
    chunker = ContentChunker(args.chunk_size)
    total = np.zeros(len(_KINDS), dtype=np.int64)
    found = {name: {"exact": total.copy(), "moved": total.copy()} for name in keepers}
    per_request: dict[str, list[int]] = {name: [] for name in keepers}
    text = lru_cache(maxsize=None)(part_tokens)  # a popular passage is asked for thousands of times
    progress = Progress("requests", len(requests))
    for parts in requests:
        tokens, kinds, ends = _prompt(parts, text)
        total += _by_kind(kinds)
        chunks = chunk_keys(_ROOT, tokens, chunker.cut(tokens, () if args.no_boundaries else ends))
        # The step with the last token always runs and is not stored, as in the engine.
        usable = reusable_chunks(chunks, prompt_tokens=len(tokens))
        for name, keeper in keepers.items():
            exact, moved = keeper.read(usable)
            for trust, reused in (("exact", exact), ("moved", moved)):
                for chunk in reused:
                    found[name][trust] += _by_kind(kinds[chunk.start : chunk.end])
            per_request[name].append(sum(c.end - c.start for c in (*exact, *moved)))
        progress.step()
    report = Report("found")
    report.raw = {
        "requests": len(requests),
        "tokens": _labelled(total),
        "found": {name: {trust: _labelled(counts) for trust, counts in both.items()} for name, both in found.items()},
        "reused_tokens_by_request": per_request,
    }
    report.tables.append(_table(report.raw, args))
    return report


def read_trace(folder: Path, *, limit: int | None = None) -> list[list[Part]]:
    """The parts of every prompt, in the trace's own order; the first ``limit`` prompts only."""
    lengths: list[dict[int, int]] = []
    for kind in _KINDS:
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
        raise BenchError("0_trace.jsonl holds no requests; give the folder of the whole trace with --trace FOLDER")
    return requests


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in a file of JSON lines, each with its place. Blank lines occur and are passed over."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(
            f"there is no RAGPulse trace in {file.parent} ({file.name} cannot be read); get flashserve/RAGPulse from "
            "GitHub and give the folder that holds 0_trace.jsonl to 5_web_search.jsonl with --trace FOLDER"
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


def _prompt(parts: Sequence[Part], text: Callable[[Part], TokenArray]) -> tuple[TokenArray, Any, list[int]]:
    """A prompt's tokens, the kind of each token, and the ends of its parts."""
    sizes = [part.tokens for part in parts]
    tokens = np.concatenate([np.empty(0, dtype=np.uint32), *(text(part) for part in parts)])
    return tokens, np.repeat([part.kind for part in parts], sizes), [int(end) for end in np.cumsum(sizes)]


def _by_kind(kinds: Any) -> Any:
    return np.bincount(kinds, minlength=len(_KINDS))


def _labelled(counts: Any) -> dict[str, int]:
    return {kind.label: int(count) for kind, count in zip(_KINDS, counts, strict=True)}


def _table(raw: dict[str, Any], args: argparse.Namespace) -> Table:
    total: dict[str, int] = raw["tokens"]
    labels = ["passages", *(label for label in total if label != "passages")]
    table = Table(
        "Found: share of prompt tokens whose KV is at hand, unlimited capacity",
        describe_machine(),
        ["reused, % of tokens", "all", *labels],
    )

    def shares(*counts: dict[str, int]) -> list[str]:
        reused = {label: sum(count[label] for count in counts) for label in total}
        cells = [(sum(reused.values()), sum(total.values())), *((reused[label], total[label]) for label in labels)]
        return [f"{100 * part / whole:.1f}" if whole else "-" for part, whole in cells]

    for name, both in raw["found"].items():
        table.add(name, *shares(both["exact"], both["moved"]))
        if name != _PREFIX:
            table.add(f"{name}: exact part", *shares(both["exact"]))
    table.add("tokens in the trace", f"{sum(total.values()):,}", *(f"{total[label]:,}" for label in labels))
    cut = "by the chunker alone" if args.no_boundaries else "at the end of every part and by the chunker between"
    reached = shares(*raw["found"][_KEEP_ALL].values())[0]
    table.notes.append(
        f"{raw['requests']:,} requests in the trace's order, made-up text, cut {cut} (content chunks of "
        f"{args.chunk_size}). The chunk with the last token is neither reused nor kept. Prefix only: the leading run "
        "of chunks seen behind the same chunks. Anywhere: that run, then every chunk seen before in any place (moved). "
        "Rule (a) keeps every chunk; rule (b) keeps none that stands behind a request's first moved chunk. In both, a "
        "prefix key is given only to chunks before it. Bar for the whole trace by rule (a): "
        f"{_BAR} % of all tokens; here {reached} %."
    )
    return table
