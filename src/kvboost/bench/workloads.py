"""What `kvboost bench` asks: kinds of traffic, each a list of prompts in the order they are sent.

Used by :mod:`kvboost.bench.compare`; ``benchmarks/bench`` has more kinds. Answers inside prompts are prepared, not a
contestant's own, so that prompts do not depend on who answers. Invariant: the same seed, tokenizer and length give the
same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.config import DEFAULT_CHUNK
from kvboost.core.chunking import NaturalChunker
from kvboost.errors import ConfigError
from kvboost.hf.prompt import PromptEncoder

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


Prompt = str | list[dict[str, str]]
"""A text, or the messages of a chat."""

MIN_TOKENS = 64
PASSAGES = 6
"""Of a prompt of ``rag``."""
_ANY_ID = 2**31  # no model is loaded yet, which would know how many ids there are
_TURNS = 8
_LENGTHS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of --tokens, for the documents


@dataclass(frozen=True)
class Request:
    """One prompt, as every contestant gets it."""

    tokens: list[int]
    boundaries: list[int]
    """The ends of a chat's messages, as ``KVBoost.chat`` finds them; none for a text."""
    counts: bool = True
    """False for prompts that only fill caches: a workload's first ones. They are in the cold control."""


@dataclass(frozen=True)
class Plan:
    """What prompts are made of."""

    writer: Writer
    tokens: int

    def part(self, share: float) -> int:
        """Tokens of a part of the longest prompt."""
        return max(4, round(self.tokens * share))


@dataclass(frozen=True)
class Recipe:
    """A kind of traffic."""

    about: str
    build: Callable[[Plan], list[tuple[Prompt, bool]]]
    """Prompts with whether they count."""
    moves: bool = False
    """Whether text comes again behind other text, so that approximate reuse is measured too."""


def numbered(prompts: Sequence[Prompt], *, fill: int) -> list[tuple[Prompt, bool]]:
    """All count but the first ``fill``."""
    return [(prompt, number >= fill) for number, prompt in enumerate(prompts)]


def _document(plan: Plan) -> list[tuple[Prompt, bool]]:
    prompts: list[tuple[Prompt, bool]] = []
    for share in _LENGTHS:
        length = plan.part(share)
        document = plan.writer.prose(round(0.95 * length))
        for number in range(3):
            question = plan.writer.words(max(8, round(0.05 * length)))
            prompts.append((f"{document}\n\nQuestion: {question}\nAnswer:", number > 0))
    return prompts


def _chat(plan: Plan) -> list[tuple[Prompt, bool]]:
    writer, messages, prompts = plan.writer, [], []
    messages.append({"role": "system", "content": writer.prose(plan.part(0.12))})
    for _ in range(_TURNS):
        messages.append({"role": "user", "content": writer.prose(plan.part(0.03))})
        prompts.append(list(messages))
        messages.append({"role": "assistant", "content": writer.prose(plan.part(0.08))})
    return numbered(prompts, fill=1)


def _rag(plan: Plan) -> list[tuple[Prompt, bool]]:
    return in_new_orders(plan, [plan.writer.passage(plan.part(0.9 / PASSAGES)) for _ in range(2 * PASSAGES)])


def in_new_orders(plan: Plan, pool: Sequence[tuple[str, str]]) -> list[tuple[Prompt, bool]]:
    """Prompts of half of the pool's passages, each of which comes with a question.

    They are plain text in one message: of a bare text a chat model ends at once.
    """
    rng, some, prompts = plan.writer.rng, len(pool) // 2, []
    chosen = [pool[:some], pool[some:]]  # the first two prompts show every passage once
    chosen += [rng.sample(pool, some) for _ in range(8)]
    for passages in chosen:
        texts = "\n\n".join(text for text, _ in passages)
        question = rng.choice(passages)[1]
        content = f"Answer from these passages.\n\n{texts}\n\nQuestion: {question}"
        prompts.append([{"role": "user", "content": content}])
    return numbered(prompts, fill=2)


def _random(plan: Plan) -> list[tuple[Prompt, bool]]:
    return numbered([plan.writer.words(plan.tokens) for _ in range(5)], fill=0)


RECIPES: dict[str, Recipe] = {
    "document": Recipe("questions about documents of several lengths, 95 % of each prompt known", _document),
    "chat": Recipe("a chat of 8 turns", _chat),
    "rag": Recipe("passages in plain text, in ever new orders", _rag, moves=True),
    "random": Recipe("no two prompts share anything", _random),
}


def encode(tokenizer: Any, prompt: Prompt, *, counts: bool = True) -> Request:
    """A prompt as the engine encodes it; a chat without a template by roles and lines."""
    encoder = PromptEncoder(tokenizer, max_tokens=None, vocab_size=_ANY_ID)
    if isinstance(prompt, str):
        return Request(encoder.encode(prompt), [], counts)
    if getattr(tokenizer, "chat_template", None) is None:
        lines = [f"{message['role']}: {message['content']}\n" for message in prompt]
        return Request(*encoder.join([*lines, "assistant:"]), counts)
    gap = NaturalChunker(DEFAULT_CHUNK).min_tokens
    return Request(*encoder.encode_chat(prompt, min_gap=gap, template_kwargs={}), counts)


def build(recipe: Recipe, tokenizer: Any, *, tokens: int, seed: int) -> list[Request]:
    """The requests of a workload whose longest prompts have about ``tokens`` tokens."""
    if tokens < MIN_TOKENS:
        raise ConfigError(f"--tokens {tokens} is too short to show anything; give {MIN_TOKENS} or more")
    prompts = recipe.build(Plan(Writer(tokenizer, seed=seed), tokens))
    return [encode(tokenizer, prompt, counts=counts) for prompt, counts in prompts]
