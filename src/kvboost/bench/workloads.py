"""What `kvboost bench` asks: kinds of traffic, each a list of prompts in the order they are sent.

Used by :mod:`kvboost.bench.run`. Every contestant gets the same token ids. Answers inside prompts are prepared, not the
contestants' own, so that prompts do not depend on who answers. Invariant: the same seed, tokenizer and length give the
same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost.bench.questions import LONGEST, SHORTEST, cut_at_sentence, read_questions
from kvboost.bench.report import BenchError
from kvboost.bench.texts import Writer
from kvboost.config import DEFAULT_CHUNK
from kvboost.core.chunking import NaturalChunker
from kvboost.hf.prompt import PromptEncoder

Message = dict[str, str]
Prompt = str | list[Message]

MIN_TOKENS = 64
_ANY_ID = 2**31  # the parent loads no model, which would know how many ids there are
_TURNS = 8
_REASONING_TURNS = 5
_PASSAGES = 6
_LENGTHS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of --tokens, for the documents
_CHARACTERS = 4  # of a token, about


@dataclass(frozen=True)
class Request:
    """One prompt, as every contestant gets it."""

    tokens: list[int]
    text: str
    """The same as text, for contestants that take no tokens."""
    boundaries: list[int]
    """The ends of a chat's messages, as ``KVBoost.chat`` finds them; none for a text."""
    counts: bool
    """False for prompts that only fill caches: a workload's first ones. They are in the cold control."""


@dataclass(frozen=True)
class Plan:
    """What prompts are made of."""

    writer: Writer
    tokens: int
    data: Path | None = None

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


def _numbered(prompts: Sequence[Prompt], *, fill: int) -> list[tuple[Prompt, bool]]:
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
    return _numbered(prompts, fill=1)


def _reasoning(plan: Plan) -> list[tuple[Prompt, bool]]:
    """Within a turn the prompt has the thinking before its tool call; later turns have it no more."""
    writer, prompts = plan.writer, []
    kept: list[Message] = [{"role": "system", "content": writer.prose(plan.part(0.1))}]
    for _ in range(_REASONING_TURNS):
        kept.append({"role": "user", "content": writer.prose(plan.part(0.02))})
        prompts.append(list(kept))
        thought, call = writer.prose(plan.part(0.06)), writer.fact()[1]
        result = {"role": "user", "content": "Tool result:\n" + writer.prose(plan.part(0.09))}
        thinking = {"role": "assistant", "content": f"<think>{thought}</think>\nLook up: {call}"}
        prompts.append([*kept, thinking, result])
        kept += [{"role": "assistant", "content": f"Look up: {call}"}, result]
        kept.append({"role": "assistant", "content": writer.prose(plan.part(0.03))})
    return _numbered(prompts, fill=1)


