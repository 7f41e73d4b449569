"""Prompts of retrieved passages, and the histories: how the passages may have been prefilled before.

Used by the benchmarks of non-prefix reuse. Invariants: a passage has the same token ids in every prompt, because the
parts are tokenised one by one; no history stores a prompt's own order, so that in the prompt only the head is an exact
hit and all passages are non-prefix hits. :func:`passages_reused` checks a prefill against that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from benchmarks.common.measure import joined, positive
from benchmarks.common.questions import LONGEST, SHORTEST, cut_at_sentence, read_questions
from benchmarks.common.report import BenchError
from kvboost.engine import KVBoost
from kvboost.types import ReuseReport

Ids = tuple[int, ...]

_SYSTEM = "You answer questions from the passages you are given. Answer with a few words only, without explanation."
_BEFORE_PASSAGES = "Read these passages.\n\n"
_PLACE = "<<<passages>>>"  # where the passages go in the rendered chat
_MIN_FOUND = 0.95  # of the passages' tokens must be reused, or the history is not what it says


@dataclass(frozen=True)
class RagPrompt:
    """A question behind its passages, part by part."""

    question: str
    answers: tuple[str, ...]
    """Any of them is right."""
    head: Ids
    """Everything before the first passage: system prompt and the beginning of the user's message."""
    passages: tuple[Ids, ...]
    tail: Ids
    """Everything behind the last passage: the question and the beginning of the answer."""
    unrelated: tuple[Ids, ...]
    """Passages of another question: the first two are what ``unrelated`` puts before a passage."""
    primer: Ids
    """One token that may stand before any text."""
    line_break: Ids

    @property
    def tokens(self) -> list[int]:
        """The whole prompt."""
        return [*self.head, *(token for passage in self.passages for token in passage), *self.tail]

    @property
    def boundaries(self) -> list[int]:
        """Where the head and every passage end."""
        return joined([self.head, *self.passages])[1]

    @property
    def passage_tokens(self) -> int:
        """Tokens in all passages."""
        return sum(map(len, self.passages))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark over these prompts."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="questions with passages and answers, such as MuSiQue's as CacheBlend's evaluation has them",
    )
    parser.add_argument(
        "--prompts", type=positive, default=30, help="questions, from the first on (default %(default)s)"
    )
    parser.add_argument("--passages", type=positive, default=6, help="passages per question (default 6)")
    parser.add_argument(
        "--whole-passages",
        action="store_true",
        help=f"keep passages whole (about 2,400 characters) instead of cutting them to {SHORTEST} to {LONGEST}",
    )


def load_prompts(
    tokenizer: Any, file: Path | None, *, count: int, passages: int = 6, whole_passages: bool = False
) -> list[RagPrompt]:
    """The first ``count`` questions of ``file`` as prompts for this tokenizer."""
    if file is None:
        raise BenchError("this benchmark needs questions with passages; give them with --data FILE")
    records = read_questions(file.expanduser())
    if not 2 <= len(records) >= count:
        raise BenchError(f"{file.name} has {len(records)} questions; it needs two, and --prompts at most that many")
    before, behind = _frame(tokenizer)
    head = _ids(tokenizer, before)
    if getattr(tokenizer, "chat_template", None) is None:
        head = (*_begin_token(tokenizer), *head)

    def passage_ids(record: dict[str, Any], limit: int) -> tuple[Ids, ...]:
        texts = [_passage_text(record["question"], c, whole=whole_passages) for c in record["ctxs"][:limit]]
        return tuple(_ids(tokenizer, text) for text in texts)

    prompts = []
    for number, record in enumerate(records[:count]):
        if len(record["ctxs"]) < passages:
            raise BenchError(
                f"question {number + 1} of {file.name} has {len(record['ctxs'])} passages; give --passages that or less"
            )
        # The question half the file away: neighbours in such files are sometimes about the same thing.
        other = records[(number + len(records) // 2) % len(records)]
        prompts.append(
            RagPrompt(
                question=record["question"],
                answers=tuple(record["answers"]),
                head=head,
                passages=passage_ids(record, passages),
                tail=_ids(tokenizer, f"Question: {record['question']}\nAnswer in a few words.{behind}"),
                unrelated=passage_ids(other, passages),
                primer=_primer(tokenizer, head),
                line_break=_ids(tokenizer, "\n"),
            )
        )
    return prompts


def _ids(tokenizer: Any, text: str) -> Ids:
    return tuple(int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])


def _frame(tokenizer: Any) -> tuple[str, str]:
    """The text before the passages and the text behind the question, as the tokenizer's chat format has it."""
    if getattr(tokenizer, "chat_template", None) is None:
        return f"{_SYSTEM}\n\n{_BEFORE_PASSAGES}", "\nAnswer:"
    messages = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"{_BEFORE_PASSAGES}{_PLACE}"},
    ]
    chat = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    before, place, behind = chat.partition(_PLACE)
    if not place:
        raise BenchError("this tokenizer's chat template drops the user's message; give another model with --model")
    return before, behind


