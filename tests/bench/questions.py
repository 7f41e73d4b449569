"""Made-up questions in the shape of the MuSiQue file, with passages that share no text."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_questions(file: Path, *, count: int = 6, passages: int = 5) -> Path:
    """Write a file of questions and return it."""
    rng = random.Random(3)

    def sentence() -> str:
        return " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(12)) + "."

    records = [
        {
            "question": f"what is number {number}?",
            "answers": [f"right {number}", f"also {number}"],
            "ctxs": [{"title": "", "text": " ".join(sentence() for _ in range(32))} for _ in range(passages)],
        }
        for number in range(count)
    ]
    file.write_text(json.dumps(records))
    return file