def _code(plan: Plan) -> list[tuple[Prompt, bool]]:
    """Six files and a question; half-way a line of the third file is changed."""
    files = [plan.writer.code(plan.part(0.15)) for _ in range(6)]
    prompts = []
    for number in range(8):
        if number == 4:
            lines = files[2].split("\n")
            lines.insert(len(lines) // 2, "    # changed: see the discussion of this function")
            files[2] = "\n".join(lines)
        shown = "\n\n".join(f"### file_{index}.py\n{text}" for index, text in enumerate(files))
        prompts.append(f"{shown}\n\n### Question\n{plan.writer.fact()[1]}\n### Answer\n")
    return _numbered(prompts, fill=1)


def _rag(plan: Plan) -> list[tuple[Prompt, bool]]:
    """Passages of a pool in ever new orders, as plain text in one message: of a bare text a chat model ends at once."""
    pool = _passages(plan)
    rng, some, prompts = plan.writer.rng, len(pool) // 2, []
    chosen = [pool[:some], pool[some:]]  # the first two prompts show every passage once
    chosen += [rng.sample(pool, some) for _ in range(8)]
    for passages in chosen:
        texts = "\n\n".join(text for text, _ in passages)
        question = rng.choice(passages)[1]
        content = f"Answer from these passages.\n\n{texts}\n\nQuestion: {question}"
        prompts.append([{"role": "user", "content": content}])
    return _numbered(prompts, fill=2)


def _passages(plan: Plan) -> list[tuple[str, str]]:
    """Twice as many passages as a prompt has, each with a question."""
    if plan.data is None:
        return [plan.writer.passage(plan.part(0.9 / _PASSAGES)) for _ in range(2 * _PASSAGES)]
    records = read_questions(plan.data.expanduser())
    target = min(LONGEST, max(SHORTEST, _CHARACTERS * plan.part(0.9 / _PASSAGES)))
    count = max(2, min(_PASSAGES, _CHARACTERS * plan.tokens // target))
    found: list[tuple[str, str]] = []
    for record in plan.writer.rng.sample(records, len(records)):
        found += [(cut_at_sentence(str(c["text"]).strip(), target), record["question"]) for c in record["ctxs"]]
        if len(found) >= 2 * count:
            return found[: 2 * count]
    raise BenchError(f"{plan.data.name} has {len(found)} passages, and {2 * count} are needed; give more --data")


def _ragpulse(plan: Plan) -> list[tuple[Prompt, bool]]:
    """The shape of the RAGPulse trace: of a prompt 47 % are system prompts, 43 % popular passages, 9 % history."""
    writer, rng, prompts = plan.writer, plan.writer.rng, []
    shared, variants = writer.prose(plan.part(0.32)), [writer.prose(plan.part(0.15)) for _ in range(3)]
    pool = [writer.prose(plan.part(0.085)) for _ in range(12)]
    weights = [1 / (rank + 1) for rank in range(len(pool))]  # a few passages are asked for most of the time
    for _ in range(12):
        passages: list[str] = []
        while len(passages) < 5:
            drawn = rng.choices(pool, weights)[0]
            passages += [] if drawn in passages else [drawn]
        parts = [shared, rng.choice(variants), *passages, writer.prose(plan.part(0.09)), writer.fact()[1]]
        prompts.append("\n\n".join(parts))
    return _numbered(prompts, fill=3)


def _few_shot(plan: Plan) -> list[tuple[Prompt, bool]]:
    writer = plan.writer
    examples: list[str] = []
    while writer.count("\n\n".join(examples)) < plan.part(0.93):
        said, asked = writer.fact()
        examples.append(f"Text: {said}\nQuestion: {asked}\nAnswer: {' '.join(said.split()[2:6])}")
    head = "Answer in the words of the text.\n\n" + "\n\n".join(examples)
    inputs = [writer.fact() for _ in range(8)]
    return _numbered([f"{head}\n\nText: {said}\nQuestion: {what}\nAnswer:" for said, what in inputs], fill=1)


def _agent(plan: Plan) -> list[tuple[Prompt, bool]]:
    """A system prompt with tools, a task, and eight calls with their results."""
    writer, prompts = plan.writer, []
    tools = "\n".join(f"- tool_{number}(query): {writer.fact()[1]}" for number in range(3))
    system = f"You work in steps and call tools.\n{tools}\n{writer.prose(plan.part(0.2))}"
    messages: list[Message] = [
        {"role": "system", "content": system},
        {"role": "user", "content": writer.prose(plan.part(0.03))},
    ]
    for number in range(_TURNS):
        prompts.append(list(messages))
        messages.append({"role": "assistant", "content": f"tool_{number % 3}({writer.fact()[1]!r})"})
        messages.append({"role": "user", "content": "Tool result:\n" + writer.prose(plan.part(0.08))})
    return _numbered(prompts, fill=1)


def _batch(plan: Plan) -> list[tuple[Prompt, bool]]:
    """One template, filled in: a name at its beginning, a record in its middle."""
    writer, prompts = plan.writer, []
    rules, after = writer.prose(plan.part(0.6)), writer.prose(plan.part(0.2))
    for number in range(8):
        name = f"customer {writer.rng.randrange(10**6)}"
        record = writer.prose(plan.part(0.15))
        prompts.append(f"Letter {number} to {name}.\n\n{rules}\n\nRecord:\n{record}\n\n{after}\n\nLetter:")
    return _numbered(prompts, fill=1)


def _random(plan: Plan) -> list[tuple[Prompt, bool]]:
    return _numbered([plan.writer.words(plan.tokens) for _ in range(5)], fill=0)


RECIPES: dict[str, Recipe] = {
    "document": Recipe("questions about documents of several lengths, 95 % of each prompt known", _document),
    "chat": Recipe("a chat of 8 turns", _chat),
    "reasoning": Recipe("a chat with tools whose earlier thinking is stripped", _reasoning, moves=True),
    "code": Recipe("questions about six files, one of them edited half-way", _code, moves=True),
    "rag": Recipe("passages in plain text, in ever new orders", _rag, moves=True),
    "ragpulse": Recipe("prompts in the shape of the RAGPulse trace", _ragpulse, moves=True),
    "few-shot": Recipe("one set of examples, a new input each time", _few_shot),
    "agent": Recipe("an agent with tools: 8 calls and their results", _agent),
    "batch": Recipe("one template with a name at its beginning and a record in its middle", _batch, moves=True),
    "random": Recipe("no two prompts share anything", _random),
}


class Encoder:
    """Prompts as token ids, as the engine encodes them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, max_tokens=None, vocab_size=_ANY_ID)
        self._gap = NaturalChunker(DEFAULT_CHUNK).min_tokens

    def request(self, prompt: Prompt, *, counts: bool = True) -> Request:
        """A text, or a chat by the tokenizer's template; without a template, by roles and lines."""
        boundaries: list[int] = []
        if isinstance(prompt, str):
            tokens = self._encoder.encode(prompt)
        elif getattr(self._tokenizer, "chat_template", None) is None:
            lines = [f"{message['role']}: {message['content']}\n" for message in prompt]
            tokens, boundaries = self._encoder.join([*lines, "assistant:"])
        else:
            tokens, boundaries = self._encoder.encode_chat(prompt, min_gap=self._gap, template_kwargs={})
        return self.of_tokens(tokens, boundaries, counts=counts)

    def of_tokens(self, tokens: Sequence[int], boundaries: Sequence[int], *, counts: bool = True) -> Request:
        """A request of ids that are there already."""
        ids = [int(token) for token in tokens]
        text = str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        return Request(ids, text, list(boundaries), counts)


def build(name: str, tokenizer: Any, *, tokens: int, seed: int, data: Path | None = None) -> list[Request]:
    """The requests of a workload whose longest prompts have about ``tokens`` tokens."""
    if tokens < MIN_TOKENS:
        raise BenchError(f"--tokens {tokens} is too short to show anything; give {MIN_TOKENS} or more")
    plan = Plan(Writer(tokenizer, seed=seed), tokens, data)
    encoder = Encoder(tokenizer)
    return [encoder.request(prompt, counts=counts) for prompt, counts in RECIPES[name].build(plan)]
