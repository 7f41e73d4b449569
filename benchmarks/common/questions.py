"""Questions with passages and answers from a file, as MuSiQue is prepared for CacheBlend's evaluation.

Used by the bench's RAG workload (``--data``) and by other benchmarks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.common.report import BenchError

SHORTEST, LONGEST = 700, 1400  # characters between which a passage may be cut
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s)")


def read_questions(file: Path) -> list[dict[str, Any]]:
    """The records of ``file``, each with question, answers and two passages at least."""
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(
            f"there are no questions in {file} ({type(error).__name__}); give --data a JSON file with a list of "
            '{"question", "answers", "ctxs": [{"title", "text"}]}, such as MuSiQue as CacheBlend\'s evaluation has it'
        ) from error
    shaped = isinstance(records, list) and all(
        isinstance(record, dict) and {"question", "answers", "ctxs"} <= set(record) and isinstance(record["ctxs"], list)
        for record in records
    )
    if not shaped:
        raise BenchError(f"{file.name} must hold a list of objects with question, answers and ctxs; give another file")
    if any(not isinstance(ctx, dict) or "text" not in ctx for record in records for ctx in record["ctxs"]):
        raise BenchError(f"every passage (ctxs) in {file.name} must be an object with text; give another file")
    if any(len(record["ctxs"]) < 2 for record in records):
        raise BenchError(f"every question in {file.name} needs two passages at least; take the others out")
    return list(records)


def cut_at_sentence(text: str, target: int) -> str:
    """``text`` up to the end of the sentence that ends nearest to ``target`` characters, or of a word if none does."""
    if len(text) <= target:
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text) if SHORTEST <= match.end() <= LONGEST]
    if ends:
        return text[: min(ends, key=lambda end: (abs(end - target), end))]
    return text[:target].rpartition(" ")[0] or text[:target]
