"""More kinds of traffic than `kvboost bench` has, questions from a file, and prompts as text for rivals that take text.

Used by :mod:`benchmarks.bench.run`. Invariant: the same seed, tokenizer, length and file give the same prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.measure import TextSource
from benchmarks.common.questions import LONGEST, SHORTEST, cut_at_sentence, read_questions
from benchmarks.common.report import BenchError
from kvboost.bench import workloads
from kvboost.bench.workloads import PASSAGES, Plan, Prompt, Recipe, Request, in_new_orders, numbered

_CALLS = 8
_REASONING_TURNS = 5
_CHARACTERS = 4  # of a token, about


@dataclass(frozen=True)
class TextRequest(Request):
    """A prompt that is there as text too, for contestants that take no tokens."""

    text: str = ""


def _reasoning(plan: Plan) -> list[tuple[Prompt, bool]]:
    """Within a turn the prompt has the thinking before its tool call; later turns have it no more."""
    writer, prompts = plan.writer, []
    kept: list[dict[str, str]] = [{"role": "system", "content": writer.prose(plan.part(0.1))}]
    for _ in range(_REASONING_TURNS):
        kept.append({"role": "user", "content": writer.prose(plan.part(0.02))})
        prompts.append(list(kept))
        thought, call = writer.prose(plan.part(0.06)), writer.fact()[1]
        result = {"role": "user", "content": "Tool result:\n" + writer.prose(plan.part(0.09))}
        thinking = {"role": "assistant", "content": f"<think>{thought}</think>\nLook up: {call}"}
        prompts.append([*kept, thinking, result])
        kept += [{"role": "assistant", "content": f"Look up: {call}"}, result]
        kept.append({"role": "assistant", "content": writer.prose(plan.part(0.03))})
    return numbered(prompts, fill=1)


def _code(plan: Plan) -> list[tuple[Prompt, bool]]:
    """Six files and a question; half-way a line of the third file is changed."""
    source = TextSource(plan.writer.tokenizer)
    files = [_lines(source, plan) for _ in range(6)]
    prompts = []
    for number in range(8):
        if number == 4:
            lines = files[2].split("\n")
            lines.insert(len(lines) // 2, "    # changed: see the discussion of this function")
            files[2] = "\n".join(lines)
        shown = "\n\n".join(f"### file_{index}.py\n{text}" for index, text in enumerate(files))
        prompts.append(f"{shown}\n\n### Question\n{plan.writer.fact()[1]}\n### Answer\n")
    return numbered(prompts, fill=1)


def _lines(source: TextSource, plan: Plan) -> str:
    """Lines of Python from the standard library, another part of it at every call."""
    text = source.words(plan.writer.rng.randrange(2**30), plan.part(0.15))
    return text.partition("\n")[2].rpartition("\n")[0] or text


def _rag_of(file: Path, plan: Plan) -> list[tuple[Prompt, bool]]:
    """The passages and questions of a file, in ever new orders."""
    records = read_questions(file.expanduser())
    target = min(LONGEST, max(SHORTEST, _CHARACTERS * plan.part(0.9 / PASSAGES)))
    count = max(2, min(PASSAGES, _CHARACTERS * plan.tokens // target))
    found: list[tuple[str, str]] = []
    for record in plan.writer.rng.sample(records, len(records)):
        found += [(cut_at_sentence(str(c["text"]).strip(), target), record["question"]) for c in record["ctxs"]]
        if len(found) >= 2 * count:
            return in_new_orders(plan, found[: 2 * count])
    raise BenchError(f"{file.name} has {len(found)} passages, and {2 * count} are needed; give more --data")


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
    return numbered(prompts, fill=3)


def _few_shot(plan: Plan) -> list[tuple[Prompt, bool]]:
    writer = plan.writer
    examples: list[str] = []
    while writer.count("\n\n".join(examples)) < plan.part(0.93):
        said, asked = writer.fact()
        examples.append(f"Text: {said}\nQuestion: {asked}\nAnswer: {' '.join(said.split()[2:6])}")
    head = "Answer in the words of the text.\n\n" + "\n\n".join(examples)
    inputs = [writer.fact() for _ in range(8)]
    return numbered([f"{head}\n\nText: {said}\nQuestion: {what}\nAnswer:" for said, what in inputs], fill=1)


def _agent(plan: Plan) -> list[tuple[Prompt, bool]]:
    """A system prompt with tools, a task, and eight calls with their results."""
    writer, prompts = plan.writer, []
    tools = "\n".join(f"- tool_{number}(query): {writer.fact()[1]}" for number in range(3))
    system = f"You work in steps and call tools.\n{tools}\n{writer.prose(plan.part(0.2))}"
    messages: list[dict[str, str]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": writer.prose(plan.part(0.03))},
    ]
    for number in range(_CALLS):
        prompts.append(list(messages))
        messages.append({"role": "assistant", "content": f"tool_{number % 3}({writer.fact()[1]!r})"})
        messages.append({"role": "user", "content": "Tool result:\n" + writer.prose(plan.part(0.08))})
    return numbered(prompts, fill=1)


def _batch(plan: Plan) -> list[tuple[Prompt, bool]]:
    """One template, filled in: a name at its beginning, a record in its middle."""
    writer, prompts = plan.writer, []
    rules, after = writer.prose(plan.part(0.6)), writer.prose(plan.part(0.2))
    for number in range(8):
        name = f"customer {writer.rng.randrange(10**6)}"
        record = writer.prose(plan.part(0.15))
        prompts.append(f"Letter {number} to {name}.\n\n{rules}\n\nRecord:\n{record}\n\n{after}\n\nLetter:")
    return numbered(prompts, fill=1)


RECIPES: dict[str, Recipe] = {
    **workloads.RECIPES,
    "reasoning": Recipe("a chat with tools whose earlier thinking is stripped", _reasoning, moves=True),
    "code": Recipe("questions about six files, one of them edited half-way", _code, moves=True),
    "ragpulse": Recipe("prompts in the shape of the RAGPulse trace", _ragpulse, moves=True),
    "few-shot": Recipe("one set of examples, a new input each time", _few_shot),
    "agent": Recipe("an agent with tools: 8 calls and their results", _agent),
    "batch": Recipe("one template with a name at its beginning and a record in its middle", _batch, moves=True),
}


def build(name: str, tokenizer: Any, *, tokens: int, seed: int, data: Path | None = None) -> list[TextRequest]:
    """The requests of a workload; ``data`` has the passages of ``rag``."""
    recipe = RECIPES[name]
    if name == "rag" and data is not None:
        recipe = replace(recipe, build=partial(_rag_of, data))
    requests = workloads.build(recipe, tokenizer, tokens=tokens, seed=seed)
    return [with_text(request, tokenizer) for request in requests]


def with_text(request: Request, tokenizer: Any) -> TextRequest:
    """The request with the text of its tokens."""
    text = str(tokenizer.decode(request.tokens, clean_up_tokenization_spaces=False))
    return TextRequest(request.tokens, request.boundaries, request.counts, text)
