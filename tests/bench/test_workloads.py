"""What each workload repeats, and that all of it follows from the seed."""

from __future__ import annotations

import pytest

from kvboost.bench.workloads import RECIPES, Request, build, encode
from kvboost.errors import ConfigError
from tests.helpers.tokenizer import byte_tokenizer

TOKENS = 3000


def made(name: str, *, seed: int = 1) -> list[Request]:
    return build(RECIPES[name], byte_tokenizer(), tokens=TOKENS, seed=seed)


def text_of(request: Request) -> str:
    return str(byte_tokenizer().decode(request.tokens))


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


@pytest.mark.parametrize("name", ["chat", "document"])
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
    known = set(text_of(first).split("\n\n") + text_of(second).split("\n\n"))
    for request in later:
        passages = text_of(request).split("\n\n")[1:-1]
        assert len(passages) == 6
        assert set(passages) <= known
        assert shared(request.tokens, first.tokens) < 0.6 * len(request.tokens)


def test_prompts_that_are_too_short_are_refused() -> None:
    with pytest.raises(ConfigError, match="give 64 or more"):
        build(RECIPES["chat"], byte_tokenizer(), tokens=10, seed=1)


def test_a_chat_without_a_template_is_written_with_roles() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    request = encode(tokenizer, [{"role": "user", "content": "Hello"}])
    assert text_of(request).endswith("user: Hello\nassistant:")
