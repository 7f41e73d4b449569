"""Prompts of passages and their histories: same ids everywhere, only the head exact, every passage a non-prefix hit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import rag
from benchmarks.common.report import BenchError
from benchmarks.common.stand_ins import make_questions
from kvboost import KVBoost
from kvboost.types import KVBlock, PutOutcome, ReuseReport
from tests.helpers.tokenizer import byte_tokenizer

Tiny = Callable[..., Any]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_questions(tmp_path_factory.mktemp("rag"))


def load(questions: Path, **options: Any) -> list[rag.RagPrompt]:
    return rag.load_prompts(byte_tokenizer(), questions, **{"count": 2, "passages": 3, **options})


def test_a_prompt_is_its_parts_in_the_chat_format(questions: Path) -> None:
    tokenizer = byte_tokenizer()
    prompt = load(questions)[0]
    text = tokenizer.decode(prompt.tokens)
    assert text.startswith("<system>You answer")
    assert text.endswith("<assistant>")
    assert f"Question: {prompt.question}" in text
    assert prompt.answers == ("right 0", "also 0")
    assert prompt.boundaries[0] == len(prompt.head)
    assert prompt.boundaries[-1] == len(prompt.tokens) - len(prompt.tail)
    for start, end, passage in zip(prompt.boundaries, prompt.boundaries[1:], prompt.passages, strict=False):
        assert tuple(prompt.tokens[start:end]) == passage


def test_without_a_chat_format_the_prompt_is_plain_text(questions: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    prompt = rag.load_prompts(tokenizer, questions, count=1, passages=2)[0]
    assert tokenizer.decode(prompt.tokens).startswith("You answer")
    assert tokenizer.decode(prompt.tokens).endswith("\nAnswer:")


def test_passages_are_cut_at_sentences_to_lengths_of_their_own(questions: Path) -> None:
    prompts = load(questions, count=4, passages=4)
    assert prompts == load(questions, count=4, passages=4)
    lengths = [len(passage) for prompt in prompts for passage in prompt.passages]
    assert all(700 <= length <= 1402 for length in lengths)  # one token a byte, and a blank line
    assert len(set(lengths)) > len(lengths) // 2
    assert all(byte_tokenizer().decode(p).endswith(".\n\n") for prompt in prompts for p in prompt.passages)
    assert all(len(p) > 2000 for p in load(questions, whole_passages=True)[0].passages)


def test_cut_at_sentence() -> None:
    assert rag.cut_at_sentence("Short.", 700) == "Short."
    assert rag.cut_at_sentence("word " * 400, 1000) == ("word " * 200)[:-1].rpartition(" ")[0] + " word"
    text = "a" * 799 + ". " + "b" * 300 + ". " + "c" * 900
    assert len(rag.cut_at_sentence(text, 900)) == 800
    assert len(rag.cut_at_sentence(text, 1000)) == 1102


@pytest.mark.parametrize("history", [*rag.HISTORIES, *rag.CONTEXTS])
def test_every_history_reuses_the_passages_and_only_the_head_is_exact(
    history: str, questions: Path, tiny: Tiny
) -> None:
    model = tiny("llama", vocab_size=300, max_position_embeddings=8192)
    engine = KVBoost(model, None, chunk_size=64, quality="high", recompute_strategy="none", recompute_ratio=0.0)
    for prompt in load(questions, passages=3):
        rag.prefill_before(engine, prompt, history)
        reuse = engine.prefill(prompt.tokens, boundaries=prompt.boundaries).reuse
        assert rag.passages_reused(prompt, reuse)
        assert (reuse.exact_tokens, reuse.moved_tokens) == (len(prompt.head), prompt.passage_tokens)


def test_behind_other_documents_a_passage_is_stored_once_and_behind_what_the_history_says(
    questions: Path, tiny: Tiny
) -> None:
    """Fails if a context document leaves a variant of itself behind: the store might then take that one."""
    engine = KVBoost(tiny("llama", vocab_size=300, max_position_embeddings=8192), None, chunk_size=64, quality="exact")
    prompt = load(questions, passages=4)[0]
    first = prompt.passages[1][:24]
    kept: list[KVBlock] = []
    put = engine._store.put

    def noting(block: KVBlock) -> PutOutcome:
        kept.append(block)
        return put(block)

    engine._store.put = noting  # type: ignore[method-assign]
    starts = {}
    for history in ("alone", "head", "unrelated", "related"):
        kept.clear()
        rag.prefill_before(engine, prompt, history)
        tokens = b"".join(token.to_bytes(4, "little") for token in first)
        starts[history] = [block.start for block in kept if block.tokens.startswith(tokens)]
    head, others = len(prompt.head), sum(map(len, prompt.unrelated[:2]))
    assert starts["alone"] == [1]
    assert starts["head"] == [head + 1]
    assert starts["unrelated"] == [head + others]
    assert len(starts["related"]) == 1
    assert starts["related"][0] > head + 2 * 700


def test_a_reading_that_is_not_what_the_history_says_is_refused(questions: Path) -> None:
    prompt = load(questions)[0]
    right = ReuseReport(len(prompt.head), prompt.passage_tokens, 0, len(prompt.tail), bitwise=False)
    assert rag.passages_reused(prompt, right)
    assert not rag.passages_reused(prompt, replace(right, moved_tokens=0))
    with pytest.raises(BenchError, match="exact hits"):
        rag.passages_reused(prompt, replace(right, exact_tokens=len(prompt.head) + 10))
    with pytest.raises(BenchError, match="found again"):
        rag.passages_reused(prompt, replace(right, moved_tokens=prompt.passage_tokens // 2))


def test_bad_data_says_what_to_do(tmp_path: Path, questions: Path, tiny: Tiny) -> None:
    with pytest.raises(BenchError, match="give --data"):
        load(tmp_path / "absent.json")
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps([{"question": "why?"}]))
    with pytest.raises(BenchError, match="ctxs"):
        load(wrong)
    with pytest.raises(BenchError, match="--passages"):
        load(questions, passages=50)
    with pytest.raises(BenchError, match="--prompts"):
        load(questions, count=500)
    engine = KVBoost(tiny("llama", vocab_size=300, max_position_embeddings=8192), None)
    with pytest.raises(BenchError, match="--passages 2"):
        rag.prefill_before(engine, load(questions, passages=1)[0], "reordered")