def _begin_token(tokenizer: Any) -> Ids:
    """The begin token, if this tokenizer puts it before plain text."""
    begin = getattr(tokenizer, "bos_token_id", None)
    return (int(begin),) if begin is not None and tokenizer("a")["input_ids"][0] == begin else ()


def _primer(tokenizer: Any, head: Ids) -> Ids:
    begin = getattr(tokenizer, "bos_token_id", None)
    return (int(begin) if begin is not None else head[0],)


def _passage_text(question: str, passage: dict[str, Any], *, whole: bool) -> str:
    text = str(passage["text"]).strip()
    if not whole:
        digest = hashlib.sha256(json.dumps([question, text]).encode()).digest()
        text = cut_at_sentence(text, SHORTEST + int.from_bytes(digest[:4], "big") % (LONGEST - SHORTEST + 1))
    title = str(passage.get("title", "")).strip()
    return f"{title}\n{text}\n\n" if title else f"{text}\n\n"


# How the passages were prefilled before. Each history warms an engine whose store is empty but for the head.

History = Callable[[KVBoost, RagPrompt], None]


def _warm(engine: KVBoost, before: Sequence[Sequence[int]], passage: Sequence[int]) -> None:
    """Prefill ``passage`` behind other parts, with a boundary around it.

    The parts before it are cut into pieces shorter than a chunk: found by content they would be further variants of
    passages, and right behind the head a passage would be an exact hit.
    """
    piece = max(1, engine.config.chunk_tokens // 4)
    head, *context = before
    tokens, boundaries = list(head), [len(head)]
    for part in context:
        boundaries += range(len(tokens) + piece, len(tokens) + len(part), piece)
        tokens += part
        boundaries.append(len(tokens))
    engine.warm([*tokens, *passage], boundaries=[*boundaries, len(tokens) + len(passage)])


def _alone(engine: KVBoost, prompt: RagPrompt) -> None:
    """Each passage by itself, behind one token: the begin token, or the head's first if there is none."""
    for passage in prompt.passages:
        _warm(engine, [prompt.primer], passage)


def _behind_head(engine: KVBoost, prompt: RagPrompt) -> None:
    """Each passage behind the prompt's own head and a line break, which keeps the first one from being exact.

    That first passage is all but right at its place in the prompt, as it would be in use.
    """
    for passage in prompt.passages:
        _warm(engine, [prompt.head, prompt.line_break], passage)


def _unrelated(engine: KVBoost, prompt: RagPrompt) -> None:
    """Each passage behind the head and two passages of another question, the same two for the whole prompt."""
    for passage in prompt.passages:
        _warm(engine, [prompt.head, *prompt.unrelated[:2]], passage)


def _behind_others(count: int, *, related: bool) -> History:
    def warm(engine: KVBoost, prompt: RagPrompt) -> None:
        rng = random.Random(prompt.question)
        for number, passage in enumerate(prompt.passages):
            own = [other for index, other in enumerate(prompt.passages) if index != number]
            others = own if related else list(prompt.unrelated)
            _warm(engine, [prompt.head, *rng.sample(others, min(count, len(others)))], passage)

    whose = "of its own prompt" if related else "of another question"
    warm.__doc__ = (
        f"Each passage behind the head and {count} passages {whose}, drawn for each (seeded by the question)."
    )
    return warm


def in_another_order(prompt: RagPrompt, rng: random.Random | None = None) -> tuple[list[int], list[int]]:
    """The tokens and boundaries of head and passages in an order that does not begin alike (seeded by the question)."""
    rng, order = rng or random.Random(prompt.question), list(prompt.passages)
    while order[0] == prompt.passages[0]:
        rng.shuffle(order)
    return joined([prompt.head, *order])


def _reordered(count: int) -> History:
    def warm(engine: KVBoost, prompt: RagPrompt) -> None:
        rng = random.Random(prompt.question)
        for _ in range(count):
            tokens, ends = in_another_order(prompt, rng)
            engine.warm(tokens, boundaries=ends)

    warm.__doc__ = f"{count} prompts of the same head and passages in other orders, drawn at random; none begins alike."
    return warm


HISTORIES: dict[str, History] = {
    "alone": _alone,
    "head": _behind_head,
    "unrelated": _unrelated,
    "related": _behind_others(2, related=True),
    "reordered": _reordered(1),
}
# The same with other counts: how many context documents, how related, how many variants.
CONTEXTS: dict[str, History] = {
    **{f"unrelated-{count}": _behind_others(count, related=False) for count in (1, 2, 4)},
    **{f"related-{count}": _behind_others(count, related=True) for count in (1, 2, 4)},
    **{f"reordered-{count}": _reordered(count) for count in (1, 2, 4)},
}


def prefill_before(engine: KVBoost, prompt: RagPrompt, history: str) -> None:
    """Clear the store, then prefill the head and the passages as ``history`` has it, but not the prompt itself."""
    if len(set(prompt.passages)) < 2 and history.startswith(("related", "reordered")):
        raise BenchError(f"the history {history!r} needs two different passages; give --passages 2 or more")
    engine.clear()
    engine.warm(list(prompt.head), boundaries=[len(prompt.head)])
    (HISTORIES | CONTEXTS)[history](engine, prompt)


def add_variants(engine: KVBoost, prompt: RagPrompt, history: str) -> None:
    """Prefill the passages in three more contexts of the kind that ``unrelated`` or ``reordered`` has."""
    if history == "reordered":
        CONTEXTS["reordered-4"](engine, prompt)  # the first of these orders is the one that is there
    elif history == "unrelated":
        others = [pair for pair in permutations(range(len(prompt.unrelated)), 2) if pair != (0, 1)]
        for pair in random.Random(prompt.question).sample(others, min(3, len(others))):
            for passage in prompt.passages:
                _warm(engine, [prompt.head, *(prompt.unrelated[index] for index in pair)], passage)
    else:
        raise ValueError(f"{history} has no other contexts")


def passages_reused(prompt: RagPrompt, reuse: ReuseReport) -> bool:
    """Whether the passages were reused; False if the engine found it cheaper to compute everything.

    Raises where a history is not what it says: more than the head was exact, or a part of the passages is missing.
    """
    if reuse.exact_tokens != len(prompt.head):
        raise BenchError(
            f"{reuse.exact_tokens} tokens were exact hits instead of the head's {len(prompt.head)}: the history holds "
            "the prompt's own order, or the store is too small for it; this is a defect of the benchmark"
        )
    if 0 < reuse.moved_tokens < _MIN_FOUND * prompt.passage_tokens:
        raise BenchError(
            f"only {reuse.moved_tokens} of {prompt.passage_tokens} passage tokens were found again; give the engine's "
            "store more capacity, or report this as a defect of the benchmark"
        )
    return reuse.moved_tokens > 0
