"""What each workload repeats, and that all of it follows from the seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost.bench.report import BenchError
from kvboost.bench.workloads import RECIPES, Encoder, Request, build
from tests.helpers.tokenizer import byte_tokenizer

TOKENS = 3000


def made(name: str, *, seed: int = 1, data: Path | None = None) -> list[Request]:
    return build(name, byte_tokenizer(), tokens=TOKENS, seed=seed, data=data)


def shared(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_workload_follows_from_its_seed_and_is_about_as_long_as_asked(name: str) -> None:
    requests = made(name)
    assert requests == made(name)
    assert requests != made(name, seed=2)
    assert 0.6 * TOKENS < max(len(request.tokens) for request in requests) < 1.6 * TOKENS
    assert any(request.counts for request in requests)


@pytest.mark.parametrize("name", ["chat", "few-shot", "agent", "document"])
def test_prompts_that_count_begin_as_an_earlier_one(name: str) -> None:
    requests = made(name)
    for number, request in enumerate(requests):
        if request.counts:
            best = max(shared(request.tokens, earlier.tokens) for earlier in requests[:number])
            assert best > 0.5 * len(request.tokens)


def test_random_prompts_share_nothing() -> None:
    requests = made("random")
    assert all(request.counts for request in requests)
    assert max(shared(a.tokens, b.tokens) for a in requests for b in requests if a is not b) < 32


def test_a_document_is_known_to_95_percent() -> None:
    requests = made("document")
    again, before = requests[-1], requests[-2]
    assert 0.9 < shared(again.tokens, before.tokens) / len(again.tokens) < 0.98


def test_rag_shows_every_passage_first_and_then_in_other_orders() -> None:
    first, second, *later = made("rag")
    assert [request.counts for request in (first, second, *later)] == [False, False] + [True] * len(later)
    known = set(first.text.split("\n\n") + second.text.split("\n\n"))
    for request in later:
        passages = request.text.split("\n\n")[1:-1]
        assert len(passages) == 6
        assert set(passages) <= known
        assert shared(request.tokens, first.tokens) < 0.6 * len(request.tokens)


def test_earlier_thinking_is_stripped() -> None:
    requests = made("reasoning")
    assert "<think>" in requests[1].text
    assert "<think>" not in requests[2].text
    assert "Tool result:" in requests[2].text


def test_passages_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "questions.json"
    passages = [{"text": f"Passage {number} says so. " * 60} for number in range(6)]
    file.write_text(json.dumps([{"question": f"q{n}", "answers": [], "ctxs": passages} for n in range(4)]))
    assert "Passage 3 says so." in made("rag", data=file)[0].text + made("rag", data=file)[1].text
    file.write_text(json.dumps([{"question": "q", "answers": [], "ctxs": passages[:2]}]))
    with pytest.raises(BenchError, match="give more --data"):
        made("rag", data=file)
    for ctxs in ([{"title": "t"}] * 2, ["a", "b"]):
        file.write_text(json.dumps([{"question": "q", "answers": [], "ctxs": ctxs}]))
        with pytest.raises(BenchError, match="must be an object with text"):
            made("rag", data=file)
    file.write_text(json.dumps([{"question": "q", "answers": [], "ctxs": None}]))
    with pytest.raises(BenchError, match="must hold a list of objects"):
        made("rag", data=file)


def test_prompts_that_are_too_short_are_refused() -> None:
    with pytest.raises(BenchError, match="give 64 or more"):
        build("chat", byte_tokenizer(), tokens=10, seed=1)


def test_a_chat_without_a_template_is_written_with_roles() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    request = Encoder(tokenizer).request([{"role": "user", "content": "Hello"}])
    assert request.text.endswith("user: Hello\nassistant:")
