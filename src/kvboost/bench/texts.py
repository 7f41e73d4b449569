"""Texts for the workloads: made-up prose with facts one can ask for, in lengths counted in tokens.

Used by :mod:`kvboost.bench.workloads` and by the repository's benchmarks. Invariant: the same seed and tokenizer give
the same texts, and nothing is downloaded.
"""

from __future__ import annotations

import random
from typing import Any

_WHO = ("engineer", "botanist", "clerk", "sailor", "teacher", "painter", "surveyor", "baker", "printer", "pilot")
_DID = ("measured", "described", "repaired", "sold", "painted", "crossed", "copied", "planned", "counted", "found")
_WHAT = ("bridge", "harbour", "orchard", "clock", "map", "library", "glacier", "canal", "lighthouse", "violin", "mill")
_WHERE = ("Bergen", "Porto", "Kyoto", "Quito", "Tartu", "Cork", "Lagos", "Hobart", "Izmir", "Ghent", "Lima", "Oulu")
_HOW = ("with great care", "in a single week", "against all advice", "for a small fee", "in heavy rain", "by lamplight")
_WHY = (
    "because the old one had failed",
    "so that trade could go on",
    "as the council had asked",
    "although nobody had paid for it",
    "which the newspapers praised",
    "before winter closed the roads",
)


class Writer:
    """Texts of about so many tokens."""

    def __init__(self, tokenizer: Any, *, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def fact(self) -> tuple[str, str]:
        """A sentence, and a question that it answers."""
        who, did, what = self.rng.choice(_WHO), self.rng.choice(_DID), self.rng.choice(_WHAT)
        where, year = self.rng.choice(_WHERE), self.rng.randint(1700, 1990)
        tail = f"{self.rng.choice(_HOW)}, {self.rng.choice(_WHY)}"
        said = f"In {year} a {who} from {where} {did} the {what} of {self.rng.choice(_WHERE)} {tail}."
        return said, f"Who {did} a {what} in {year}, and where did they come from?"

    def prose(self, tokens: int) -> str:
        """Sentences, about ``tokens`` long and at least one."""
        return self.passage(tokens)[0]

    def passage(self, tokens: int) -> tuple[str, str]:
        """Sentences, and a question about one of them."""
        sentences: list[str] = []
        questions: list[str] = []
        length = 0
        while length < tokens or not sentences:
            said, asked = self.fact()
            sentences.append(said)
            questions.append(asked)
            length += self.count(" " + said)
        return " ".join(sentences), self.rng.choice(questions)

    def words(self, tokens: int) -> str:
        """Words in no order, which nothing else has."""
        pool = (*_WHO, *_DID, *_WHAT, *_WHERE)
        made: list[str] = []
        length = 0
        while length < tokens:
            some = [f"{self.rng.choice(pool)}{self.rng.randrange(1000)}" for _ in range(4)]
            made += some
            length += self.count(" " + " ".join(some))
        return " ".join(made)
